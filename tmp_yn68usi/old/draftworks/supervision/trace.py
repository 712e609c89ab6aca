"""The course of a job: trace.jsonl, a row whenever a count or the phase has changed.

A row is appended at the heartbeat, so at most one a second, and never fsynced: it describes a
process, not data. Beyond MOST_ROWS every second row within a phase is dropped, the older half
first, so a job of days keeps its whole course in some 300 kB.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from draftworks.estimates.remaining import Point

MOST_ROWS = 2000


class Row(NamedTuple):
    """What was counted at a moment. Between rows of another `run` or `section` lies a break:
    that time, and what was counted then, is no pace."""

    time: float
    """Seconds since the epoch."""
    phase: str
    section: int
    """How often a phase or a count was begun in this run. What a run finds done when it begins
    to count was not done by it."""
    done: int
    total: int
    unit: str
    phase_done: int
    phase_total: int
    run: float = 0.0
    """When the process began, in seconds since the epoch."""

    @property
    def kind(self) -> tuple[float, int]:
        return self.run, self.section


class TraceWriter:
    """Appends for one run of the job. The job's lock sees to it that there is one writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = read_trace(path)
        self._run: float | None = None
        # Cuts off a line torn by a kill, on which a first row could be glued.
        with suppress(OSError):
            self._rewrite()

    def note(self, row: Row) -> None:
        """Add the row unless nothing changed. Raises OSError (a full disk); then nothing is
        noted, and a later row tells what this one would have."""
        if self._run is None:
            self._run = row.time
        row = row._replace(run=self._run)
        if self._rows and self._rows[-1]._replace(time=row.time) == row:
            return
        self._rows.append(row)
        try:
            if len(self._rows) > MOST_ROWS:
                self._rows = thinned(self._rows)
                self._rewrite()
            else:
                with self._path.open("a") as file:
                    file.write(_line(row))
        except OSError:
            self._rows.pop()
            raise

    def _rewrite(self) -> None:
        temporary = self._path.with_suffix(".new")
        temporary.write_text("".join(map(_line, self._rows)))
        temporary.replace(self._path)


def thinned(rows: Sequence[Row]) -> list[Row]:
    """Every second row of the older half is dropped, whatever it shows when breaks alone fill
    it: a job that was restarted a thousand times stays bounded too."""
    older, newer = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    inner = {
        index
        for index in range(1, len(older) - 1)
        if older[index - 1].kind == older[index].kind == older[index + 1].kind
    }
    dropped = set(sorted(inner)[::2])
    if len(dropped) < len(older) // 8:
        dropped = set(range(len(older) // 2))
    return [row for index, row in enumerate(older) if index not in dropped] + list(newer)


def read_trace(path: Path) -> list[Row]:
    """The complete rows; a torn line is none. Empty when there is no trace."""
    rows = []
    with suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError):
                rows.append(Row(**json.loads(line)))
    return rows


def points(rows: Sequence[Row], in_phase: bool = False) -> list[Point]:
    """What the estimates look at: committed units, or the steps of the phase in the last row.

    Time and units count only between rows of one run and section.
    """
    if in_phase:
        phases = [(row.phase, row.phase_total) for row in rows]
        rows = [row for row, phase in zip(rows, phases, strict=True) if phase == phases[-1]]
    else:
        rows = [row for row in rows if row.total]
    if not rows:
        return []
    active = made = 0.0
    found = [Point(rows[0].time, 0.0, 0.0)]
    for before, row in pairwise(rows):
        if before.kind == row.kind:
            now, last = (row.phase_done, before.phase_done) if in_phase else (row.done, before.done)
            active, made = active + row.time - before.time, made + max(0, now - last)
        found.append(Point(row.time, active, made))
    return found


def _line(row: Row) -> str:
    return json.dumps(row._asdict(), separators=(",", ":")) + "\n"
