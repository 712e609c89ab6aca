"""Time to go: what a watched count says of the units that are left."""

from itertools import accumulate

import pytest

from draftworks.estimates.remaining import EVIDENCE, Pace, Remaining, span


def watched(seconds_per_shard: list[float], start: float = 1000.0) -> Pace:
    """A pace that saw one shard after another being committed."""
    pace = Pace()
    for done, moment in enumerate(accumulate(seconds_per_shard, initial=start)):
        pace.observe(moment, done)
    return pace


def estimated(pace: Pace, units: int) -> Remaining:
    estimate = pace.remaining(units)
    assert estimate is not None
    return estimate


def test_says_nothing_before_there_is_evidence() -> None:
    assert Pace().remaining(10) is None
    assert watched([16.0] * (EVIDENCE - 1)).remaining(10) is None
    assert watched([16.0] * EVIDENCE).remaining(10) is not None


def test_standing_still_is_no_evidence() -> None:
    pace = Pace()
    for second in range(100):
        pace.observe(float(second), 5)
    assert pace.remaining(10) is None


def test_a_constant_pace_is_told_exactly() -> None:
    assert estimated(watched([16.0] * 20), 50) == Remaining(800.0, 800.0, 800.0)


def test_the_range_holds_the_truth_when_shards_vary() -> None:
    estimate = estimated(watched([14.0, 18.0, 16.0, 17.0, 15.0] * 4), 50)
    assert estimate.low < 50 * 16 < estimate.high


def test_polling_between_commits_changes_nothing() -> None:
    pace = Pace()
    for second in range(0, 16 * 20 + 1, 2):
        pace.observe(float(second), second // 16)
    assert estimated(pace, 50).median == pytest.approx(800)


def test_a_slowing_job_is_followed_better_than_by_its_average() -> None:
    """Shards that take 16, then 24, 27 and 29 s, as extraction really did."""
    trace = [seconds for seconds in (16.0, 24.0, 27.0, 29.0) for _ in range(20)]
    left, average = 50, sum(trace) / len(trace)
    truth = 29.0 * left
    estimate = estimated(watched(trace), left)
    assert abs(estimate.median - truth) < abs(average * left - truth) / 3
    assert estimate.low <= truth <= estimate.high


def test_units_that_come_in_bursts_are_one_pace() -> None:
    """A part of 64 answers lies on disk at once, every 40 s."""
    pace = Pace()
    for part in range(10):
        pace.observe(40.0 * part, 64 * part)
    assert estimated(pace, 640).median == pytest.approx(400)


def test_the_range_holds_the_truth_of_an_uneven_job() -> None:
    """Two quick shards, then a slow one, and so on: 12 s each on the long run."""
    estimate = estimated(watched([2.0, 4.0, 30.0] * 12), 30)
    assert estimate.low < 30 * 12 < estimate.high


def test_a_restart_that_lost_units_does_not_spoil_the_estimate() -> None:
    pace = watched([16.0] * 40, start=0.0)
    for step in range(15):  # back after ten minutes, two shards behind
        pace.observe(640.0 + 600.0 + 16.0 * step, 38 + step)
    estimate = estimated(pace, 50)
    assert estimate.median == pytest.approx(800)
    assert estimate.low <= 800 <= estimate.high


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
