"""The store of hidden states: what is committed comes back, and what is wrong is not committed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hidden_states.sample_states import CONVENTION, HIDDEN, NAMES, TOKENS, commit, states
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftworks.errors import DraftworksError
from draftworks.hidden_states.store import SampleStates, StateStore, StateWriter
from draftworks.hidden_states.verification import faults
from draftworks.records.inspection import Findings, Inspection
from draftworks.workspace import file_digest

FIRST, SECOND = NAMES[:2]


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    store = StateStore(tmp_path)
    commit(store, *TOKENS)
    return store


def equal(one: SampleStates, other: SampleStates) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


# Sound


def test_every_sample_comes_back_as_its_own(store: StateStore) -> None:
    assert store.ids() == set(TOKENS)
    for name in TOKENS:
        assert equal(store.read(name), states(TOKENS[name]))


def test_a_file_says_what_its_states_are(store: StateStore) -> None:
    path = store.path(FIRST)
    assert path == store.root / FIRST[:2] / f"{FIRST}.safetensors"
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["states"]) == {
            "id": FIRST,
            "layers": [2, 4, 5],
            "norm_applied": True,
            "dtype": "bfloat16",
            "engine": "reference",
            "engine_version": "5.24.0",
        }
    row = next(store.rows())
    assert (row["id"], row["rows"], row["bytes"]) == (
        FIRST,
        len(TOKENS[FIRST]),
        path.stat().st_size,
    )
    assert row["sha256"] == file_digest(path)


def test_slices_of_a_batch_are_stored_whole(tmp_path: Path) -> None:
    """States come as views into a padded batch."""
    batch = torch.randn(2, 9, 3, HIDDEN).bfloat16()
    given = states(TOKENS[FIRST])
    view = replace(given, aux=batch[1, : len(TOKENS[FIRST])])
    writer = StateWriter(StateStore(tmp_path), CONVENTION)
    writer.commit(FIRST, TOKENS[FIRST], view)
    writer.close()
    assert torch.equal(StateStore(tmp_path).read(FIRST).aux, view.aux)


def test_a_store_that_is_not_there_is_empty(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "none")
    assert store.ids() == set()


def test_the_digest_is_blind_to_order_and_to_nothing_else(tmp_path: Path) -> None:
    one, other, less = (StateStore(tmp_path / name) for name in ("one", "other", "less"))
    commit(one, *TOKENS)
    commit(other, *reversed(TOKENS))
    commit(less, FIRST, SECOND)
    assert one.digest() == other.digest() != less.digest()


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    copies = [StateStore(tmp_path / str(number)) for number in range(8)]
    for copy in copies:
        commit(copy, FIRST)
    assert len({copy.path(FIRST).read_bytes() for copy in copies}) == 1


def test_samples_go_on_in_a_second_writer(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    commit(store, *NAMES[:5])
    commit(store, *NAMES[5:])
    assert store.ids() == set(TOKENS)


# Read


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])]
)
def test_reading_a_damaged_sample_says_which_and_what_to_do(
    store: StateStore, damage: Callable[[Path], object]
) -> None:
    damage(store.path(SECOND))
    expected = rf"sample {SECOND}: .*{SECOND}\.safetensors.*Run the extract stage again"
    with pytest.raises(DraftworksError, match=expected):
        store.read(SECOND)


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
    sound = states(TOKENS[FIRST])
    with pytest.raises(DraftworksError, match=f"sample {FIRST}: .*{expected}"):
        writer.commit(FIRST, TOKENS[FIRST], replace(sound, **change(sound)))
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
    found = faults(store, committed, CONVENTION, HIDDEN, Inspection(share=0))
    assert found == Findings()
    files = [path for path in small_disk.rglob("*") if path.is_file() and path != store.manifest]
    assert {path.stem for path in files} == set(committed)
