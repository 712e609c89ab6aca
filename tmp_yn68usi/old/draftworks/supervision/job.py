"""A supervised job, seen from outside: launch or attach, watch, stop.

Its directory holds

    lock           held (flock) by the job for its whole life: the liveness test
    pid            of the process, which leads a process group of its own
    status.json    phase, counted units, heartbeat; rewritten atomically while it runs
    exit.json      how the last run ended; absent while it runs or when it was killed
    trace.jsonl    when how much was done, thinned: what the estimates are made of
    history.jsonl  one row per run: started, ended, outcome
    log            standard output and error of all runs

The kernel releases the lock when the process dies, however it dies, so there are no stale
process ids to be fooled by.
"""

import fcntl
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from draftworks.estimates.remaining import Estimate, Point, estimate
from draftworks.records.manifest import ManifestWriter, read_manifest
from draftworks.supervision.trace import points, read_trace

LOCK_DESCRIPTOR = "DRAFTWORKS_LOCK_DESCRIPTOR"
STALLED_SECONDS = 120  # without a heartbeat


class State(Enum):
    """What the files say of a job."""

    NEVER_STARTED = "never started"
    RUNNING = "running"
    STALLED = "stalled"  # alive by its lock, but without a heartbeat
    FINISHED = "finished"
    STOPPED = "stopped"  # asked to end, and did, with everything committed
    FAILED = "failed"
    LOST = "lost"  # died without a word: killed, out of memory, power cut


@dataclass(frozen=True)
class Status:
    """The last heartbeat. Times are seconds since the epoch."""

    phase: str
    done: int
    total: int
    unit: str
    started: float
    heartbeat: float
    pid: int
    phase_done: int = 0
    phase_total: int = 0  # 0 when the phase has no count of its own

    @property
    def left(self) -> int:
        """What the estimate is about: steps of a counted phase that is under way, else units."""
        return self.phase_total - self.phase_done or self.total - self.done

    @property
    def counted(self) -> str:
        """For people: loading weights 12 of 64; extracting: 30 of 100 samples."""
        if self.phase_total > self.phase_done:
            return f"{self.phase} {self.phase_done:,} of {self.phase_total:,}"
        return f"{self.phase}: {self.done:,} of {self.total:,} {self.unit}".rstrip()


class Job:
    """One job directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        self.pid_file = directory / "pid"

    def launch_or_attach(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Start `command` detached, unless the job runs already. Returns whether it started.

        The lock is taken here and handed down as an open descriptor, so between two starters
        exactly one starts, and the job is alive for everybody from this moment on.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor = acquire_lock(self.directory)
        if descriptor is None:
            return False
        try:
            close_last_run(self.directory)
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    command,
                    env={**environment, LOCK_DESCRIPTOR: str(descriptor)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(descriptor,),
                    start_new_session=True,
                )
            self.pid_file.write_text(str(process.pid))
        finally:
            os.close(descriptor)
        return True

    def state(self) -> State:
        if self.alive():
            status = self.status()
            beat = status.heartbeat if status else time.time()
            return State.STALLED if time.time() - beat > STALLED_SECONDS else State.RUNNING
        outcome = self.exit().get("outcome")
        if outcome:
            return State(outcome)
        started = self.log.exists() or (self.directory / "status.json").exists()
        return State.LOST if started else State.NEVER_STARTED

    def status(self) -> Status | None:
        """None before the first heartbeat."""
        values = _read_json(self.directory / "status.json")
        return Status(**values) if values else None

    def trace(self) -> list[Point]:
        """The course of what is counted now: the phase's steps, else the committed units."""
        status = self.status()
        in_phase = bool(status and status.phase_total > status.phase_done)
        return points(read_trace(self.directory / "trace.jsonl"), in_phase=in_phase)

    def estimate(self) -> Estimate | None:
        """What remains of what is counted now; None when nothing is left or nothing runs."""
        status = self.status()
        if status is None or not status.left or not self.alive():
            return None
        return estimate(self.trace(), time.time(), status.left)

    def exit(self) -> dict[str, Any]:
        """outcome, error and ended of the last run; empty while it runs or when it was killed."""
        return _read_json(self.directory / "exit.json")

    def history(self) -> list[dict[str, Any]]:
        """started, ended (seconds since the epoch) and outcome of every run that ended."""
        return read_manifest(self.directory / "history.jsonl")

    def stop(self) -> bool:
        """Ask the job to end at its next unit boundary. Returns whether there was one."""
        return self._signal(signal.SIGTERM)

    def end(self, grace: float) -> None:
        """Ask, wait `grace` seconds, then kill the whole process group. Returns when it is gone."""
        if self._signal(signal.SIGTERM) and not self.wait(grace):
            self._signal(signal.SIGKILL)
            self.wait(grace)

    def wait(self, timeout: float) -> bool:
        """Wait until the job is gone. Returns False when it still runs after `timeout` s."""
        deadline = time.monotonic() + timeout
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _signal(self, number: signal.Signals) -> bool:
        """Send to the process, SIGKILL to its whole group. Returns whether there was one: in the
        moment of its start a job is alive already and has no process yet."""
        if not self.alive():
            return False
        try:
            pid = int(self.pid_file.read_text())
            os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)
        except (FileNotFoundError, ValueError, ProcessLookupError):
            return False
        return True

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        if not self.log.exists():
            return ""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, lines)).rstrip()

    def alive(self) -> bool:
        """Whether somebody holds the lock. A shared lock asks without standing in the way."""
        try:
            descriptor = os.open(self.directory / "lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)


def acquire_lock(directory: Path) -> int | None:
    """The descriptor of the held lock, or None when another process holds it.

    Tries for a moment, because a watcher's question may hold the lock for an instant.
    """
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            time.sleep(0.01)
    os.close(descriptor)
    return None


def close_last_run(directory: Path) -> None:
    """Write the history row of a run that was killed, and clear what describes the last run.
    Call while holding the lock."""
    status, exit_file = directory / "status.json", directory / "exit.json"
    last = _read_json(status)
    if last and not exit_file.exists():
        append_history(directory, last["started"], last["heartbeat"], State.LOST.value)
    # Its process id may belong to somebody else by now.
    for file in (directory / "pid", status, exit_file):
        file.unlink(missing_ok=True)


def append_history(directory: Path, started: float, ended: float, outcome: str) -> None:
    writer = ManifestWriter(directory / "history.jsonl")
    writer.append({"started": started, "ended": ended, "outcome": outcome})
    writer.close()


def iso(seconds: float) -> str:
    """A time since the epoch as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


@contextmanager
def held_lock(directory: Path) -> Iterator[bool]:
    """Hold the job's lock: the one handed down by the starter, or a new one. Yields False when
    another process holds it."""
    inherited = os.environ.pop(LOCK_DESCRIPTOR, None)
    if inherited:
        descriptor: int | None = int(inherited)
        os.set_inheritable(int(inherited), False)
    else:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = acquire_lock(directory)
        if descriptor is not None:
            close_last_run(directory)
    if descriptor is not None:
        (directory / "pid").write_text(str(os.getpid()))
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return values
