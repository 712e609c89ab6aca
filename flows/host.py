"""The flows of a host: checks before any work, one flow per stage, the report.

A stage is: gate of its inputs, preparation, job, gate of its output. Each flow runs alone too, from
its own deployment, on the host that holds the data.
"""

from typing import Any

from prefect import State, flow, get_run_logger
from prefect.states import Completed

from blocks import with_blocks
from draftworks.config import PipelineConfig
from tasks.gates import found, gate
from tasks.jobs import run_job, stop_job
from tasks.places import stage_of
from tasks.preparation import check_everything, prepare, show_plan
from tasks.reports import make_report


@flow(name="check", flow_run_name="{config.name}")
def check(config: PipelineConfig) -> None:
    """Everything that can be known before any work, and what the work will need."""
    config = with_blocks(config)
    check_everything(config)
    show_plan(config)


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
    return Completed(message=make_report(config))


def _run(name: str, config: PipelineConfig) -> None:
    config = with_blocks(config)
    for source in stage_of(name, config).inputs:
        gate(source.name, config)
    if found(name, config):
        get_run_logger().info("%s is there already; nothing to do", name)
        return
    prepare(name, config)
    run_job(name, config)
    gate(name, config)
