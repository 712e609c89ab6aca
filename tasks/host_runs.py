"""Flow runs on the host that holds the data, ordered from wherever the pipeline runs."""

import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from prefect import Flow, State, get_client, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.futures import PrefectFuture
from prefect.states import Cancelling

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.preparation.environment import source_version
from tasks.jobs import job_task_name

POLL_SECONDS = 1.0


@task(name="begin", task_run_name="{name} at work", cache_policy=NO_CACHE)
def begin(name: str, config: PipelineConfig) -> UUID:
    """Order the deployment `<name>/host`, and wait until its job works or there is nothing to do.

    Returns the id of the flow run. The key holds the attempt: with the same key a failed run would
    be handed back for ever. Raises DraftworksError with the run's own message when it failed.
    """
    attempt = (runtime.flow_run.run_count, runtime.task_run.run_count)
    # Called outside an event loop, so it blocks and returns the run itself.
    run: Any = run_deployment(
        f"{name}/host",
        parameters={"config": config.model_dump(mode="json")},
        idempotency_key=f"{runtime.flow_run.id}-{name}-{attempt}",
        timeout=0,
    )
    run_id: UUID = run.id
    with get_client(sync_client=True) as client:
        while not _ended(run := client.read_flow_run(run_id)):
            if _at_work(client, run_id, name):
                return run_id
            time.sleep(POLL_SECONDS)
    _require_completed(name, run)
    return run_id


@task(name="end", task_run_name="{name}", cache_policy=NO_CACHE)
def end(name: str, run_id: UUID) -> str:
    """Wait for a run on the host, however long it takes. Returns the message of its last state.

    Raises DraftworksError with the run's own message unless it completed.
    """
    with get_client(sync_client=True) as client:
        while not _ended(run := client.read_flow_run(run_id)):
            time.sleep(POLL_SECONDS)
    _require_completed(name, run)
    get_run_logger().info("%s completed in %s", name, run.total_run_time)
    return _message(run)


class Ordered:
    """A stage on the host as two futures: `begun`, when its job works, and `ended`.

    It is ordered when the stages `beside` which it prepares itself have begun, or without
    preparation (`jobs.prepare` off) when they have ended.
    """

    def __init__(self, name: str, config: PipelineConfig, beside: Sequence["Ordered"] = ()) -> None:
        ahead = config.jobs.prepare
        # The very source that orders the work must do it.
        requires = {"draftworks": f"=={source_version()}", **config.jobs.requires}
        config = config.model_copy(
            update={
                "jobs": config.jobs.model_copy(update={"requires": requires}),
                "gates": config.gates.model_copy(update={"on_incomplete": "wait"})
                if ahead
                else config.gates,
            }
        )
        before = [stage.begun if ahead else stage.ended for stage in beside]
        # Prefect's stubs lose the parameters of `submit` beside `wait_for`.
        self.begun: PrefectFuture[UUID] = begin.submit(name, config, wait_for=before)  # type: ignore[call-overload]
        self.ended: PrefectFuture[str] = end.submit(name, self.begun)

    def result(self) -> str:
        """Wait for its end. Raises with the run's own words when it failed."""
        self.begun.result()
        return self.ended.result()


def complete(stages: Sequence[Ordered]) -> None:
    """Wait for all of them. When one fails, those that wait for it are cancelled, for their gates
    would never open; what works already goes on to its end. Raises with its words then."""
    try:
        for stage in stages:
            stage.result()
    except Exception:
        _cancel(UUID(runtime.flow_run.id), "an earlier stage failed", waiting_only=True)
        for stage in stages:
            stage.ended.wait()
        raise


def run_on_host(name: str, config: PipelineConfig) -> str:
    """Order a run and wait for its end."""
    return end(name, begin(name, config))


def cancel_host_runs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancellation hook: what the pipeline started on hosts is cancelled with it."""
    _cancel(flow_run.id, "the pipeline was cancelled", waiting_only=False)


def _cancel(pipeline: UUID, reason: str, *, waiting_only: bool) -> None:
    children = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[pipeline]))
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=children):
            if _ended(run):
                continue
            name = client.read_flow(run.flow_id).name
            if not (waiting_only and _at_work(client, run.id, name)):
                client.set_flow_run_state(run.id, Cancelling(message=reason))


def _require_completed(name: str, run: FlowRun) -> None:
    state = run.state
    if state is None or not state.is_completed():
        raise DraftworksError(f"{name} is {state.name if state else 'lost'}: {_message(run)}")


def _message(run: FlowRun) -> str:
    return (run.state.message if run.state else None) or ""


def _ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def _at_work(client: SyncPrefectClient, run_id: UUID, name: str) -> bool:
    """Whether the run has come to its job."""
    jobs = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])),
        task_run_filter=TaskRunFilter(name=TaskRunFilterName(any_=[job_task_name(name)])),
    )
    return any(job.state is not None and not job.state.is_pending() for job in jobs)
