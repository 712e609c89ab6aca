"""Gates: a stage may start when the files say that its inputs are complete. Never cached."""

import json
import math
import platform
import time
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from prefect import get_client, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.actions import ArtifactUpdate

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.supervision.job import Job
from draftworks.supervision.job import State as JobState
from tasks.places import stage_of

if TYPE_CHECKING:
    from draftworks.stages.base import Verdict

LOOK_SECONDS = (0.5, 60.0)
"""Shortest and longest time between two looks of a gate that waits."""
SHOW_SECONDS = 30.0
"""Between two updates of what a waiting gate shows."""


class NotYetError(DraftworksError):
    """A gate is shut. `damaged`: whether running the stage again would mend it."""

    def __init__(self, message: str, *, damaged: bool) -> None:
        super().__init__(message)
        self.damaged = damaged


@task(name="gate", task_run_name="gate: {name}", cache_policy=NO_CACHE)
def gate(name: str, config: PipelineConfig, *, wait: bool = False) -> str:
    """Read a stage's output. Returns its digest.

    Not complete: raises NotYetError with the true count, or with `wait` watches until it is. What
    has been read is not read again meanwhile, so the gate opens within seconds of the last unit.
    """
    from draftworks.records.inspection import Seen

    stage = stage_of(name, config)
    job = Job(stage.job_directory)
    seen, artifact, shown = Seen(), None, -math.inf
    while True:
        started = time.monotonic()
        failure = job.exit().get("error") if job.state() is JobState.FAILED else None
        verdict = stage.verify(share=0)
        # That units are missing is said at once, without reading those that are there.
        if wait or stage.accepts(verdict) or not verdict.sound:
            verdict = stage.verify(share=config.gates.share, seen=seen)
        opens = stage.accepts(verdict)
        sentence = _sentence(verdict, job, failure)
        if opens or time.monotonic() - shown > SHOW_SECONDS:
            shown = time.monotonic()
            artifact = _show(artifact, verdict, sentence, opens=opens)
            if not opens and wait:
                get_run_logger().info("waiting for %s", sentence)
        if opens:
            get_run_logger().info(sentence)
            return verdict.digest
        if not wait or failure:
            raise NotYetError(f"not yet. {sentence}", damaged=bool(verdict.damaged))
        shortest, longest = LOOK_SECONDS
        time.sleep(min(longest, max(shortest, 5 * (time.monotonic() - started))))


@task(name="output gate", task_run_name="gate: {name}", cache_policy=NO_CACHE)
def found(name: str, config: PipelineConfig) -> bool:
    """Whether the work is there already, whoever did it."""
    stage = stage_of(name, config)
    looks = (0.0, config.gates.share)  # the second only if the first finds all there
    return all(stage.accepts(stage.verify(share=share)) for share in looks)


def _sentence(verdict: "Verdict", job: Job, failure: str | None) -> str:
    """The count, and what is known of the rest: when, and whether anything works on it."""
    if verdict.complete:
        return verdict.sentence
    host = platform.node()
    if failure:
        return f"{verdict.sentence}; its job failed: {failure}"
    if not job.alive():
        return f"{verdict.sentence}; no job is running on {host}"
    estimate = job.estimate()
    togo = f", {estimate.sentence}" if estimate else ""
    return f"{verdict.sentence}{togo}, job running on {host}"


def _show(artifact: UUID | None, verdict: "Verdict", sentence: str, *, opens: bool) -> UUID:
    """Create the gate's table, or bring it up to date: a gate may wait for days."""
    counted = f"{verdict.done:,} of {verdict.expected:,}"
    table = [
        {
            "found": "gate",
            "count": "open" if opens else "shut",
            "which": f"checked: {verdict.checked}",
        },
        {"found": verdict.unit, "count": counted, "which": f"digest {verdict.digest}"},
        *verdict.rows(),
    ]
    if artifact is None:
        created: Any = create_table_artifact(
            table, key=f"gate-{verdict.stage}", description=sentence
        )
        return cast("UUID", created)
    with get_client(sync_client=True) as client:
        update = ArtifactUpdate(data=json.dumps(table), description=sentence)
        client.update_artifact(artifact, update)
    return artifact
