"""The draft vocabulary: what is in it, its two tensors, and files that are refused."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftworks.eagle3.vocabulary import DraftVocabulary, count_tokens
from draftworks.errors import DraftworksError

USED = torch.tensor([1, 3, 4, 9])
SIZE = 12


def counts(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=20), st.data())
@settings(max_examples=200, deadline=None)
def test_chosen_are_the_most_frequent_and_both_tensors_agree(
    values: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(values)))
    always = data.draw(st.sets(st.integers(0, len(values) - 1), max_size=size))
    vocabulary = DraftVocabulary.by_frequency(counts(*values), size, always)
    ranked = sorted(range(len(values)), key=lambda i: (i not in always, -values[i], i))
    expected = sorted(ranked[:size])
    if len(always) == size:
        expected = sorted(always)
    ids = torch.arange(size) + vocabulary.d2t
    assert ids.tolist() == expected
    assert ids.equal(vocabulary.t2d.nonzero().squeeze(1))
    assert vocabulary.t2d.dtype == torch.bool
    assert (len(vocabulary.t2d), int(vocabulary.t2d.sum())) == (len(values), size)
    assert vocabulary.d2t.dtype == torch.int64
    inside = sum(values[i] for i in expected)
    assert vocabulary.coverage(counts(*values)) == pytest.approx(inside / max(1, sum(values)))


def test_ties_go_to_the_lower_id() -> None:
    assert DraftVocabulary.by_frequency(counts(2, 5, 2, 5, 2), 3).used.tolist() == [0, 1, 3]


def test_fewer_distinct_tokens_than_places_are_filled_with_the_lowest_unused() -> None:
    vocabulary = DraftVocabulary.by_frequency(counts(0, 0, 0, 0, 0, 9, 0, 7), 5, always=[6])
    assert vocabulary.used.tolist() == [0, 1, 5, 6, 7]


def test_always_wins_over_any_count() -> None:
    vocabulary = DraftVocabulary.by_frequency(counts(10**12, 10**12, 0, 0), 2, always=[2, 3])
    assert vocabulary.used.tolist() == [2, 3]


def test_a_size_beyond_the_target_is_refused() -> None:
    with pytest.raises(DraftworksError, match=r"vocab\.size 6 .* 5"):
        DraftVocabulary.by_frequency(counts(1, 1, 1, 1, 1), 6)


def test_more_tokens_that_must_be_in_than_places_are_refused() -> None:
    with pytest.raises(DraftworksError, match=r"vocab\.size 2 .* 3"):
        DraftVocabulary.by_frequency(counts(1, 1, 1, 1, 1), 2, always=[0, 1, 4])


@given(st.lists(st.lists(st.integers(0, SIZE - 1), max_size=30), max_size=6))
@settings(max_examples=50, deadline=None)
def test_counting_equals_a_counter(batches: list[list[int]]) -> None:
    found = count_tokens((np.array(batch, dtype=np.int64) for batch in batches), SIZE)
    expected = Counter(token for batch in batches for token in batch)
    assert found.tolist() == [expected[token] for token in range(SIZE)]


def test_coverage_of_nothing_is_zero() -> None:
    assert DraftVocabulary(USED, SIZE).coverage(np.zeros(SIZE, dtype=np.int64)) == 0.0


@pytest.mark.parametrize(
    "used",
    [[1, 1, 2], [3, 2], [-1, 4], [4, SIZE]],
    ids=["doubled", "falling", "negative", "beyond_the_target"],
)
def test_ids_that_do_not_rise_within_the_target_are_refused(used: list[int]) -> None:
    with pytest.raises(DraftworksError, match="rise strictly"):
        DraftVocabulary(torch.tensor(used), SIZE)


@pytest.mark.parametrize("used", [USED, torch.tensor([0, 1, 2, 5])], ids=["sparse", "dense"])
def test_d2t_given_as_ids_is_refused(used: torch.Tensor) -> None:
    vocabulary = DraftVocabulary(used, SIZE)
    with pytest.raises(DraftworksError):
        DraftVocabulary.from_offsets(used, vocabulary.t2d)


def test_d2t_and_t2d_of_different_maps_are_refused() -> None:
    one, other = DraftVocabulary(USED, SIZE), DraftVocabulary(USED + 1, SIZE)
    with pytest.raises(DraftworksError, match="different tokens"):
        DraftVocabulary.from_offsets(one.d2t, other.t2d)


def test_a_saved_vocabulary_is_loaded_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    DraftVocabulary(USED, SIZE).save(path)
    loaded = DraftVocabulary.load(path)
    assert loaded.used.equal(USED)
    assert (len(loaded), loaded.target_size) == (len(USED), SIZE)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def truncated(path: Path) -> None:
    DraftVocabulary(USED, SIZE).save(path)
    path.write_bytes(path.read_bytes()[:-7])


def ids_for_offsets(path: Path) -> None:
    save_file({"d2t": USED, "t2d": DraftVocabulary(USED, SIZE).t2d}, path)


def half(path: Path) -> None:
    save_file({"d2t": DraftVocabulary(USED, SIZE).d2t}, path)


@pytest.mark.parametrize(
    "damage",
    [truncated, ids_for_offsets, half, lambda path: path.write_bytes(b""), lambda path: None],
    ids=["truncated", "ids_for_offsets", "no_t2d", "empty", "missing"],
)
def test_a_damaged_file_is_named(damage, tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    damage(path)
    with pytest.raises(DraftworksError, match=str(path)):
        DraftVocabulary.load(path)
