"""A stage's job under Prefect: launched or attached to, watched, never run twice.

The job is a process of its own and survives this task, its flow and its worker. What the task
adds is a progress artifact, retries for a job that was lost, and the job's own words when it
failed.
"""

import os
import sys
import time
from typing import Any

from prefect import Flow, State, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.estimates.remaining import Pace
from draftworks.supervision.job import Job, Status
from draftworks.supervision.job import State as JobState
from draftworks.workspace import commit_json
from tasks.places import stage_of

POLL_SECONDS = 0.5
ARTIFACT_SECONDS = 5.0


class JobLostError(Exception):
    """The job died without a word (killed, out of memory, power cut). Starting again resumes."""


def can_pass(_task: Any, _run: Any, state: State[Any]) -> bool:
    """A lost job is started again; what failed for a reason is not."""
    return isinstance(state.result(raise_on_failure=False), JobLostError)


@task(
    name="job",
    task_run_name="job: {name}",
    retries=3,
    retry_delay_seconds=[2, 20, 120],
    retry_jitter_factor=0.3,
    retry_condition_fn=can_pass,
    cache_policy=NO_CACHE,
)
def run_job(name: str, config: PipelineConfig) -> None:
    """Start the stage's job or attach to it, and watch it to its end.

    Raises JobLostError when it was killed, DraftworksError with its own message when it failed.
    """
    stage = stage_of(name, config)
    job = Job(stage.job_directory)
    settings = job.directory / "config.json"
    commit_json(settings, config.model_dump(mode="json"))
    command = [sys.executable, "-m", "draftworks", "run", str(settings), name]
    started = job.launch_or_attach(command, os.environ)
    get_run_logger().info("%s %s", "started" if started else "attached to", job.directory)
    _watch(name, job)
    match job.state():
        case JobState.FINISHED:
            return
        case JobState.FAILED:
            raise DraftworksError(f"{name} failed: {job.exit()['error']}")
        case JobState.STOPPED:
            raise DraftworksError(f"{name} was stopped on request; start it again to go on")
        case state:
            raise JobLostError(f"{name} is {state.value}. Last lines of its log:\n{job.tail()}")


def stop_job(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancellation hook: ask the job of the cancelled stage to end at its next unit."""
    config = PipelineConfig.model_validate(flow_run.parameters["config"])
    Job(stage_of(flow.name, config).job_directory).stop()


def _watch(name: str, job: Job) -> None:
    """Show the job's status until it is gone."""
    logger = get_run_logger()
    artifact: Any = create_progress_artifact(0.0, key=f"{name}-progress", description="starting")
    pace, phase, shown = Pace(), "", 0.0
    while job.state() in (JobState.RUNNING, JobState.STALLED):
        status = job.status()
        if status is not None:
            if status.phase != phase:
                pace, phase = Pace(), status.phase  # another phase counts something else
                logger.info("%s: %s", name, phase)
            if status.total:  # before, what an earlier run committed is not counted yet
                pace.observe(status.heartbeat, status.done)
            if time.monotonic() - shown > ARTIFACT_SECONDS:
                shown = time.monotonic()
                update_progress_artifact(artifact, _percent(status), _describe(status, pace))
        time.sleep(POLL_SECONDS)
    if status := job.status():
        update_progress_artifact(artifact, _percent(status), _describe(status, pace))


def _percent(status: Status) -> float:
    return round(100 * status.done / status.total, 1) if status.total else 0.0


def _describe(status: Status, pace: Pace) -> str:
    """One line: phase, count, what remains, last heartbeat."""
    beat = time.strftime("%H:%M:%S UTC", time.gmtime(status.heartbeat))
    counted = f"{status.done:,} of {status.total:,} {status.unit}"
    left = status.total - status.done
    estimate = pace.remaining(left)
    togo = "" if not left else f", {estimate.sentence if estimate else 'estimating'}"
    return f"{status.phase}: {counted}{togo}; heartbeat {beat}"
