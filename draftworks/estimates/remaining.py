"""Time to go, from the pace of committed units."""

from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 120.0
EVIDENCE = 3  # paces seen before anything is said


@dataclass(frozen=True)
class Remaining:
    """Seconds to go: a median and the range between the 10th and 90th percentile of the pace."""

    low: float
    median: float
    high: float

    @property
    def sentence(self) -> str:
        return f"about {span(self.median)} to go ({span(self.low)} to {span(self.high)})"


class Pace:
    """Watches a count grow. Paces of the last two minutes count, so a drift is followed."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._paces: deque[tuple[float, float]] = deque()

    def observe(self, seconds: float, done: int) -> None:
        """Note that `done` units were committed at a time in seconds."""
        if self._last is not None and done > self._last[1]:
            elapsed = seconds - self._last[0]
            self._paces.append((seconds, elapsed / (done - self._last[1])))
            while self._paces[0][0] < seconds - WINDOW_SECONDS and len(self._paces) > EVIDENCE:
                self._paces.popleft()
        if self._last is None or done > self._last[1]:
            self._last = (seconds, done)

    def remaining(self, units: int) -> Remaining | None:
        """None while there is too little evidence."""
        if len(self._paces) < EVIDENCE:
            return None
        paces = sorted(pace for _, pace in self._paces)
        tenth = (len(paces) - 1) / 10
        low, high = paces[round(tenth)], paces[round(9 * tenth)]
        return Remaining(units * low, units * paces[len(paces) // 2], units * high)


def span(seconds: float) -> str:
    """42 s, 7 min, 4 h 50 min, 2 d 3 h."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
