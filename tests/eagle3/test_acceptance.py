"""Acceptance: the walk over recorded answers equals the reference's, and counts are pooled."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import eagle3 as truth

from draftworks.eagle3.acceptance import Acceptance, walk

Outcome = list[list[bool | None]]  # [row p][step k]; None where the row does not count


@st.composite
def outcomes(draw: st.DrawFn) -> tuple[Outcome, int]:
    """A document's rows with steps that end with the document, and the number of steps."""
    length, steps = draw(st.integers(1, 14)), draw(st.integers(1, 5))
    cells = st.sampled_from([True, True, False, None])
    rows = [
        [draw(cells) if p + 1 + k < length else None for k in range(steps)]
        for p in range(length - 1)
    ]
    return rows, steps


def by_teacher_position(rows: Outcome, steps: int, absent: bool) -> tuple[torch.Tensor, ...]:
    """correct and valid [K, T]; where no row counts, correct holds `absent`."""
    correct = torch.full((steps, len(rows) + 1), absent)
    valid = torch.zeros(steps, len(rows) + 1, dtype=torch.bool)
    for p, row in enumerate(rows):
        for k, hit in enumerate(row):
            if hit is not None:
                correct[k, p + 1 + k], valid[k, p + 1 + k] = hit, True
    return correct, valid


@given(outcomes(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_walk_visits_what_the_reference_visits(drawn: tuple[Outcome, int], absent: bool) -> None:
    rows, steps = drawn
    walked = walk(*by_teacher_position(rows, steps, absent), steps)
    assert (walked.drafts, sum(walked.accepted)) == truth.walk(rows, steps)
    assert list(walked.accepted) == sorted(walked.accepted, reverse=True)
    assert walked.accepted[0] <= walked.drafts


def test_a_walk_goes_on_behind_the_accepted_tokens_and_the_targets_own() -> None:
    """Drafts at x_1 (two kept), x_4 (none), x_5 (one kept, then the answer's end)."""
    correct = torch.tensor([[0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    valid = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    assert walk(correct, valid, 2) == Acceptance(3, (2, 1))


def test_length_counts_the_targets_own_token_and_rates_are_conditional() -> None:
    counts = Acceptance(10, (8, 4, 1))
    assert counts.length == pytest.approx(2.3)
    assert counts.rates == pytest.approx([0.8, 0.5, 0.25])
    expected = sum(math.prod(counts.rates[: k + 1]) for k in range(3))
    assert counts.length == pytest.approx(1 + expected)


def test_counts_are_pooled_and_ratios_never_averaged() -> None:
    """A long and a short answer: the mean of their lengths would be 2.5."""
    pooled = Acceptance(9, (0, 0)) + Acceptance(1, (1, 1))
    assert pooled == Acceptance(10, (1, 1))
    assert pooled.length == pytest.approx(1.2)
    assert pooled.rates == pytest.approx([0.1, 1.0])


def test_no_draft_at_all_is_no_division_by_zero() -> None:
    nothing = Acceptance(0, (0, 0, 0))
    assert (nothing.length, nothing.rates) == (1.0, [0.0, 0.0, 0.0])


def test_runs_of_different_depth_are_not_added() -> None:
    with pytest.raises(ValueError, match="zip"):
        Acceptance(1, (1,)) + Acceptance(1, (1, 1))
