"""A stage's job under Prefect: launched or attached to, watched, never run twice.

The job is a process of its own and survives this task, its flow and its worker. What the task
adds is a progress artifact, retries for a job that was lost, and the job's own words when it
failed.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import Flow, State, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.supervision.job import Job, Status
from draftworks.supervision.job import State as JobState
from draftworks.workspace import commit_json
from tasks.places import experiment, preparation_of, stage_of

POLL_SECONDS = 0.5
ARTIFACT_SECONDS = 5.0
CONFIG = "CONFIG"


class JobLostError(Exception):
    """The job died without a word (killed, out of memory, power cut). Starting again resumes."""


def can_pass(_task: Any, _run: Any, state: State[Any]) -> bool:
    """A lost job is started again; what failed for a reason is not."""
    return isinstance(state.result(raise_on_failure=False), JobLostError)


def job_task_name(name: str) -> str:
    """Of the task run that has a stage's job. Its start tells that the stage is at work."""
    return f"job: {name}"


@task(
    name="job",
    task_run_name="job: {name}",
    retries=3,
    retry_delay_seconds=[2, 20, 120],
    retry_jitter_factor=0.3,
    retry_condition_fn=can_pass,
    cache_policy=NO_CACHE,
)
def run_job(name: str, config: PipelineConfig, inputs: Mapping[str, str]) -> None:
    """Start the stage's job or attach to it, and watch it to its end.

    inputs: digest of each input as its gate saw it; the job holds them against the files once
    more. Raises JobLostError when it was killed, DraftworksError with its own message when it
    failed.
    """
    job = Job(stage_of(name, config).job_directory)
    seen = [word for source, digest in inputs.items() for word in ("--input", f"{source}={digest}")]
    started = launch(job, config, ["run", CONFIG, name, *seen], os.environ)
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


def launch(
    job: Job, config: PipelineConfig, command: Sequence[str], environment: Mapping[str, str]
) -> bool:
    """Start `python -m draftworks <command>` as this job unless it runs already, with the
    interpreter that the config names. CONFIG in it stands for the file with the config.

    Returns whether it started. Raises DraftworksError when that interpreter cannot be run.
    """
    settings = job.directory / "config.json"
    commit_json(settings, config.model_dump(mode="json"))
    python = config.jobs.python or sys.executable
    words = [str(settings) if word is CONFIG else word for word in command]
    try:
        return job.launch_or_attach([python, "-m", "draftworks", *words], environment)
    except OSError as error:
        raise DraftworksError(
            f"jobs.python {python} cannot be run: {error.strerror}. Name the interpreter of the "
            "environment that the jobs run in."
        ) from None


def stop_job(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancellation hook: ask what runs for the cancelled stage to end at its next unit."""
    config = experiment(PipelineConfig.model_validate(flow_run.parameters["config"]))
    stage = stage_of(flow.name, config)
    for job in (Job(stage.job_directory), preparation_of(flow.name, config).job):
        job.stop()


def _watch(name: str, job: Job) -> None:
    """Show the job's status until it is gone."""
    logger = get_run_logger()
    artifact: Any = create_progress_artifact(0.0, key=f"{name}-progress", description="starting")
    phase, shown = "", 0.0
    while job.state() in (JobState.RUNNING, JobState.STALLED):
        status = job.status()
        if status is not None:
            if status.phase != phase:
                phase = status.phase
                logger.info("%s: %s", name, phase)
            if time.monotonic() - shown > ARTIFACT_SECONDS:
                shown = time.monotonic()
                update_progress_artifact(artifact, _percent(status), _describe(status, job))
        time.sleep(POLL_SECONDS)
    if status := job.status():
        update_progress_artifact(artifact, _percent(status), _describe(status, job))


def _percent(status: Status) -> float:
    return round(100 * status.done / status.total, 1) if status.total else 0.0


def _describe(status: Status, job: Job) -> str:
    """One line: phase, count, what remains, last heartbeat."""
    beat = time.strftime("%H:%M:%S UTC", time.gmtime(status.heartbeat))
    estimate = job.estimate()
    togo = f", {estimate.sentence}" if estimate else ""
    return f"{status.counted}{togo}; heartbeat {beat}"
