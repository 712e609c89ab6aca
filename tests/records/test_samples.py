"""The store of samples: what is committed is whole, and what is damaged is found."""

import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from draftworks.errors import DraftworksError
from draftworks.records.inspection import Findings, Inspection
from draftworks.records.manifest import ManifestWriter, rewrite_manifest
from draftworks.records.samples import Rejected, Sample, SampleEntry, SampleStore, SampleWriter
from draftworks.workspace import file_digest


def sample(number: int, conversation: str = "") -> Sample:
    ids = (1, number, number + 1, 2)
    return Sample(conversation or f"c{number}", ids, 2, "stop", f"text {number} 👋")


def write(root: Path, *parts: list[Sample | Rejected]) -> SampleStore:
    store = SampleStore(root)
    writer = SampleWriter(store)
    for part in parts:
        writer.commit(
            [item for item in part if isinstance(item, Sample)],
            [item for item in part if isinstance(item, Rejected)],
        )
    writer.close()
    return store


ALL = ["c0", "c1", "c2", "c3", "c4", "c9"]


def faults(store: SampleStore, wanted: Collection[str] = ALL, share: float = 1.0) -> Findings:
    return store.faults(wanted, Inspection(share))


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    """Three parts: samples 0 1, samples 2 3 and a rejected answer, sample 4."""
    return write(
        tmp_path,
        [sample(0), sample(1)],
        [sample(2), sample(3), Rejected("c9", "truncated")],
        [sample(4)],
    )


def test_samples_come_back_as_they_were(store: SampleStore) -> None:
    assert list(store.samples()) == [sample(n) for n in range(5)]
    assert store.conversations() == {"c0", "c1", "c2", "c3", "c4", "c9"}
    assert store.rejected() == Counter(truncated=1)


def test_the_index_says_what_the_samples_say(store: SampleStore) -> None:
    assert store.index() == [
        SampleEntry(item.id, item.conversation_id, len(item.token_ids), item.prompt_tokens)
        for item in store.samples()
    ]


def test_the_manifest_counts_what_its_part_holds(store: SampleStore) -> None:
    row = store.rows()[1]
    assert (row["tokens"], row["loss_tokens"], row["truncated"]) == (8, 4, 0)
    assert row["sample_ids"] == [sample(2).id, sample(3).id]
    assert row["sha256"] == file_digest(store.root / row["file"])


def test_an_id_is_a_digest_of_the_tokens_alone() -> None:
    one = sample(1)
    assert len(one.id) == 16
    assert one.id == Sample("other", one.token_ids, 3, "length", "other").id
    assert one.id != Sample("c1", (*one.token_ids, 2), 2, "stop", "text").id


def test_a_store_that_is_not_there_is_empty(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "none")
    assert (list(store.samples()), store.index(), faults(store, [])) == ([], [], Findings())


def test_a_part_may_hold_nothing_but_rejections(tmp_path: Path) -> None:
    store = write(tmp_path, [Rejected("c1", "empty")], [sample(2)])
    assert list(store.samples()) == [sample(2)]
    assert faults(store, ["c1", "c2"]) == Findings()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        pytest.param(Path.unlink, "is missing", id="missing"),
        pytest.param(cut, "bytes", id="truncated"),
        pytest.param(lambda path: path.write_bytes(b""), "has 0 of", id="emptied"),
        pytest.param(flip, "differs from its checksum", id="bit-flip"),
    ],
)
def test_damage_names_its_part_and_is_made_again(
    store: SampleStore, damage: Callable[[Path], object], fault: str
) -> None:
    before = store.digest()
    damage(store.root / "part-000001.parquet")
    found = faults(store)
    assert found == Findings(damaged=found.damaged)
    assert list(found.damaged) == ["part-000001.parquet"]
    assert fault in found.damaged["part-000001.parquet"]
    store.quarantine(found)
    assert faults(store) == Findings(missing=("c2", "c3", "c9"))
    assert store.conversations() == {"c0", "c1", "c4"}
    write(store.root, [sample(2), sample(3), Rejected("c9", "truncated")])
    assert sorted(item.conversation_id for item in store.samples()) == [
        "c0",
        "c1",
        "c2",
        "c3",
        "c4",
    ]
    assert store.digest() == before


def test_parts_that_changed_places_are_found(store: SampleStore) -> None:
    first, second = (store.root / f"part-00000{n}.parquet" for n in (0, 1))
    kept = first.read_bytes()
    shutil.copy(second, first)
    second.write_bytes(kept)
    assert set(faults(store).damaged) == {first.name, second.name}


def test_a_flip_needs_the_deep_look(store: SampleStore) -> None:
    flip(store.root / "part-000001.parquet")
    assert faults(store, share=0) == Findings()


@pytest.mark.parametrize("doubled", [sample(1), Rejected("c1", "empty")], ids=["kept", "rejected"])
def test_a_conversation_in_two_parts_is_a_fault_of_the_later(
    store: SampleStore, doubled: Sample | Rejected
) -> None:
    write(store.root, [sample(7), doubled])
    found = faults(store, [*ALL, "c7"], share=0)
    part = "part-000003.parquet"
    assert found == Findings(damaged={part: "holds conversation c1 of another part"})
    store.quarantine(found)
    assert store.conversations() == {"c0", "c1", "c2", "c3", "c4", "c9"}


def test_reading_a_damaged_part_says_what_to_do(store: SampleStore) -> None:
    (store.root / "part-000001.parquet").write_bytes(b"nothing")
    for read in (store.index, lambda: list(store.samples())):
        with pytest.raises(DraftworksError, match=r"part-000001.*Run the generate stage again"):
            read()


def test_numbers_go_on_after_the_last_part(store: SampleStore) -> None:
    rewrite_manifest(store.manifest, lambda row: row["file"] != "part-000000.parquet")
    write(store.root, [sample(8)])
    assert [row["file"] for row in store.rows()] == [f"part-00000{n}.parquet" for n in (1, 2, 3)]


def test_the_digest_is_blind_to_the_order_of_parts_only(store: SampleStore) -> None:
    rows = store.rows()
    digest = store.digest()
    store.manifest.unlink()
    writer = ManifestWriter(store.manifest)
    for row in reversed(rows):
        writer.append(row)
    writer.close()
    assert store.digest() == digest
    rewrite_manifest(store.manifest, lambda row: row["file"] != "part-000002.parquet")
    assert store.digest() != digest


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.records.test_samples import sample, write

calls = 0
fsync = os.fsync

def deadly(descriptor):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)

os.fsync = deadly
write(Path(sys.argv[1]), [sample(0), sample(1)], [sample(2), sample(3)])
"""


@pytest.mark.parametrize("moment", range(1, 7))
def test_a_kill_between_any_two_steps_of_a_commit_loses_and_doubles_nothing(
    tmp_path: Path, moment: int
) -> None:
    """A commit syncs its file, its folder and its manifest row; die at each of them."""
    root = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(root), str(moment)]
    died = subprocess.run(command, check=False, cwd=Path(__file__).parents[2])
    assert died.returncode == -signal.SIGKILL
    store = SampleStore(root)
    store.recover()
    assert faults(store, store.conversations()) == Findings()
    done = store.conversations()
    parts = [[sample(0), sample(1)], [sample(2), sample(3)]]
    write(root, *(part for part in parts if part[0].conversation_id not in done))
    assert list(store.samples()) == [sample(n) for n in range(4)]
    whole = write(tmp_path / "whole", *parts)
    assert store.rows() == whole.rows()
    assert faults(store, store.conversations()) == Findings()
    assert {path.name for path in root.iterdir()} == {path.name for path in whole.root.iterdir()}
