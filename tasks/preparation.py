"""Preparation: everything that can be known before a stage starts is checked before it starts."""

from typing import TYPE_CHECKING

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from tasks.places import stage_of, workspace_of

if TYPE_CHECKING:
    from draftworks.stages.base import Check


@task(name="plan", cache_policy=NO_CACHE)
def show_plan(config: PipelineConfig) -> None:
    """What each stage will make, as a table, before anything starts."""
    from draftworks.stages import plan_all
    from draftworks.stages.base import size

    create_table_artifact(
        key="plan",
        table=[
            {
                "stage": plan.stage,
                "makes": f"{plan.units:,} {plan.unit}",
                "disk": size(plan.bytes),
                "assumes": "; ".join(plan.assumptions),
            }
            for plan in plan_all(config, workspace_of(config))
        ],
        description=f"Plan of {config.name}",
    )


@task(name="check everything", cache_policy=NO_CACHE)
def check_everything(config: PipelineConfig) -> None:
    """The checks of all stages. Raises DraftworksError naming those that failed."""
    from draftworks.stages import check_all

    _require("preparation", check_all(config, workspace_of(config)))


@task(name="prepare", task_run_name="prepare: {name}", cache_policy=NO_CACHE)
def prepare(name: str, config: PipelineConfig) -> None:
    """The checks of one stage. Raises DraftworksError naming those that failed."""
    checks = stage_of(name, config).prepare()
    _require(f"preparation-{name}", [(name, item) for item in checks])


def _require(key: str, checks: "list[tuple[str, Check]]") -> None:
    """Show the checks as a table; raise for those that failed."""
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
        description="Checks before any work starts",
    )
    failed = [f"{stage}, {item.name}: {item.detail}" for stage, item in checks if not item.passed]
    if failed:
        raise DraftworksError("; ".join(failed))
