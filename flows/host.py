"""The flows of a host: checks before any work, one flow per stage, the report.

A stage is: preparation, gate of its inputs, job, gate of its output. Each flow runs alone too, from
its own deployment, on the host that holds the data.
"""

from typing import Any, Literal

from prefect import State, flow, get_run_logger
from prefect.states import Completed

from blocks import with_blocks
from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from tasks.gates import NotYetError, found, gate
from tasks.jobs import run_job, stop_job
from tasks.places import experiment, stage_of
from tasks.preparation import (
    check_everything,
    preparing,
    ready,
    show_check,
    show_checks,
    show_plan,
    warn,
)
from tasks.reports import make_report

StageName = Literal["generate", "vocab", "extract", "train", "evaluate", "publish"]


@flow(name="check", flow_run_name="{config.name}")
def check(config: PipelineConfig) -> None:
    """Everything that can be known before any work, and what the work will need."""
    config = with_blocks(config)
    planned = show_plan(config, return_state=True)
    check_everything(config)  # says more than a plan that could not be made
    planned.result()


@flow(name="generate", flow_run_name="{config.name}", on_cancellation=[stop_job])
def generate(config: PipelineConfig) -> None:
    """The target answers the prompts."""
    _run("generate", config)


@flow(name="vocab", flow_run_name="{config.name}", on_cancellation=[stop_job])
def vocab(config: PipelineConfig) -> None:
    """The tokens that the drafter can propose."""
    _run("vocab", config)


@flow(name="extract", flow_run_name="{config.name}", on_cancellation=[stop_job])
def extract(config: PipelineConfig) -> None:
    """The target's hidden states of every sample."""
    _run("extract", config)


@flow(name="train", flow_run_name="{config.name}", on_cancellation=[stop_job])
def train(config: PipelineConfig) -> None:
    """The drafter, by training-time test."""
    _run("train", config)


@flow(name="evaluate", flow_run_name="{config.name}", on_cancellation=[stop_job])
def evaluate(config: PipelineConfig) -> None:
    """Acceptance by real speculation, beside the estimate."""
    _run("evaluate", config)


@flow(name="publish", flow_run_name="{config.name}", on_cancellation=[stop_job])
def publish(config: PipelineConfig) -> None:
    """The drafter in the forms that engines load."""
    _run("publish", config)


@flow(name="report", flow_run_name="{config.name}")
def report(config: PipelineConfig) -> State[Any]:
    """The figures of a finished pipeline. The state's message is the summary, for who waits."""
    return Completed(message=make_report(experiment(config)))


@flow(name="prepare", flow_run_name="prepare {name}: {config.name}")
def prepare(name: StageName, config: PipelineConfig) -> None:
    """The checks of one stage and a run of it on a few samples, beside the stage that runs now.

    Alone, from its own deployment: to prove a remedy before the stage's turn comes.
    """
    config = experiment(with_blocks(config))
    checks = []
    for item in preparing(name, config):
        checks.append((name, item))
        if not show_check(item, return_state=True).is_completed():
            warn(name, item, config)
    if failed := show_checks(f"preparation-{name}", checks):
        raise DraftworksError(failed)


def _run(name: StageName, config: PipelineConfig) -> None:
    config = experiment(with_blocks(config))
    sources = [source.name for source in stage_of(name, config).inputs]
    there = found(name, config)
    if sources and config.jobs.prepare and not there:
        prepare(name, config, return_state=True)  # a failure has warned; its remedy may yet come
    wait = config.gates.on_incomplete == "wait"
    inputs = {source: gate(source, config, wait=wait) for source in sources}
    if there:
        get_run_logger().info("%s is there already; nothing to do", name)
        return
    if not ready(name, config):
        prepare(name, config)
    run_job(name, config, inputs)
    try:
        gate(name, config)
    except NotYetError as refusal:
        if not refusal.damaged:
            raise
        run_job(name, config, inputs)  # sets aside what is damaged, and makes just that again
        gate(name, config)
