"""Preparing a stage: checks that need no inputs first, then the smoke run on what is committed.

It runs as a supervised job in the very environment of the stage's own job, so that its command
line, interpreter, libraries and settings are proved by use. What it finds is written down check by
check; a stage starts on that record, if nothing in it has grown stale.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from draftworks.errors import DraftworksError
from draftworks.preparation import host
from draftworks.preparation.environment import changes, environment, environment_of, require
from draftworks.progress import Progress
from draftworks.stages.base import Check, Stage, check
from draftworks.supervision.job import Job, State
from draftworks.workspace import commit_json

POLL_SECONDS = 0.5
LOADS_TARGET = {"extract", "evaluate"}


class Preparation:
    """The record of a stage's preparation, as its job writes it and others read it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.job = Job(stage.workspace.job(f"prepare-{stage.name}", stage.identity))
        self.file = self.job.directory / "preparation.json"

    def checks(self) -> list[Check]:
        """What was found so far; empty when nothing has begun."""
        return [Check(**row) for row in self._record().get("checks", [])]

    def forget(self) -> None:
        """Drop the record of an earlier run."""
        self.file.unlink(missing_ok=True)

    def stale(self) -> list[str]:
        """Why the stage cannot start on this record; empty when it can. Takes a second or two."""
        record = self._record()
        if self.job.state() is not State.FINISHED or not record:
            return [f"{self.stage.name} has not been prepared"]
        again = check("disk space", lambda: host.room(self.stage))
        return [
            *changes(record["environment"], environment_of(self.stage.config.jobs.python)),
            *([] if again.passed else [again.detail]),
        ]

    def run(self, progress: Progress) -> None:
        """Make the checks, one by one. Raises DraftworksError naming those that failed."""
        found: list[Check] = []
        self._write(found)
        for item in self._prove(progress):
            found.append(item)
            self._write(found)
            progress.check_stop()
        failed = [item for item in found if not item.passed]
        if failed:
            raise DraftworksError(
                "; ".join(f"{self.stage.name}, {item.name}: {item.detail}" for item in failed)
            )

    def _prove(self, progress: Progress) -> Iterator[Check]:
        stage, failed = self.stage, False
        progress.phase("checking")
        for item in self._known():
            failed |= not item.passed
            yield item
        # What cannot start is not tried.
        if failed or not stage.config.jobs.prepare:
            return
        from draftworks.preparation import smoke

        if type(stage) not in smoke.TRIALS:
            return
        progress.phase("waiting for the first samples")
        while smoke.committed(stage) < smoke.SAMPLES and self._more_to_come():
            progress.check_stop()
            time.sleep(POLL_SECONDS)
        progress.phase("smoke run")
        yield from smoke.smoke(stage)

    def _known(self) -> Iterator[Check]:
        """What can be checked before any input exists."""
        stage, jobs = self.stage, self.stage.config.jobs
        yield check("environment", lambda: require(jobs.requires))
        yield from stage.prepare()
        yield check("disk space", lambda: host.room(stage))
        plan = stage.plan()
        if plan.gpus:
            yield check("GPUs", lambda: host.gpus_there(plan.gpus, plan.gpu_bytes))
        if stage.name == "extract" and stage.config.extract.engine != "reference":
            yield check("port", lambda: host.port_free(stage.config.extract.server.port))
        if stage.name in LOADS_TARGET:
            files = sorted(set(stage.target.weight_files.values()))
            yield check("weights read ahead", lambda: host.read_ahead(files))

    def _more_to_come(self) -> bool:
        """Whether a job that makes samples or states still runs."""
        return any(Job(item.job_directory).alive() for item in host.upstream(self.stage))

    def _record(self) -> dict[str, Any]:
        if not self.file.is_file():
            return {}
        record: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        return record

    def _write(self, found: list[Check]) -> None:
        record = {"environment": environment(), "checks": [asdict(item) for item in found]}
        commit_json(self.file, record)
