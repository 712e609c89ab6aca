"""Time to go: what a trace says of the units that are left."""

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.estimates import DRIFTING, Outcome, load, quarters, synthetic, trace_of
from draftworks.estimates import remaining
from draftworks.estimates.remaining import (
    EVIDENCE,
    Estimating,
    Point,
    Remaining,
    Stalled,
    estimate,
    span,
)


def told(trace: list[Point], left: float, waited: float = 0.0) -> Remaining:
    answer = estimate(trace, trace[-1].time + waited, left)
    assert isinstance(answer, Remaining)
    assert 0 <= answer.low <= answer.median <= answer.high
    return answer


@pytest.fixture(scope="module")
def held_out() -> dict[str, Outcome]:
    return synthetic("held-out", 40)


def test_the_ranges_hold_the_truth_as_often_as_they_promise(held_out: dict[str, Outcome]) -> None:
    together = Outcome()
    for outcome in held_out.values():
        together.add(outcome)
    assert 0.75 <= together.coverage <= 0.90


@pytest.mark.parametrize("family", DRIFTING)
def test_a_drift_is_foretold_twice_as_well_as_by_the_average(
    held_out: dict[str, Outcome], family: str
) -> None:
    assert held_out[family].error <= held_out[family].average_error / 2


@pytest.mark.parametrize("made", [load, quarters])
def test_the_slowing_load_of_the_field_notes(made: object) -> None:
    """At half of the shards the plain average promises far less than comes."""
    trace = load(np.random.default_rng(1)) if made is load else quarters(np.random.default_rng(1))
    seen = trace[:33]
    truth = trace[-1].time - seen[-1].time
    average = (seen[-1].time - seen[0].time) / 32 * 32
    answer = told(seen, 32)
    assert abs(answer.median - truth) < abs(average - truth) / 2
    assert answer.low <= truth <= answer.high
    assert truth > 1.3 * average


def test_says_nothing_before_there_is_evidence() -> None:
    assert isinstance(estimate([], 0.0, 10), Estimating)
    assert estimate(trace_of([16.0] * (EVIDENCE - 1)), 1e6 + 40, 10).sentence == "estimating"
    assert told(trace_of([16.0] * EVIDENCE), 10)


def test_a_constant_pace_is_told_and_its_range_narrows() -> None:
    early, late = told(trace_of([16.0] * 8), 50), told(trace_of([16.0] * 200), 50)
    assert late.median == pytest.approx(800, rel=0.02)
    assert early.median == pytest.approx(800, rel=0.05)
    assert late.high / late.low < early.high / early.low


def test_more_work_takes_longer() -> None:
    trace = trace_of([14.0, 18.0, 16.0, 17.0, 15.0] * 4)
    medians = [told(trace, left).median for left in (1, 5, 20, 80, 320)]
    assert all(low < high for low, high in pairwise(medians))
    assert told(trace, 0) == Remaining(0.0, 0.0, 0.0)


def test_units_that_come_in_bursts_are_one_pace() -> None:
    """A part of 64 answers lies on disk at once, every 40 s; or one by one and then a wait."""
    assert told(trace_of([40.0] * 10, units=64), 640).median == pytest.approx(400, rel=0.05)
    assert told(trace_of([1.0, 1.0, 1.0, 37.0] * 12), 40).median == pytest.approx(400, rel=0.1)


def test_a_unit_that_takes_longer_pushes_the_estimate_up() -> None:
    trace = trace_of([100.0] * 20)
    usual, long, longer = (told(trace, 20, waited=gap) for gap in (90, 250, 450))
    assert usual.median < 2000
    assert usual.median < long.median < longer.median


def test_a_stall_is_called_by_the_usual_gap() -> None:
    stalled = estimate(trace_of([16.0] * 20), 1e6 + 320 + 600, 5)
    assert isinstance(stalled, Stalled)
    assert stalled.since == pytest.approx(1e6 + 320)
    assert stalled.sentence == "stalled since 13:52 UTC (10 min)"
    assert told(trace_of([3600.0] * 20), 5, waited=600)
    assert told(trace_of([1.0] * 20), 5, waited=50)


def test_a_pause_that_is_over_is_no_pace() -> None:
    trace = trace_of([16.0] * 20 + [3000.0] + [16.0] * 20)
    assert told(trace, 50).median == pytest.approx(800, rel=0.05)


def test_time_without_a_process_is_no_pace() -> None:
    trace = trace_of([16.0] * 20 + [40_000.0] + [16.0] * 20, breaks=[20])
    assert told(trace, 50) == told(trace_of([16.0] * 40), 50)


def test_a_long_trace_costs_no_more_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in points that are looked at."""
    looked_at: list[int] = []
    commits = remaining._commits

    def counting(trace: list[Point]) -> remaining.Array:
        looked_at.append(len(trace))
        return commits(trace)

    monkeypatch.setattr(remaining, "_commits", counting)
    assert told(trace_of([2.0] * 100_000), 1000).median == pytest.approx(2000, rel=0.02)
    assert sum(looked_at) <= 1.25 * remaining.MOST_POINTS + 1


def test_the_sentence_names_median_and_range() -> None:
    assert Remaining(45.0, 600.0, 7200.0).sentence == "about 10 min to go (45 s to 2 h 0 min)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (42.4, "42 s"),
        (89, "89 s"),
        (100, "2 min"),
        (420, "7 min"),
        (3580, "1 h 0 min"),
        (17_400, "4 h 50 min"),
        (172_790, "2 d 0 h"),
        (183_600, "2 d 3 h"),
    ],
)
def test_spans_are_told_in_the_units_of_people(seconds: float, text: str) -> None:
    assert span(seconds) == text
