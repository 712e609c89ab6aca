"""The manifest: rows that survive kills, and damage that is noticed."""

from pathlib import Path

import pytest

from draftworks.errors import DraftworksError
from draftworks.records.manifest import ManifestWriter, read_manifest, rewrite_manifest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "manifest.jsonl"


def append(path: Path, *rows: dict[str, object]) -> None:
    writer = ManifestWriter(path)
    for row in rows:
        writer.append(row)
    writer.close()


def test_rows_come_back_in_order_over_several_writers(path: Path) -> None:
    assert read_manifest(path) == []
    append(path, {"n": 1}, {"n": "zwei \u2028"})
    append(path, {"n": 3})
    assert read_manifest(path) == [{"n": 1}, {"n": "zwei \u2028"}, {"n": 3}]


def test_a_row_can_be_read_before_the_writer_ends(path: Path) -> None:
    writer = ManifestWriter(path)
    writer.append({"n": 1})
    assert read_manifest(path) == [{"n": 1}]
    writer.close()


@pytest.mark.parametrize("kept", range(len('{"n":2}') + 1))
def test_a_torn_last_line_is_no_row_and_the_next_writer_cuts_it_off(path: Path, kept: int) -> None:
    append(path, {"n": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"n":2}'[:kept])
    assert read_manifest(path) == [{"n": 1}]
    append(path, {"n": 3})
    assert path.read_bytes() == whole + b'{"n":3}\n'


def test_a_torn_first_line_leaves_an_empty_manifest(path: Path) -> None:
    append(path)
    path.write_bytes(b'{"n"')
    assert read_manifest(path) == []
    append(path, {"n": 1})
    assert read_manifest(path) == [{"n": 1}]


@pytest.mark.parametrize("damage", [b'{"n":', b"\x00\x00\x00", b"\xff\xfe", b""])
def test_a_damaged_middle_line_is_named_with_its_remedy(path: Path, damage: bytes) -> None:
    append(path, {"n": 1}, {"n": 2})
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, damage, second, b""]))
    with pytest.raises(DraftworksError, match="line 2 is damaged; remove that line") as caught:
        read_manifest(path)
    assert str(path) in str(caught.value)


def test_rewriting_drops_rows_and_leaves_no_other_file(path: Path) -> None:
    append(path, *({"n": n} for n in range(4)))
    rewrite_manifest(path, lambda row: row["n"] % 2 == 0)
    assert read_manifest(path) == [{"n": 0}, {"n": 2}]
    assert list(path.parent.iterdir()) == [path]


def test_rewriting_nothing_makes_nothing(path: Path) -> None:
    rewrite_manifest(path, lambda _: True)
    assert not path.exists()


def test_a_full_disk_adds_no_part_of_a_row(small_disk: Path) -> None:
    path = small_disk / "manifest.jsonl"
    writer = ManifestWriter(path)
    row = {"text": "x" * 60_000}
    written = 0
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012
        while True:
            writer.append(row)
            written += 1
    assert written > 10
    assert path.read_bytes().endswith(b"}\n")
    writer.append({"n": 1})
    writer.close()
    assert read_manifest(path) == [row] * written + [{"n": 1}]
