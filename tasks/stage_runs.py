"""A stage as a flow run of its own, on the pool of the host that holds the data."""

from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.deployments import run_deployment

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError

POLL_SECONDS = 1.0


@task(name="stage", task_run_name="{name}", cache_policy=NO_CACHE)
def run_stage(name: str, config: PipelineConfig) -> None:
    """Run the deployment `<name>/host` and wait for it, however long it takes.

    The key holds the attempt: with the same key a failed run would be handed back for ever.
    Raises DraftworksError with the run's own message unless it completed.
    """
    attempt = (runtime.flow_run.run_count, runtime.task_run.run_count)
    # Called outside an event loop, so it blocks and returns the run itself.
    run: Any = run_deployment(
        f"{name}/host",
        parameters={"config": config.model_dump(mode="json")},
        idempotency_key=f"{runtime.flow_run.id}-{name}-{attempt}",
        poll_interval=POLL_SECONDS,
        timeout=None,
    )
    if run.state is None or not run.state.is_completed():
        state = run.state.name if run.state else "unknown"
        raise DraftworksError(f"{name} is {state}: {run.state.message if run.state else ''}")
    get_run_logger().info("%s completed in %s", name, run.total_run_time)
