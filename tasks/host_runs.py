"""A flow run on the host that holds the data, started from wherever the pipeline runs."""

from typing import Any

from prefect import Flow, State, get_client, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.states import Cancelling

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError

POLL_SECONDS = 1.0


@task(name="on host", task_run_name="{name}", cache_policy=NO_CACHE)
def run_on_host(name: str, config: PipelineConfig) -> str:
    """Run the deployment `<name>/host` and wait for it, however long it takes.

    Returns the message of its last state. The key holds the attempt: with the same key a failed
    run would be handed back for ever. Raises DraftworksError with the run's own message unless
    it completed.
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
    message = (run.state.message if run.state else None) or ""
    if run.state is None or not run.state.is_completed():
        raise DraftworksError(f"{name} is {run.state.name if run.state else 'lost'}: {message}")
    get_run_logger().info("%s completed in %s", name, run.total_run_time)
    return message


def cancel_host_runs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancellation hook: what the pipeline started on hosts is cancelled with it."""
    children = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run.id]))
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=children):
            if run.state is not None and not run.state.is_final():
                client.set_flow_run_state(run.id, Cancelling(message="the pipeline was cancelled"))
