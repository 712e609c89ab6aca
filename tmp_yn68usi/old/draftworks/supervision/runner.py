"""A supervised job, seen from inside: lock, heartbeat, signals, exit record."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftworks.errors import DraftworksError, StopRequested
from draftworks.progress import Progress
from draftworks.supervision.job import State, append_history, held_lock
from draftworks.supervision.trace import Row, TraceWriter

HEARTBEAT_SECONDS = 1.0


class JobProgress(Progress):
    """Progress that a job directory shows: a heartbeat thread rewrites status.json and adds to
    trace.jsonl."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.started = time.time()
        self._file = directory / "status.json"
        self._trace = TraceWriter(directory / "trace.jsonl")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._write()
        self._thread.start()

    def phase(self, name: str, total: int = 0) -> None:
        super().phase(name, total)
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)

    def stop(self) -> None:
        """Write the last status and end the heartbeat."""
        self._ended.set()
        self._thread.join()
        self._write()

    def _beat(self) -> None:
        # Left to the main thread, which they interrupt even while it waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # a disk that is full now may not be at the next beat
                self._write()

    def _write(self) -> None:
        status: dict[str, Any] = {
            "phase": self.phase_name,
            "phase_done": self.phase_done,
            "phase_total": self.phase_total,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "started": self.started,
            "heartbeat": time.time(),
            "pid": os.getpid(),
        }
        _replace(self._file, status)
        row = {name: value for name, value in status.items() if name in Row._fields}
        with suppress(OSError):  # the next beat notes what this one could not
            self._trace.note(Row(time=status["heartbeat"], section=self.section, **row))


def run_job(directory: Path, work: Callable[[Progress], None]) -> int:
    """Run `work` as the job of `directory`. Returns the exit status: 0 finished, 1 failed,
    2 already running elsewhere, 3 stopped on request.

    The first SIGTERM or SIGINT asks the work to end at its next unit boundary; a second one ends
    it at once.
    """
    with held_lock(directory) as ours:
        if not ours:
            print(f"{directory.name} is running already; see {directory}/status.json")
            return 2
        progress = JobProgress(directory)
        _stop_on_signals(progress)
        outcome, error = State.FAILED, ""
        try:
            work(progress)
            outcome = State.FINISHED
        except StopRequested:
            outcome = State.STOPPED
        except DraftworksError as fault:
            error = str(fault)
            print(f"error: {error}", file=sys.stderr, flush=True)
        except Exception as fault:
            error = f"{type(fault).__name__}: {fault}"
            traceback.print_exc()
        finally:
            progress.stop()
            ended = time.time()
            _replace(
                directory / "exit.json",
                {"outcome": outcome.value, "error": error, "ended": ended},
            )
            append_history(directory, progress.started, ended, outcome.value)
        return {State.FINISHED: 0, State.STOPPED: 3}.get(outcome, 1)


def _stop_on_signals(progress: Progress) -> None:
    def ask(number: int, _frame: Any) -> None:
        if progress.stop_requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        progress.stop_requested = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)


def _replace(path: Path, values: dict[str, Any]) -> None:
    """Rewrite a small file in one rename. No fsync: it describes a process, not data."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(values))
    temporary.replace(path)
