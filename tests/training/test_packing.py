"""Split and packs: nothing lost or doubled, and the same on every machine and after a resume."""

from pathlib import Path

import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

from draftworks.errors import DraftworksError
from draftworks.records.samples import SampleEntry
from draftworks.training.packing import epoch_packs, load_pack, plan_packs, read_ahead, split

BUDGET = 32


def entries(*lengths: int) -> list[SampleEntry]:
    return [SampleEntry(f"s{i}", f"c{i}", length, 1) for i, length in enumerate(lengths)]


def names(packs: list[list[SampleEntry]]) -> list[list[str]]:
    return [[entry.sample_id for entry in pack] for pack in packs]


LENGTHS = st.lists(st.integers(1, 2 * BUDGET), min_size=1, max_size=80)


@given(LENGTHS, st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_an_epoch_holds_every_sample_once_within_the_budget(
    lengths: list[int], seed: int, epoch: int
) -> None:
    packs = epoch_packs(entries(*lengths), BUDGET, seed, epoch)
    held = [name for pack in names(packs) for name in pack]
    assert sorted(held) == sorted(f"s{i}" for i in range(len(lengths)))
    for pack in packs:
        assert len(pack) == 1 or sum(entry.tokens for entry in pack) <= BUDGET


def test_a_sample_longer_than_the_budget_has_a_pack_of_its_own() -> None:
    packs = plan_packs(entries(10, 50, 10, 12), BUDGET, range(4))
    assert names(packs) == [["s0", "s2", "s3"], ["s1"]]


def test_packs_are_filled() -> None:
    """First fit leaves little room: well under a tenth more packs than the tokens need."""
    items = entries(*(4 + i * 7 % 13 for i in range(600)))
    needed = sum(item.tokens for item in items) / BUDGET
    assert len(epoch_packs(items, BUDGET, 0, 0)) < 1.1 * needed


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    items = entries(*(3 + i % 9 for i in range(40)))
    orders = {(s, e): names(epoch_packs(items, BUDGET, s, e)) for s in (0, 1) for e in (0, 1)}
    for (seed, epoch), order in orders.items():
        assert names(epoch_packs(items, BUDGET, seed, epoch)) == order
    assert len({str(order) for order in orders.values()}) == len(orders)


@given(st.lists(st.integers(0, 12), min_size=2, max_size=60), st.floats(0.01, 0.99))
@settings(max_examples=100, deadline=None)
def test_a_conversation_is_on_one_side_only(conversations: list[int], share: float) -> None:
    items = [SampleEntry(f"s{i}", f"c{c}", 5, 1) for i, c in enumerate(conversations)]
    training, validation = split(items, share, seed=0)
    sides = [{item.conversation_id for item in side} for side in (training, validation)]
    assert not sides[0] & sides[1]
    assert sorted([*training, *validation], key=items.index) == items
    distinct = len(set(conversations))
    if distinct > 1:
        assert training
        assert validation
        assert len(sides[1]) == min(max(1, round(distinct * share)), distinct - 1)


def test_the_split_is_a_function_of_the_seed_and_not_of_the_order() -> None:
    items = entries(*[5] * 40)
    held_out = {item.sample_id for item in split(items, 0.25, seed=0)[1]}
    assert {item.sample_id for item in split(items[::-1], 0.25, seed=0)[1]} == held_out
    assert {item.sample_id for item in split(items, 0.25, seed=1)[1]} != held_out


def test_more_conversations_move_few_others_to_the_other_side() -> None:
    """The order of conversations is by digest, so the split grows and is not drawn anew."""
    before = {item.sample_id for item in split(entries(*[5] * 100), 0.2, seed=0)[1]}
    after = {item.sample_id for item in split(entries(*[5] * 110), 0.2, seed=0)[1]}
    assert len(before & after) >= 15


def test_a_pack_is_its_samples_end_to_end(tmp_path: Path) -> None:
    documents = toys.documents("..aas", ".a", "...aaa")
    store, items = toys.store(tmp_path, documents)
    found, expected = load_pack(store, items, [toys.STOP]), toys.pack(documents)
    assert found.lengths == expected.lengths
    for name in ("tokens", "aux", "last", "argmax", "offsets", "ends", "counts"):
        assert getattr(found, name).equal(getattr(expected, name)), name


def test_packs_are_read_ahead_in_order(tmp_path: Path) -> None:
    documents = toys.documents(*(".a" + "a" * (i % 5) for i in range(23)))
    store, items = toys.store(tmp_path, documents)
    plan = plan_packs(items, 9, range(len(items)))
    read = list(read_ahead(store, plan, []))
    assert [pack.lengths for pack in read] == [tuple(e.tokens for e in group) for group in plan]
    tokens = [
        token for group in plan for e in group for token in documents[items.index(e)].token_ids
    ]
    assert [token for pack in read for token in pack.tokens.tolist()] == tokens


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_a_bad_sample_is_named_when_its_pack_is_due(damage: str, tmp_path: Path) -> None:
    """The packs before it are delivered: training commits what it can."""
    store, items = toys.store(tmp_path, toys.documents(*[".aa"] * 9))
    path = store.path(items[6].sample_id)
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[: -5 if damage == "truncated" else 0])
    packs = read_ahead(store, [[item] for item in items], [])
    assert [next(packs).lengths for _ in range(6)] == [(3,)] * 6
    with pytest.raises(DraftworksError, match=f"sample {items[6].sample_id}.*{path.name}"):
        next(packs)
