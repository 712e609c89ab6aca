"""The workspace: names that follow from content, and files that are whole or absent."""

import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftworks.errors import DraftworksError
from draftworks.workspace import (
    Workspace,
    commit_directory,
    commit_file,
    commit_json,
    digest,
    file_digest,
    remove_partial,
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}, id="order"),
        pytest.param([1, (2, 3)], [1, [2, 3]], id="tuple"),
        pytest.param({"a": "ü"}, json.loads('{"a": "\\u00fc"}'), id="escape"),
    ],
)
def test_equal_values_have_one_digest(one: Any, other: Any) -> None:
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param([1, 2], [2, 1], id="list-order"),
        pytest.param({"a": None}, {}, id="null"),
        pytest.param("1", 1, id="type"),
        pytest.param(["ab", "c"], ["a", "bc"], id="boundary"),
        pytest.param("ü", "u\u0308", id="normal-form"),
    ],
)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_the_digest_is_the_same_for_ever() -> None:
    """Changing it would orphan every artifact there is."""
    assert digest({"b": [1, 2.5, None, True], "a": "ü"}) == "5cffe7b225626127"


def test_an_artifact_is_named_by_stage_and_identity(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.artifact("train", "0f") == tmp_path / "artifacts" / "train-0f"
    assert workspace.job("train", "0f") == tmp_path / "jobs" / "train-0f"


def test_a_relative_root_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = Workspace(Path("here"))
    monkeypatch.chdir("/")
    assert workspace.root == tmp_path / "here"


# Commits


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_committed_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for text in ("one", "two"):
        commit_file(path, lambda temporary, text=text: temporary.write_text(text))
        assert path.read_text() == text
    assert names(path.parent) == {"file"}


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, fault: type[BaseException]
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise fault

    with pytest.raises(fault):
        commit_file(path, write)
    assert names(tmp_path) == {"file"}
    assert path.read_text() == "old"


def test_json_is_readable_and_round(tmp_path: Path) -> None:
    value = {"ü": [1, None, 0.1]}
    commit_json(tmp_path / "value.json", value)
    text = (tmp_path / "value.json").read_text(encoding="utf-8")
    assert json.loads(text) == value
    assert "ü" in text
    assert text.endswith("}\n")


def test_a_directory_appears_at_once_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for name in ("one", "two"):
        with commit_directory(path) as temporary:
            (temporary / "inner").mkdir()
            (temporary / "inner" / name).write_text(name)
            assert not (path / "inner" / name).exists()
        assert names(path / "inner") == {name}
    assert names(tmp_path) == {"folder"}


def test_a_failed_directory_does_not_appear(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with pytest.raises(ValueError, match="broken"), commit_directory(path) as temporary:  # noqa: PT012
        (temporary / "file").write_text("half")
        raise ValueError("broken")
    assert names(tmp_path) == set()


def test_a_killed_directory_is_no_start_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "folder.partial" / "half").mkdir(parents=True)
    with commit_directory(tmp_path / "folder"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_remains_of_a_killed_writer_are_cleared_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "x.safetensors.partial").write_text("")
    (tmp_path / "step-1.partial" / "deep.partial").mkdir(parents=True)
    (tmp_path / "kept").write_text("")
    remove_partial(tmp_path)
    remove_partial(tmp_path / "none")
    assert names(tmp_path) == {"ab", "kept"}
    assert names(tmp_path / "ab") == set()


# Disks that say no


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Every write beyond `size` bytes of a file fails, whoever asks."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_and_keeps_the_old_file(small_disk: Path) -> None:
    path = small_disk / "file"
    commit_file(path, lambda temporary: temporary.write_bytes(b"old"))
    with pytest.raises(OSError, match="No space left"):
        commit_file(path, lambda temporary: temporary.write_bytes(bytes(2_000_000)))
    assert names(small_disk) == {"file"}
    assert path.read_bytes() == b"old"
    commit_file(path, lambda temporary: temporary.write_bytes(bytes(500_000)))
    assert path.stat().st_size == 500_000


def test_a_full_disk_leaves_no_directory(small_disk: Path) -> None:
    path = small_disk / "folder"
    with pytest.raises(OSError, match="No space left"), commit_directory(path) as temporary:
        (temporary / "file").write_bytes(bytes(2_000_000))
    assert names(small_disk) == set()


def test_a_write_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    with largest_file(1000), pytest.raises(OSError, match="too large"):
        commit_json(tmp_path / "value.json", list(range(1000)))
    assert names(tmp_path) == set()


def test_a_folder_that_cannot_be_written_says_so_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftworksError, match=r"cannot be written: .*Choose another folder"):
        Workspace(tmp_path / "file" / "workspace").require_writable()


def test_a_read_only_disk_says_so(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DraftworksError, match="cannot be written: Read-only file system"):
        Workspace(small_disk).require_writable()


def test_a_writable_folder_is_left_as_it_was(tmp_path: Path) -> None:
    Workspace(tmp_path / "new").require_writable()
    assert names(tmp_path / "new") == set()


def test_a_file_digest_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert file_digest(tmp_path / "file").startswith("ba7816bf8f01cfea414140de5dae2223b00361a3")
