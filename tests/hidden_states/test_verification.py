"""Faults planted in a store: each is found, in its kind, by its name, and nothing else is."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hidden_states.sample_states import CONVENTION, HIDDEN, NAMES, TOKENS, commit, states
from safetensors.torch import load_file, save_file

from draftworks.errors import StopRequested
from draftworks.hidden_states.store import SampleStates, StateStore, StateWriter
from draftworks.hidden_states.verification import faults
from draftworks.progress import Progress
from draftworks.records.inspection import Findings, Inspection, Seen
from draftworks.records.manifest import ManifestWriter, read_manifest, rewrite_manifest
from draftworks.workspace import digest, file_digest

FULL_SIZE = 37_312
STRANGER = "00000000000000ff"
Plant = Callable[[StateStore], object]


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    store = StateStore(tmp_path / "store")
    commit(store, *TOKENS)
    return store


def look(store: StateStore, inspection: Inspection | None = None) -> Findings:
    return faults(store, TOKENS, CONVENTION, HIDDEN, inspection or Inspection())


def content(store: StateStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.root.glob("??/*")}


# The faults. Each has samples of its own, so that all can be planted at once.

DELETED, TRUNCATED, FLIPPED, NAN, DOUBLED, MISSING, OTHER_TOKENS = (NAMES[n] for n in range(7))
ONE, TWO = NAMES[7], NAMES[10]  # of one length, so that their files have one size


def edit_row(store: StateStore, name: str, **values: Any) -> None:
    rows = [row | values if row["id"] == name else row for row in store.rows()]
    store.manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))


def truncate(store: StateStore) -> None:
    path = store.path(TRUNCATED)
    path.write_bytes(path.read_bytes()[:-1])


def flip(store: StateStore) -> None:
    path = store.path(FLIPPED)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def exchange(store: StateStore) -> None:
    one, two = store.path(ONE), store.path(TWO)
    kept = one.read_bytes()
    shutil.copy(two, one)
    two.write_bytes(kept)


def write_as_a_faulty_engine(store: StateStore, name: str, made: SampleStates) -> None:
    """A file that nobody checked, with a row that fits it."""
    path = store.path(name)
    save_file(dict(vars(made)), path, CONVENTION.metadata(name))
    edit_row(store, name, sha256=file_digest(path), bytes=path.stat().st_size)


def not_a_number(store: StateStore) -> None:
    made = states(TOKENS[NAN])
    made.aux[-1, 1, 3] = torch.nan
    write_as_a_faulty_engine(store, NAN, made)


def other_tokens(store: StateStore) -> None:
    made = states(TOKENS[OTHER_TOKENS])
    made.token_ids[0] += 1
    write_as_a_faulty_engine(store, OTHER_TOKENS, made)


def add_stranger(store: StateStore) -> None:
    writer = ManifestWriter(store.manifest)
    writer.append(next(store.rows()) | {"id": STRANGER})
    writer.close()
    store.path(STRANGER).parent.mkdir(exist_ok=True)
    shutil.copy(store.path(NAMES[11]), store.path(STRANGER))


def add_files(store: StateStore) -> None:
    (store.root / "notes.txt").write_text("mine")
    shutil.copy(store.path(NAMES[11]), store.path(NAMES[11]).with_name("copy.safetensors"))


ADDED = f"{NAMES[11][:2]}/copy.safetensors"
PLANTED: dict[str, tuple[Plant, Findings]] = {
    "deleted": (lambda s: s.path(DELETED).unlink(), Findings(damaged={DELETED: "is missing"})),
    "truncated": (truncate, Findings(damaged={TRUNCATED: "has 807 of 808 bytes"})),
    "bit-flipped": (flip, Findings(damaged={FLIPPED: "differs from its checksum"})),
    "swapped": (
        exchange,
        Findings(
            damaged={
                ONE: f"differs from its checksum, and holds sample {TWO}",
                TWO: f"differs from its checksum, and holds sample {ONE}",
            }
        ),
    ),
    "nan": (not_a_number, Findings(damaged={NAN: "holds values that are not finite in aux"})),
    "row-twice": (lambda s: commit(s, DOUBLED), Findings(duplicate=(DOUBLED,))),
    "row-lost": (
        lambda s: rewrite_manifest(s.manifest, lambda row: row["id"] != MISSING),
        Findings(missing=(MISSING,)),
    ),
    "other-tokens": (
        other_tokens,
        Findings(damaged={OTHER_TOKENS: "holds the states of other tokens"}),
    ),
    "stranger": (add_stranger, Findings(foreign=(STRANGER,))),
    "files": (add_files, Findings(foreign=tuple(sorted([ADDED, "notes.txt"])))),
}
ALL = Findings(
    missing=(MISSING,),
    duplicate=(DOUBLED,),
    foreign=(STRANGER, *sorted([ADDED, "notes.txt"])),
    damaged={name: text for _, each in PLANTED.values() for name, text in each.damaged.items()},
)
SEEN_BY_SIZE = {DELETED, TRUNCATED}


def test_a_sound_store_has_no_faults(store: StateStore) -> None:
    assert look(store) == look(store, Inspection(share=0)) == Findings()


def test_a_store_that_is_not_there_misses_all(tmp_path: Path) -> None:
    assert look(StateStore(tmp_path / "none")) == Findings(missing=tuple(sorted(TOKENS)))


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_named_exactly(store: StateStore, fault: str) -> None:
    plant, expected = PLANTED[fault]
    plant(store)
    assert look(store) == expected


def test_all_faults_at_once_are_named_exactly(store: StateStore) -> None:
    for plant, _ in PLANTED.values():
        plant(store)
    assert look(store) == ALL
    shallow = look(store, Inspection(share=0))
    assert shallow == replace(ALL, damaged={name: ALL.damaged[name] for name in SEEN_BY_SIZE})


def test_work_of_a_writer_is_no_fault(store: StateStore) -> None:
    """A partial file, and a file whose row comes next."""
    rewrite_manifest(store.manifest, lambda row: row["id"] != MISSING)
    store.path(MISSING).with_name("x.safetensors.partial").write_bytes(b"half")
    assert look(store) == Findings(missing=(MISSING,))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, -torch.nan])
@pytest.mark.parametrize("tensor", ["aux", "last"])
def test_every_value_that_is_not_finite_is_found(
    store: StateStore, tensor: str, value: float
) -> None:
    made = states(TOKENS[NAN])
    getattr(made, tensor).view(-1)[-1] = value
    write_as_a_faulty_engine(store, NAN, made)
    assert look(store).damaged == {NAN: f"holds values that are not finite in {tensor}"}


def test_the_largest_finite_values_are_sound(store: StateStore) -> None:
    made = states(TOKENS[NAN])
    most = torch.finfo(torch.bfloat16).max
    made.last.fill_(most)
    made.aux.fill_(-most)
    write_as_a_faulty_engine(store, NAN, made)
    assert look(store) == Findings()


def test_the_last_value_of_a_long_sample_is_looked_at(tmp_path: Path) -> None:
    """Files are read in chunks of a megabyte; the sample's tensors begin and end inside them."""
    tokens = list(range(33_331))
    made = states(tokens)
    store = StateStore(tmp_path)
    name = digest(tokens)
    writer = StateWriter(store, CONVENTION)
    writer.commit(name, tokens, made)
    writer.close()

    def damaged() -> dict[str, str]:
        return dict(faults(store, [name], CONVENTION, HIDDEN, Inspection()).damaged)

    assert damaged() == {}
    for index in (0, made.aux.numel() // 2, made.aux.numel() - 1):
        spoilt = replace(made, aux=made.aux.clone())
        spoilt.aux.view(-1)[index] = torch.nan
        write_as_a_faulty_engine(store, name, spoilt)
        assert damaged() == {name: "holds values that are not finite in aux"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": (1, 3, 4)}, "is recorded with layers [1, 3, 4], expected [2, 4, 5]"),
        ({"layers": (2, 4, 6)}, "is recorded with layers [2, 4, 6], expected [2, 4, 5]"),
        ({"norm_applied": False}, "is recorded with norm_applied False, expected True"),
        ({"dtype": "float16"}, "is recorded with dtype float16, expected bfloat16"),
        ({"engine": "vllm"}, "is recorded with engine vllm, expected reference"),
        ({"engine_version": "4"}, "is recorded with engine_version 4, expected 5.24.0"),
    ],
)
def test_another_convention_is_found_in_the_row_and_in_the_file(
    store: StateStore, change: dict[str, Any], reason: str
) -> None:
    sound = next(row for row in store.rows() if row["id"] == NAN)
    rewrite_manifest(store.manifest, lambda row: row["id"] != NAN)
    commit(store, NAN, convention=replace(CONVENTION, **change))
    assert look(store, Inspection(share=0)).damaged == {NAN: reason}
    # The row says what is expected, the file does not.
    content = {name: sound[name] for name in vars(CONVENTION)}
    edit_row(store, NAN, **content)
    assert look(store).damaged == {NAN: reason}


def reshape(made: dict[str, torch.Tensor]) -> None:
    made["aux"] = made["aux"][:, :2].contiguous()


def convert(made: dict[str, torch.Tensor]) -> None:
    made["last"] = made["last"].half()


def drop(made: dict[str, torch.Tensor]) -> None:
    del made["argmax"]


def shorten(made: dict[str, torch.Tensor]) -> None:
    made |= {name: tensor[:-1].clone() for name, tensor in made.items()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (reshape, "holds aux ('BF16', [4, 2, 8]), expected ('BF16', [4, 3, 8])"),
        (convert, "holds last ('F16', [4, 8]), expected ('BF16', [4, 8])"),
        (drop, "holds argmax None, expected ('I32', [4])"),
        (shorten, "holds argmax ('I32', [3]), expected ('I32', [4])"),
    ],
)
def test_other_tensors_are_found_though_the_checksum_fits(
    store: StateStore, change: Callable[[dict[str, torch.Tensor]], None], reason: str
) -> None:
    path = store.path(NAN)
    made = load_file(path)
    change(made)
    save_file(made, path, CONVENTION.metadata(NAN))
    edit_row(store, NAN, sha256=file_digest(path), bytes=path.stat().st_size)
    assert look(store).damaged == {NAN: reason}


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"{}", bytes(200)])
def test_a_file_without_a_header_is_found_though_the_checksum_fits(
    store: StateStore, header: bytes
) -> None:
    path = store.path(NAN)
    path.write_bytes(header)
    edit_row(store, NAN, sha256=file_digest(path), bytes=len(header))
    assert look(store).damaged == {NAN: "has no readable header"}


# How closely


def test_a_share_reads_some_files_and_others_each_time(store: StateStore) -> None:
    """A flipped bit is found by those looks that chose its file."""
    flip(store)
    found = [bool(look(store, Inspection(share=0.5)).damaged) for _ in range(60)]
    assert 10 < sum(found) < 50
    inspection = Inspection(share=0.25)
    look(store, inspection)
    assert inspection.checked == "a sample of 3 of 12 files (25 %), chosen anew"


def test_the_smallest_share_reads_one_file(store: StateStore) -> None:
    inspection = Inspection(share=1e-9)
    progress = Progress()
    look(store, Inspection(share=1e-9, progress=progress))
    assert (progress.done, progress.total) == (1, 1)
    look(store, inspection)
    assert inspection.checked.startswith("a sample of 1 of 12 files")


def test_every_sample_of_a_sampled_look_is_seen_by_its_size(store: StateStore) -> None:
    truncate(store)
    assert look(store, Inspection(share=0.1)).damaged.keys() == {TRUNCATED}


def test_what_was_read_is_not_read_again_until_it_changes(store: StateStore) -> None:
    seen = Seen()
    progress = [Progress() for _ in range(4)]
    rewrite_manifest(store.manifest, lambda row: row["id"] != MISSING)
    assert look(store, Inspection(progress=progress[0], seen=seen)).missing == (MISSING,)
    assert progress[0].done == 11
    commit(store, MISSING)
    inspection = Inspection(progress=progress[1], seen=seen)
    assert look(store, inspection) == Findings()
    assert (progress[1].done, inspection.checked) == (1, "every byte")
    flip(store)
    for number in (2, 3):  # a damaged file does not count as read
        found = look(store, Inspection(progress=progress[number], seen=seen))
        assert found.damaged.keys() == {FLIPPED}
        assert progress[number].done == 1


@pytest.mark.parametrize("name", [NAMES[0], NAMES[11]])
def test_another_row_is_another_file(store: StateStore, name: str) -> None:
    seen = Seen()
    look(store, Inspection(seen=seen))
    edit_row(store, name, sha256="0" * 64)
    assert look(store, Inspection(seen=seen)).damaged == {name: "differs from its checksum"}


class Meddling(Progress):
    """Does something once the first file is read."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        super().__init__()
        self.meddle = meddle

    def begin(self, total: int, unit: str, done: int = 0) -> None:
        super().begin(total, unit, done)
        self.meddle()


def test_a_file_that_vanishes_while_others_are_read_is_a_finding(store: StateStore) -> None:
    inspection = Inspection(progress=Meddling(store.path(NAMES[11]).unlink))
    assert look(store, inspection).damaged == {NAMES[11]: "is missing"}


def test_a_file_that_cannot_be_read_is_a_finding(store: StateStore) -> None:
    path = store.path(NAMES[3])
    path.unlink()
    path.mkdir()
    edit_row(store, NAMES[3], bytes=path.stat().st_size)
    (reason,) = look(store).damaged.values()
    assert reason == "cannot be read (Is a directory)"


def test_a_look_ends_when_it_is_asked_to(store: StateStore) -> None:
    progress = Progress()
    progress.stop_requested = True
    with pytest.raises(StopRequested):
        look(store, Inspection(progress=progress))


def test_a_store_of_full_size_is_looked_over_in_seconds(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "store")
    commit(store, NAMES[0])
    (row,) = store.rows()
    file = store.path(NAMES[0])
    names = [f"{number * 2654435761 % 2**32:08x}{number:08x}" for number in range(FULL_SIZE)]
    for folder in {name[:2] for name in names}:
        (store.root / folder).mkdir(exist_ok=True)
    for name in names:
        os.link(file, store.path(name))
    file.unlink()
    lines = (json.dumps(row | {"id": name}) + "\n" for name in names)
    store.manifest.write_text("".join(lines))
    store.path(names[77]).unlink()
    started = time.monotonic()
    found = faults(store, set(names), CONVENTION, HIDDEN, Inspection(share=0))
    assert time.monotonic() - started < 5
    assert found == Findings(damaged={names[77]: "is missing"})


# Quarantine


def test_only_what_was_damaged_is_made_again_and_the_store_is_as_before(store: StateStore) -> None:
    before, whole = content(store), store.digest()
    for plant, _ in PLANTED.values():
        plant(store)
    damaged = {
        name: path.read_bytes() for name in ALL.damaged if (path := store.path(name)).exists()
    }
    store.quarantine(look(store))
    left = look(store)
    assert left == Findings(missing=tuple(sorted({MISSING, *ALL.damaged})))
    commit(store, *left.missing)
    assert look(store) == Findings()
    assert content(store) == before
    assert store.digest() == whole
    kept = {path.name: path.read_bytes() for path in (store.root / "quarantine").iterdir()}
    assert {name: kept[f"{name}-1.safetensors"] for name in damaged} == damaged
    assert kept.keys() - {f"{name}-1.safetensors" for name in damaged} == {
        f"{STRANGER}-1.safetensors",
        "copy-1.safetensors",
        "notes-1.txt",
    }
    log = {row["id"]: row["reason"] for row in read_manifest(store.root / "quarantine.jsonl")}
    assert log == {**ALL.damaged, **dict.fromkeys(ALL.foreign, "foreign")}


def test_evidence_is_never_overwritten(store: StateStore) -> None:
    for count in (1, 2, 3):
        flip(store)
        store.quarantine(look(store))
        commit(store, FLIPPED)
        kept = {path.name for path in (store.root / "quarantine").iterdir()}
        assert kept == {f"{FLIPPED}-{number + 1}.safetensors" for number in range(count)}


def test_a_store_that_is_damaged_as_a_whole_does_not_fill_the_disk(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftworks.hidden_states.store.KEPT", 5)
    found = faults(store, TOKENS, replace(CONVENTION, engine="vllm"), HIDDEN, Inspection())
    assert found.damaged.keys() == set(TOKENS)
    store.quarantine(found)
    assert store.ids() == set()
    assert len(list((store.root / "quarantine").iterdir())) == 5
    rows = read_manifest(store.root / "quarantine.jsonl")
    assert len(rows) == 12
    assert sum("file" in row for row in rows) == 5
    commit(store, *TOKENS)
    assert look(store) == Findings()


def test_a_name_that_leads_out_of_the_store_moves_nothing(store: StateStore) -> None:
    outside = store.root.parent / "outside"
    outside.write_text("not ours")
    writer = ManifestWriter(store.manifest)
    writer.append(next(store.rows()) | {"id": "../outside"})
    writer.close()
    found = look(store)
    assert found == Findings(foreign=("../outside",))
    store.quarantine(found)
    assert outside.read_text() == "not ours"
    assert look(store) == Findings()


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("moment", range(1, 40))
def test_a_kill_at_any_step_leaves_the_old_state_or_one_that_is_finished(
    store: StateStore, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Every durable step of a quarantine is an fsync, a rename or an unlink; die before each."""
    before = content(store)
    for fault in ("deleted", "bit-flipped", "files", "row-twice"):
        PLANTED[fault][0](store)
    evidence = store.path(FLIPPED).read_bytes()
    found = look(store)
    steps = 0

    def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **keywords: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps >= moment:  # dead from now on: nothing cleans up
                raise KilledError
            return original(*arguments, **keywords)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", deadly(os.fsync))
        for name in ("rename", "replace", "unlink"):
            patch.setattr(Path, name, deadly(getattr(Path, name)))
        try:
            store.quarantine(found)
        except KilledError:
            finished = False
        else:
            finished = True
    assert finished == (steps < moment)
    store.recover()
    store.quarantine(look(store))
    commit(store, *look(store).missing)
    assert look(store) == Findings()
    assert content(store) == before
    log = [(row["id"], row["reason"]) for row in read_manifest(store.root / "quarantine.jsonl")]
    assert sorted(log) == sorted(
        [*found.damaged.items(), *((name, "foreign") for name in found.foreign)]
    )
    kept = {path.name: path.read_bytes() for path in (store.root / "quarantine").iterdir()}
    assert kept.keys() == {f"{FLIPPED}-1.safetensors", "copy-1.safetensors", "notes-1.txt"}
    assert kept[f"{FLIPPED}-1.safetensors"] == evidence
