"""Gates: a stage may start when the files say that its inputs are complete. Never cached."""

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from tasks.places import stage_of


@task(name="gate", task_run_name="gate: {name}", cache_policy=NO_CACHE)
def gate(name: str, config: PipelineConfig) -> str:
    """Read every byte of a stage's output. Returns its digest.

    Raises DraftworksError with the true count when it is not complete or not sound.
    """
    verdict = stage_of(name, config).verify()
    create_table_artifact(
        key=f"gate-{name}",
        table=[
            {
                "stage": verdict.stage,
                "found": f"{verdict.done:,} of {verdict.expected:,} {verdict.unit}",
                "problems": "; ".join(
                    f"{row['count']} {row['found']}: {row['which']}" for row in verdict.rows()
                )
                or "none",
                "checked": verdict.checked,
                "gate": "open" if verdict.complete else "shut",
                "digest": verdict.digest[:16],
            }
        ],
        description=f"Gate behind {name}, by reading the files",
    )
    if not verdict.complete:
        raise DraftworksError(f"not yet. {verdict.sentence}")
    get_run_logger().info(verdict.sentence)
    return verdict.digest


def found(name: str, config: PipelineConfig) -> bool:
    """Whether the work is there already, whoever did it."""
    return stage_of(name, config).verify().complete
