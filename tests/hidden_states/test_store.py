"""The store of hidden states: every fault is found, and named by the sample that has it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftworks.errors import DraftworksError
from draftworks.hidden_states.store import Convention, SampleStates, StateStore, StateWriter
from draftworks.workspace import file_digest

CONVENTION = Convention((2, 4, 5), True, "bfloat16", "reference", "5.24.0")
HIDDEN = 8
LENGTHS = {f"{number:016x}": 3 + number % 3 for number in (10, 2, 30, 33)}
"""Ids in an order that is neither that of their numbers nor of their texts; two of one length."""
TEN, TWO, THIRTY, LIKE_THIRTY = LENGTHS


def states(tokens: list[int]) -> SampleStates:
    torch.manual_seed(tokens[0])
    length = len(tokens)
    return SampleStates(
        torch.tensor(tokens, dtype=torch.int32),
        torch.randn(length, 3, HIDDEN).bfloat16(),
        torch.randn(length, HIDDEN).bfloat16(),
        torch.randint(0, 99, (length,), dtype=torch.int32),
    )


def tokens_of(name: str) -> list[int]:
    return list(range(int(name, 16), int(name, 16) + LENGTHS[name]))


def commit(store: StateStore, *names: str, convention: Convention = CONVENTION) -> None:
    writer = StateWriter(store, convention)
    for name in names:
        writer.commit(name, tokens_of(name), states(tokens_of(name)))
    writer.close()


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    store = StateStore(tmp_path)
    commit(store, *LENGTHS)
    return store


def faults(store: StateStore, *, deep: bool = True, **settings: Any) -> dict[str, str]:
    expected = {"expected": LENGTHS, "convention": CONVENTION, "hidden_size": HIDDEN}
    return store.faults(**(expected | settings), deep=deep)


def equal(one: SampleStates, other: SampleStates) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


# Sound


def test_every_sample_comes_back_as_its_own(store: StateStore) -> None:
    assert store.ids() == set(LENGTHS)
    for name in LENGTHS:
        assert equal(store.read(name), states(tokens_of(name)))
    assert faults(store) == {}


def test_a_file_says_what_its_states_are(store: StateStore) -> None:
    path = store.path(TEN)
    assert path == store.root / "00" / f"{TEN}.safetensors"
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["states"]) == {
            "id": TEN,
            "layers": [2, 4, 5],
            "norm_applied": True,
            "dtype": "bfloat16",
            "engine": "reference",
            "engine_version": "5.24.0",
        }
    row = next(store.rows())
    assert (row["id"], row["rows"], row["bytes"]) == (TEN, LENGTHS[TEN], path.stat().st_size)
    assert row["sha256"] == file_digest(path)


def test_slices_of_a_batch_are_stored_whole(tmp_path: Path) -> None:
    """States come as views into a padded batch."""
    batch = torch.randn(2, 9, 3, HIDDEN).bfloat16()
    given = states(tokens_of(TEN))
    view = replace(given, aux=batch[1, : LENGTHS[TEN]])
    writer = StateWriter(StateStore(tmp_path), CONVENTION)
    writer.commit(TEN, tokens_of(TEN), view)
    writer.close()
    assert torch.equal(StateStore(tmp_path).read(TEN).aux, view.aux)


def test_a_store_that_is_not_there_is_empty(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "none")
    assert (store.ids(), faults(store)) == (set(), {})


def test_the_digest_is_blind_to_order_and_to_nothing_else(tmp_path: Path) -> None:
    one, other, less = (StateStore(tmp_path / name) for name in ("one", "other", "less"))
    commit(one, *LENGTHS)
    commit(other, *reversed(LENGTHS))
    commit(less, TEN, TWO)
    assert one.digest() == other.digest() != less.digest()


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    copies = [StateStore(tmp_path / str(number)) for number in range(8)]
    for copy in copies:
        commit(copy, TEN)
    assert len({copy.path(TEN).read_bytes() for copy in copies}) == 1


def test_samples_go_on_in_a_second_writer(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    commit(store, TEN, TWO)
    assert faults(store) == {}
    commit(store, THIRTY, LIKE_THIRTY)
    assert store.ids() == set(LENGTHS)
    assert faults(store) == {}


# Faults


def cut(store: StateStore) -> None:
    path = store.path(THIRTY)
    path.write_bytes(path.read_bytes()[:-1])


def flip(store: StateStore) -> None:
    path = store.path(THIRTY)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap(store: StateStore) -> None:
    """Another sample's file, of the same size."""
    shutil.copy(store.path(LIKE_THIRTY), store.path(THIRTY))


def edit_row(**values: Any) -> Callable[[StateStore], None]:
    def edit(store: StateStore) -> None:
        rows = [row | values if row["id"] == THIRTY else row for row in store.rows()]
        store.manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return edit


def forge(store: StateStore) -> None:
    """Another sample's file with the manifest made to fit."""
    swap(store)
    edit_row(sha256=file_digest(store.path(THIRTY)))(store)


def recorded_as(**values: Any) -> Callable[[StateStore], None]:
    def commit_again(store: StateStore) -> None:
        store.discard({THIRTY})
        commit(store, THIRTY, convention=replace(CONVENTION, **values))

    return commit_again


FAULTS = [
    pytest.param(lambda s: s.path(THIRTY).unlink(), "is missing", id="missing"),
    pytest.param(cut, "bytes, expected", id="truncated"),
    pytest.param(lambda s: s.path(THIRTY).write_bytes(b""), "has 0 bytes, expected", id="emptied"),
    pytest.param(lambda s: commit(s, THIRTY), "twice in the manifest", id="doubled"),
    pytest.param(edit_row(bytes=7), "bytes, expected 7", id="row-altered"),
]
DEEP_FAULTS = [
    pytest.param(flip, "differs from its checksum", id="bit-flip"),
    pytest.param(swap, "differs from its checksum", id="swapped"),
    pytest.param(forge, f'"id": "{LIKE_THIRTY}"', id="swapped-and-forged"),
    pytest.param(recorded_as(layers=(1, 3, 4)), '"layers": [1, 3, 4]', id="layers"),
    pytest.param(recorded_as(layers=(2, 4, 6)), '"layers": [2, 4, 6]', id="last-layer-off-by-one"),
    pytest.param(recorded_as(norm_applied=False), '"norm_applied": false', id="norm"),
    pytest.param(recorded_as(engine="vllm"), '"engine": "vllm"', id="engine"),
    pytest.param(recorded_as(engine_version="4"), '"engine_version": "4"', id="version"),
    pytest.param(recorded_as(dtype="float8"), '"dtype": "float8"', id="dtype"),
]


@pytest.mark.parametrize(("damage", "expected"), [*FAULTS, *DEEP_FAULTS])
def test_a_fault_names_its_sample_alone(
    store: StateStore, damage: Callable[[StateStore], object], expected: str
) -> None:
    damage(store)
    found = faults(store)
    assert list(found) == [THIRTY]
    assert expected in found[THIRTY]


@pytest.mark.parametrize(("damage", "expected"), FAULTS)
def test_faults_of_presence_and_size_show_without_reading_the_states(
    store: StateStore, damage: Callable[[StateStore], object], expected: str
) -> None:
    damage(store)
    assert list(faults(store, deep=False)) == [THIRTY]


def test_a_sample_that_nobody_generated_is_a_fault(store: StateStore) -> None:
    expected = {name: length for name, length in LENGTHS.items() if name != TWO}
    assert faults(store, expected=expected) == {TWO: "not one of the generated samples"}


@pytest.mark.parametrize("missing", [-1, 1])
def test_a_sample_of_another_length_is_a_fault(store: StateStore, missing: int) -> None:
    found = faults(store, expected=LENGTHS | {TWO: LENGTHS[TWO] + missing})
    assert list(found) == [TWO]
    assert "shapes" in found[TWO]


def test_another_hidden_size_is_a_fault_of_all(store: StateStore) -> None:
    assert set(faults(store, hidden_size=HIDDEN + 1)) == set(LENGTHS)


def test_several_faults_are_all_found(store: StateStore) -> None:
    cut(store)
    store.path(TEN).unlink()
    assert set(faults(store)) == {THIRTY, TEN}


@pytest.mark.parametrize("damage", [lambda store: store.path(THIRTY).unlink(), cut, flip, swap])
def test_a_discarded_sample_can_be_committed_again(
    store: StateStore, damage: Callable[[StateStore], object]
) -> None:
    before = store.digest()
    damage(store)
    store.discard(faults(store))
    assert store.ids() == LENGTHS.keys() - {THIRTY}
    commit(store, THIRTY)
    assert faults(store) == {}
    assert store.digest() == before


@pytest.mark.parametrize("damage", [lambda store: store.path(THIRTY).unlink(), cut])
def test_reading_a_damaged_sample_says_which_and_what_to_do(
    store: StateStore, damage: Callable[[StateStore], object]
) -> None:
    damage(store)
    expected = rf"sample {THIRTY}: .*{THIRTY}\.safetensors.*Run the extract stage again"
    with pytest.raises(DraftworksError, match=expected):
        store.read(THIRTY)


# Refused at the door


def with_value(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = value
    return changed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda s: {"aux": with_value(s.aux, float("nan"))}, "aux holds", id="aux-nan"),
        pytest.param(lambda s: {"last": with_value(s.last, float("inf"))}, "last holds", id="inf"),
        pytest.param(lambda s: {"aux": s.aux[:-1]}, "4 tokens were sent", id="aux-short"),
        pytest.param(lambda s: {"last": s.last[1:]}, "4 tokens were sent", id="last-short"),
        pytest.param(lambda s: {"argmax": s.argmax[:-1]}, "4 tokens were sent", id="argmax-short"),
        pytest.param(lambda s: {"token_ids": s.token_ids + 1}, "other tokens", id="other-tokens"),
        pytest.param(lambda s: {"token_ids": s.token_ids.flip(0)}, "other tokens", id="reordered"),
        pytest.param(
            lambda s: {name: tensor[:3] for name, tensor in vars(s).items()},
            "4 tokens were sent",
            id="all-short",
        ),
    ],
)
def test_states_that_are_not_the_samples_own_are_refused(
    tmp_path: Path, change: Callable[[SampleStates], dict[str, Tensor]], expected: str
) -> None:
    store = StateStore(tmp_path)
    writer = StateWriter(store, CONVENTION)
    sound = states(tokens_of(TEN))
    with pytest.raises(DraftworksError, match=f"sample {TEN}: .*{expected}"):
        writer.commit(TEN, tokens_of(TEN), replace(sound, **change(sound)))
    writer.close()
    assert store.ids() == set()
    assert [path.name for path in tmp_path.rglob("*")] == ["manifest.jsonl"]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../../../etc/passwd",
        "/etc/passwd",
        "0123456789abcde",
        "0123456789abcdef0",
        "0123456789ABCDEF",
        "0123456789abcde/",
        "0123456789abcdef\n",
        "..23456789abcdef",
    ],
    ids=repr,
)
def test_an_id_that_is_no_digest_names_no_path(tmp_path: Path, name: str) -> None:
    store = StateStore(tmp_path / "store")
    writer = StateWriter(store, CONVENTION)
    for use in (
        lambda: store.path(name),
        lambda: store.read(name),
        lambda: writer.commit(name, [1], states([1])),
    ):
        with pytest.raises(DraftworksError, match="expected 16 hexadecimal digits"):
            use()
    writer.close()
    assert [path.name for path in tmp_path.rglob("*")] == ["store", "manifest.jsonl"]


def test_a_full_disk_leaves_no_sample_and_the_rest_sound(small_disk: Path) -> None:
    store = StateStore(small_disk)
    writer = StateWriter(store, CONVENTION)
    committed: dict[str, int] = {}
    tokens = list(range(2000))
    with pytest.raises((OSError, SafetensorError), match="No space left"):  # noqa: PT012
        for number in range(100):
            writer.commit(f"{number:016x}", tokens, states(tokens))
            committed[f"{number:016x}"] = len(tokens)
    writer.close()
    assert 0 < len(committed) < 20
    assert store.ids() == set(committed)
    assert faults(store, expected=committed) == {}
    files = [path for path in small_disk.rglob("*") if path.is_file() and path != store.manifest]
    assert {path.stem for path in files} == set(committed)
