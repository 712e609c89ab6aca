"""Back-test of the estimates: told at moments of finished traces, compared with what came.

Families of synthetic traces, each of many lengths, paces and seeds, and recorded ones. The
constants of `draftworks.estimates.remaining` were chosen on the seeds of `--split training`; the
table is of seeds and parameters they have not seen. The baseline is the plain average, elapsed
time over units done.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import show
from draftworks.estimates.remaining import Point, Remaining, Stalled, estimate
from draftworks.supervision.trace import points, read_trace

TRACES = Path(__file__).parent / "traces"
MOMENTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the units
SEEDS = {"training": 1000, "held-out": 20_000}
DRIFTING = ("slowing", "speeding up", "16/24/27/29 load", "16/24/27/29 quarters")
Random = np.random.Generator


@dataclass
class Outcome:
    """What the estimates of one family were worth."""

    held: list[bool] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    average_errors: list[float] = field(default_factory=list)
    stalled: int = 0

    @property
    def coverage(self) -> float:
        return sum(self.held) / len(self.held)

    @property
    def error(self) -> float:
        return statistics.median(self.errors)

    @property
    def average_error(self) -> float:
        return statistics.median(self.average_errors)

    def add(self, other: "Outcome") -> None:
        self.held += other.held
        self.errors += other.errors
        self.average_errors += other.average_errors
        self.stalled += other.stalled


def trace_of(gaps: Iterable[float], units: int = 1, breaks: Sequence[int] = ()) -> list[Point]:
    """A trace whose gaps end with `units` committed each. The gaps at `breaks` had no process."""
    now = active = 1_000_000.0
    points, made = [Point(now, active, 0)], 0
    for index, gap in enumerate(gaps):
        now += gap
        if index in breaks:
            points.append(Point(now, active, made))
            continue
        active, made = active + gap, made + units
        points.append(Point(now, active, made))
    return points


def noise(random: Random, count: int) -> np.ndarray:
    """Factors with a mean of 1: spread 3 % to 50 %, partly kept from unit to unit."""
    spread, kept = random.uniform(0.03, 0.5), random.uniform(0, 0.5)
    shocks = random.normal(0, spread, count)
    for index in range(1, count):
        shocks[index] = kept * shocks[index - 1] + np.sqrt(1 - kept**2) * shocks[index]
    return np.exp(shocks - spread**2 / 2)


def steady(random: Random) -> tuple[np.ndarray, float]:
    """Gaps of a job of 30 to 3,000 units, 1 to 60 s each, with a mean of `pace`."""
    count = int(np.exp(random.uniform(np.log(30), np.log(3000))))
    pace = float(np.exp(random.uniform(0, np.log(60))))
    return pace * noise(random, count), pace


def progressed(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) / count


def constant(random: Random) -> list[Point]:
    return trace_of(steady(random)[0])


def slowing(random: Random) -> list[Point]:
    """By a factor of 1.4 to 3, at once at first or evenly."""
    gaps, _ = steady(random)
    bend = random.uniform(0.4, 1.2)
    return trace_of(gaps * random.uniform(1.4, 3.0) ** (progressed(len(gaps)) ** bend))


def speeding_up(random: Random) -> list[Point]:
    gaps, _ = steady(random)
    bend = random.uniform(0.4, 1.2)
    return trace_of(gaps * random.uniform(1.4, 3.0) ** -(progressed(len(gaps)) ** bend))


def bursty(random: Random) -> list[Point]:
    """Batches of 4 to 64 units at one moment, or quick units and then a long wait."""
    gaps, pace = steady(random)
    if random.random() < 0.5:
        return trace_of(gaps, int(random.integers(4, 65)))
    gaps[:: int(random.integers(3, 9))] += pace * random.uniform(5, 15)
    return trace_of(gaps)


def two_phases(random: Random) -> list[Point]:
    """The pace changes for good by up to a factor of 1.8, somewhere between 0.2 and 0.6."""
    gaps, _ = steady(random)
    change = np.exp(random.uniform(-0.6, 0.6))
    gaps[int(len(gaps) * random.uniform(0.2, 0.6)) :] *= change
    return trace_of(gaps)


def pause(random: Random) -> list[Point]:
    """An undeclared one, 5 to 30 % of the whole time."""
    gaps, _ = steady(random)
    gaps[int(len(gaps) * random.uniform(0.1, 0.5))] += gaps.sum() * random.uniform(0.05, 0.3)
    return trace_of(gaps)


def restart(random: Random) -> list[Point]:
    """Ten minutes to half a day without a process."""
    gaps, _ = steady(random)
    where = int(len(gaps) * random.uniform(0.1, 0.5))
    return trace_of(np.insert(gaps, where, random.uniform(600, 40_000)), breaks=[where])


def load(random: Random) -> list[Point]:
    """WORKLOAD.md: 64 shards, read at 16, 24, 27, then 29 s per shard, loaded in 45 to 60 min.

    64 x 29 s are 31 min, so the readings are early ones and the pace went on growing. The smooth
    course through all five figures is 16 s * (shard / 2) ** 0.36 to 0.47: it passes 24, 27 and
    29 s near shards 5, 7 and 9.
    """
    shards = np.arange(1, 65)
    pace = 16 * (shards / 2) ** random.uniform(0.36, 0.47)
    return trace_of(pace * np.exp(random.normal(0, 0.05, 64)))


def quarters(random: Random) -> list[Point]:
    """The other reading of these notes: a quarter of the shards at each of the four paces."""
    return trace_of(np.repeat([16.0, 24.0, 27.0, 29.0], 16) * np.exp(random.normal(0, 0.05, 64)))


FAMILIES: dict[str, Callable[[Random], list[Point]]] = {
    "constant": constant,
    "slowing": slowing,
    "speeding up": speeding_up,
    "bursty": bursty,
    "two phases": two_phases,
    "a pause": pause,
    "a restart": restart,
    "16/24/27/29 load": load,
    "16/24/27/29 quarters": quarters,
}


def back_test(trace: list[Point]) -> Outcome:
    """Estimates at MOMENTS of the trace, a third of the way to the next commit."""
    outcome, total = Outcome(), trace[-1].made
    for share in MOMENTS:
        seen = next(i for i, point in enumerate(trace) if point.made >= share * total) + 1
        if seen >= len(trace) or trace[seen - 1].made == total:
            continue
        last, upcoming = trace[seen - 1], trace[seen]
        now = last.time + min(upcoming.time - last.time, upcoming.active - last.active) / 3
        left = total - last.made
        told = estimate(trace[:seen], now, left)
        outcome.stalled += isinstance(told, Stalled)
        if not isinstance(told, Remaining):
            continue
        # Time without a process belongs to nobody's forecast; an undeclared pause does.
        truth = trace[-1].active - last.active - (now - last.time)
        average = (now - trace[0].time) / last.made * left
        outcome.held.append(told.low <= truth <= told.high)
        outcome.errors.append(abs(told.median - truth) / truth)
        outcome.average_errors.append(abs(average - truth) / truth)
    return outcome


def synthetic(split: str, seeds: int) -> dict[str, Outcome]:
    outcomes = {name: Outcome() for name in FAMILIES}
    for family, (name, make) in enumerate(FAMILIES.items()):
        for seed in range(seeds):
            random = np.random.default_rng([SEEDS[split], family, seed])
            outcomes[name].add(back_test(make(random)))
    return outcomes


def recorded() -> Iterator[tuple[str, Outcome]]:
    """Traces of the demo's own jobs, as `Job.trace` reads them."""
    for path in sorted(TRACES.glob("*.jsonl")):
        yield f"recorded: {path.stem}", back_test(points(read_trace(path)))


def draw(path: Path) -> None:
    """The slowing load: at every shard, when it will be over by the estimate and the average."""
    from matplotlib.figure import Figure

    trace = load(np.random.default_rng(4))
    begun, finished = trace[0].time, (trace[-1].time - trace[0].time) / 60
    minutes, lows, medians, highs, averages = [], [], [], [], []
    for seen in range(5, 65):
        now = trace[seen - 1].time
        told = estimate(trace[:seen], now, 65 - seen)
        if isinstance(told, Remaining):
            gone = (now - begun) / 60
            minutes.append(gone)
            lows.append(gone + told.low / 60)
            medians.append(gone + told.median / 60)
            highs.append(gone + told.high / 60)
            averages.append(gone * 64 / (seen - 1))
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(minutes, lows, highs, color="#2f86c6", alpha=0.2, lw=0, label="80 % range")
    axes.plot(minutes, medians, color="#2f86c6", label="median")
    axes.plot(minutes, averages, color="#d98a1f", label="plain average")
    axes.axhline(finished, color="#333333", lw=1, ls="--", label=f"finished: {finished:.0f} min")
    axes.set(
        xlabel="minutes since the start of the load",
        ylabel="told end, min",
        xlim=(0, finished),
        ylim=(0, 2 * finished),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, ncols=2, loc="upper right")
    figure.savefig(
        path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--split", choices=list(SEEDS), default="held-out")
    parser.add_argument("--chart", type=Path, help="draw the slowing load to this file instead")
    options = parser.parse_args()
    if options.chart:
        draw(options.chart)
        return
    outcomes = synthetic(options.split, options.seeds)
    together = Outcome()
    for outcome in outcomes.values():
        together.add(outcome)
    outcomes["all synthetic"] = together
    outcomes.update(recorded())
    show(
        f"Estimates, {options.split} traces",
        ["family", "cases", "80 % range holds", "error", "plain average", "ratio"],
        [
            [
                name,
                f"{len(outcome.held):,}",
                f"{100 * outcome.coverage:.0f} %",
                f"{100 * outcome.error:.1f} %",
                f"{100 * outcome.average_error:.1f} %",
                f"{outcome.error / outcome.average_error:.2f}",
            ]
            for name, outcome in outcomes.items()
            if outcome.held
        ],
    )


if __name__ == "__main__":
    main()
