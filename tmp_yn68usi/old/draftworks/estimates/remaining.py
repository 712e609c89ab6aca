"""Time to go, as a median and an 80 % range, from the times of committed units.

The history is cut into at most 24 blocks of about equal work, each long enough to hold a whole
burst. The logarithm of a block's pace (seconds a unit) is

    observation = level + noise                 noise ~ N(0, s² / units)
    level      += drift · dx + N(0, w² · dx)    x = log(ORIGIN · total + units made)
    drift       returns to 0 with scale TAU     its spread is D

The axis is logarithmic because changes come early: on it a slowing 16, 24, 27, 29 s is almost a
straight line. A Kalman filter runs for every (s, w, D) of a small grid; each weighs by how well
it foretold this trace block by block, so a steady trace keeps a narrow range and an uneven one
widens its own. The forecast sums the foreseen pace over the units left; its spread grows with
their number.

Time without a process is no pace (see `Point`). A gap longer than the stall threshold was told as
a stall while it lasted and counts as one usual gap afterwards. A running gap that exceeds the
usual one is taken as a unit that ends now, so the estimate rises before the unit ends.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EVIDENCE = 3
"""Gaps between commits seen before anything is said: two paces and one that confirms them."""
BLOCKS = 24
"""Enough to see a bend, few enough that a block averages over what is uneven."""
MOST_POINTS = 1000
"""Points looked at, evenly spaced over a longer trace; the bound on the cost."""
STALL_GAPS = 5
"""Usual gaps without a commit that are called a stall."""
STALL_SECONDS = 60.0
"""No stall is called sooner: nobody looks that often."""
ORIGIN = 0.4
"""Where the logarithmic axis begins, as a share of the whole work before its first unit: a drift
belongs partly to what was made (learning, filling caches), partly to the job as a whole."""
TAU = 3.0
"""A drift fades to 1/e over so much of the axis, all of which is 1.25 long: hardly within a job."""
GRID = np.array(
    list(
        product(
            np.geomspace(0.03, 3.0, 7),  # s: spread of one unit's pace, 3 % to a factor of 20
            (0.01, 0.05, 0.15, 0.4),  # w: how far the pace wanders per unit of the axis
            (0.1, 0.5, 1.2),  # D: how strongly it drifts per unit of the axis
        )
    )
).T
"""All are equally likely before the first unit: from a steady pace to a drift by a factor of e."""
STEPS = 16
"""Pieces of the work left over which the foreseen pace is summed."""
NORMAL = np.array([NormalDist().inv_cdf((k + 0.5) / 40) for k in range(40)])


class Point(NamedTuple):
    """A moment of a trace. Both sums leave out what is no pace: time without a process, in
    another phase or in a declared pause, and units an earlier run had made."""

    time: float
    """Seconds since the epoch."""
    active: float
    """Seconds at work so far."""
    made: float
    """Units committed in these seconds."""


class Estimating:
    """Too few commits to say anything."""

    sentence = "estimating"


@dataclass(frozen=True)
class Remaining:
    """Seconds to go: the median and the range that holds the truth in 8 of 10 cases."""

    low: float
    median: float
    high: float

    @property
    def sentence(self) -> str:
        return f"about {span(self.median)} to go ({span(self.low)} to {span(self.high)})"


@dataclass(frozen=True)
class Stalled:
    """Nothing was committed for much longer than usual. Seconds since the epoch."""

    since: float
    now: float

    @property
    def sentence(self) -> str:
        clock = time.strftime("%H:%M UTC", time.gmtime(self.since))
        return f"stalled since {clock} ({span(self.now - self.since)})"


Estimate = Estimating | Remaining | Stalled


def estimate(trace: Sequence[Point], now: float, left: float) -> Estimate:
    """What `trace` says at `now` (seconds since the epoch) of the `left` units to go.

    The points of the trace are in order of time; several may show the same count. The process
    is at work between the last point and `now`.
    """
    if left <= 0:
        return Remaining(0.0, 0.0, 0.0)
    recent = _commits(trace[-MOST_POINTS // 4 :])
    if len(recent) <= EVIDENCE:
        return Estimating()
    usual = usual_gap(np.diff(recent[:, 1]))
    running = trace[-1].active - recent[-1, 1] + max(0.0, now - trace[-1].time)
    if running > stall_threshold(usual):
        return Stalled(now - running, now)
    stride = -(-len(trace) // MOST_POINTS)
    thinned = _commits([*trace[: len(trace) - 1 : stride], trace[-1]])
    seconds, units = _blocks(np.diff(thinned[:, 1]), np.diff(thinned[:, 2]))
    if running > usual:
        seconds = np.append(seconds, running)
        units = np.append(units, np.median(np.diff(recent[:, 2])))
    logarithms, weights = _forecast(seconds, units, left)
    ends = np.exp(_quantiles(logarithms, weights, (0.1, 0.5, 0.9))).tolist()
    # What is left was counted at the last commit; part of it may have passed. The unit under way
    # is not over, so its last hundredth always remains.
    passed = min(running, usual)
    return Remaining(*(max(end - passed, end / 100) for end in ends))


def usual_gap(gaps: Array) -> float:
    """The gap that half of the time lies in gaps longer than: of bursts, the time between them.
    The longest is left out, because it may be a stall."""
    ordered = np.sort(gaps)[:-1]
    return float(ordered[np.searchsorted(ordered.cumsum(), ordered.sum() / 2)])


def stall_threshold(usual: float) -> float:
    """Seconds without a commit that are called a stall."""
    return max(STALL_SECONDS, STALL_GAPS * usual)


def _commits(trace: Sequence[Point]) -> Array:
    """Rows (time, active, made) at which the count had grown; the first point is the origin."""
    rows = np.array(trace, dtype=float).reshape(-1, 3)
    grown = np.diff(rows[:, 2], prepend=-np.inf) > 0
    return rows[grown]


def _blocks(gaps: Array, units: Array) -> tuple[Array, Array]:
    """Seconds and units of blocks of about equal work that each hold a whole burst."""
    usual = usual_gap(gaps)
    gaps = np.where(gaps > stall_threshold(usual), usual, gaps)
    enough_units, enough_seconds = units.sum() / BLOCKS, gaps.sum() / BLOCKS / 4
    blocks, second, unit = [], 0.0, 0.0
    for gap, count in zip(gaps.tolist(), units.tolist(), strict=True):
        second, unit = second + gap, unit + count
        if unit >= enough_units and second >= enough_seconds:
            blocks.append((second, unit))
            second, unit = 0.0, 0.0
    if unit and blocks:  # a rest too short to be a block of its own
        blocks[-1] = (blocks[-1][0] + second, blocks[-1][1] + unit)
    found = np.array(blocks or [(second, unit)])
    return found[:, 0], found[:, 1]


def _forecast(seconds: Array, units: Array, left: float) -> tuple[Array, Array]:
    """Values of log(seconds to go), (grid, 40), and their weights, (grid,)."""
    s, w, spread = GRID
    ends = units.cumsum()
    origin = ORIGIN * (ends[-1] + left)
    axis = np.log(origin + ends - units / 2)
    noise = s**2 / units[0]
    # The mean of unequal times lies above their usual value: half the variance of the logarithm.
    level = np.log(seconds[0] / units[0]) + np.minimum(noise, 1.0) / 2
    drift = np.zeros_like(s)
    var, cov, drift_var = noise + 0.25, np.zeros_like(s), spread**2
    evidence = np.zeros_like(s)
    for index in range(1, len(units)):
        level, drift, var, cov, drift_var = _move(
            level, drift, var, cov, drift_var, axis[index] - axis[index - 1]
        )
        noise = s**2 / units[index]
        surprise = np.log(seconds[index] / units[index]) + np.minimum(noise, 1.0) / 2 - level
        total = var + noise
        evidence = evidence - (np.log(total) + surprise**2 / total) / 2
        level, drift = level + var / total * surprise, drift + cov / total * surprise
        drift_var, var, cov = (
            drift_var - cov**2 / total,
            var - var**2 / total,
            cov - var * cov / total,
        )
    weights = np.exp(evidence - evidence.max())

    # The pace over the work left, in pieces: (grid, piece).
    middles = ends[-1] + left * (np.arange(STEPS) + 0.5) / STEPS
    ahead = np.log(origin + middles) - axis[-1]
    reach = TAU * (1 - np.exp(-ahead / TAU))
    path = level[:, None] + drift[:, None] * reach
    top = path.max(axis=1, keepdims=True)
    share = np.exp(path - top)
    center = np.log(share.mean(axis=1)) + top[:, 0] + np.log(left)
    share /= share.sum(axis=1, keepdims=True)
    # How each uncertain thing moves the sum: level and drift as known now, and the shocks to come.
    through = share @ reach
    steps = np.diff(ahead, prepend=0.0)
    later = np.triu(np.ones((STEPS, STEPS)))  # a shock at piece k moves the pieces from k on
    reached = later * TAU * (1 - np.exp(-np.maximum(ahead - ahead[:, None], 0) / TAU))
    shaken = (share @ later.T) ** 2 @ steps
    bent = (share @ reached.T) ** 2 @ steps
    variance = (
        var + 2 * cov * through + drift_var * through**2
        + w**2 * shaken
        + 2 * spread**2 / TAU * bent
        + s**2 / left
    )  # fmt: skip
    return center[:, None] + np.sqrt(variance)[:, None] * NORMAL, weights / weights.sum()


def _move(level: Array, drift: Array, var: Array, cov: Array, drift_var: Array, dx: Any) -> Any:
    """The state of the filter `dx` further on the axis."""
    _, w, spread = GRID
    keep = np.exp(-dx / TAU)
    reach = TAU * (1 - keep)
    return (
        level + reach * drift,
        keep * drift,
        var + 2 * reach * cov + reach**2 * drift_var + w**2 * dx,
        keep * (cov + reach * drift_var),
        keep**2 * drift_var + spread**2 * (1 - keep**2),
    )


def _quantiles(values: Array, weights: Array, levels: tuple[float, ...]) -> Array:
    """Quantiles of the mixture: each row of `values` (rows, equal chances) weighs `weights`."""
    flat, chances = values.ravel(), np.repeat(weights, values.shape[1]) / values.shape[1]
    order = np.argsort(flat)
    result: Array = np.interp(levels, chances[order].cumsum(), flat[order])
    return result


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
