"""Preparation: everything that can be known before a stage starts is proved before it starts."""

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect import get_client, get_run_logger, runtime, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.blocks.core import Block
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.actions import ArtifactCreate
from prefect.events import emit_event

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.supervision.job import State as JobState
from tasks.jobs import CONFIG, launch
from tasks.places import preparation_of, workspace_of

if TYPE_CHECKING:
    from draftworks.stages.base import Check

POLL_SECONDS = 0.5


@task(name="plan", cache_policy=NO_CACHE)
def show_plan(config: PipelineConfig) -> None:
    """What each stage will make, as a table, before anything starts."""
    from draftworks.report.plan import advise, charts
    from draftworks.stages import plan_all
    from draftworks.stages.base import size

    where = workspace_of(config)
    plans = plan_all(config, where)
    create_table_artifact(
        key="plan",
        table=[
            {
                "stage": plan.stage,
                "makes": f"{plan.units:,} {plan.unit}",
                "time": plan.time,
                "GPUs": plan.gpus or "-",
                "disk": size(plan.bytes),
                "assumes": "; ".join(plan.assumptions),
            }
            for plan in plans
        ],
        description=f"Plan of {config.name}: {size(sum(plan.bytes for plan in plans))} on disk",
    )
    if text := advise(config, where) + charts(config, where, plans):
        create_markdown_artifact(text, key="plan-chart", description="Hours and GPUs, drawn")


@task(name="check everything", cache_policy=NO_CACHE)
def check_everything(config: PipelineConfig) -> None:
    """The checks of all stages. Raises DraftworksError naming those that failed."""
    from draftworks.stages import check_all

    if failed := show_checks("preparation", check_all(config, workspace_of(config))):
        raise DraftworksError(failed)


def preparing(name: str, config: PipelineConfig) -> Iterator["Check"]:
    """Prepare a stage in the environment of its job, or attach to who does. Yields each check as
    it is made, until that job has ended.

    It works beside a running stage, so it takes what processor time that one leaves.
    """
    from draftworks.stages.base import Check

    preparation = preparation_of(name, config)
    job = preparation.job
    if not job.alive():
        preparation.forget()
    launch(job, config, ["prepare", CONFIG, name], {**os.environ, "OMP_NUM_THREADS": "1"})
    told, alive = 0, True
    while alive:
        alive = job.alive()
        found = preparation.checks()
        yield from found[told:]
        told = len(found)
        time.sleep(POLL_SECONDS if alive else 0)
    if job.state() is not JobState.FINISHED and all(item.passed for item in found):
        words = job.exit().get("error") or job.tail()
        yield Check("its own job", False, f"{job.state().value}: {words}")


@task(name="check", task_run_name="{item.name}", cache_policy=NO_CACHE)
def show_check(item: "Check") -> str:
    """One check as a task of its own: what was found, or what is wrong and what to do."""
    if not item.passed:
        raise DraftworksError(item.detail)
    get_run_logger().info("%s: %s", item.name, item.detail)
    return item.detail


@task(name="ready", task_run_name="ready: {name}", cache_policy=NO_CACHE)
def ready(name: str, config: PipelineConfig) -> bool:
    """Whether the stage is prepared, and nothing about that has grown stale since."""
    reasons = preparation_of(name, config).stale()
    for reason in reasons:
        get_run_logger().info("%s is prepared now, because %s", name, reason)
    return not reasons


def warn(name: str, item: "Check", config: PipelineConfig) -> None:
    """Tell the pipeline that is running of a failed check of the next stage: an event, an artifact,
    and the notification block of the config."""
    run = runtime.flow_run.root_flow_run_id
    text = f"{name} is not ready. {item.name}: {item.detail}"
    settings = preparation_of(name, config).job.directory / "config.json"
    again = f"{config.jobs.python or 'python'} -m draftworks prepare {settings} {name}"
    get_run_logger().warning(text)
    emit_event(
        "draftworks.preparation.failed",
        resource={
            "prefect.resource.id": f"draftworks.stage.{config.name}.{name}",
            "prefect.resource.name": name,
        },
        related=[
            {"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.role": "flow-run"}
        ],
        payload={"stage": name, "check": item.name, "detail": item.detail},
    )
    with get_client(sync_client=True) as client:
        client.create_artifact(
            ArtifactCreate(
                key=f"not-ready-{name}",
                type="markdown",
                data=f"# {name} is not ready\n\n**{item.name}**: {item.detail}\n\n"
                "Mend it while the current stage goes on, then prove it: run the deployment "
                f"`prepare/host` for {name}, or on the host\n\n    {again}\n",
                flow_run_id=UUID(run),
            )
        )
    if config.jobs.notify:
        try:
            block: Any = Block.load(config.jobs.notify)
            block.notify(text, subject=f"Draftworks: {config.name}")
        except Exception as fault:  # whatever a block raises, the checks go on
            get_run_logger().warning("block %s could not notify: %s", config.jobs.notify, fault)


def show_checks(key: str, checks: "Sequence[tuple[str, Check]]") -> str:
    """The checks as a table artifact. Returns those that failed, in one sentence."""
    create_table_artifact(
        key=key,
        table=[
            {
                "stage": stage,
                "check": item.name,
                "result": "ok" if item.passed else "FAILED",
                "found": item.detail,
            }
            for stage, item in checks
        ],
        description="What was proved before the work starts",
    )
    return "; ".join(
        f"{stage}, {item.name}: {item.detail}" for stage, item in checks if not item.passed
    )
