"""Where everything lies, and how an artifact gets its name.

An artifact's directory is ``<stage>-<digest>``. The digest covers what decides the result and
nothing else, so the same work is found in the same place and changed settings never pick up
stale files.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftworks.errors import DraftworksError

TEMPORARY = ".partial"


def digest(value: Any) -> str:
    """16 hexadecimal digits over the canonical JSON of `value` (sorted keys, no spaces)."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Workspace:
    """A folder that holds the artifacts, the jobs and the reports of any number of pipelines."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()

    def artifact(self, stage: str, identity: str) -> Path:
        return self.root / "artifacts" / f"{stage}-{identity}"

    def job(self, stage: str, identity: str) -> Path:
        return self.root / "jobs" / f"{stage}-{identity}"

    def jobs(self) -> list[Path]:
        """The directories of all jobs that were ever started."""
        return sorted((self.root / "jobs").glob("*"))

    def report(self, identity: str) -> Path:
        return self.root / "reports" / f"report-{identity}"

    @property
    def part_file(self) -> Path:
        """There in the workspace of a frozen part only."""
        return self.root / "part.json"

    @property
    def part(self) -> str:
        """What a frozen part holds, such as "18,420 of 37,312 samples (49.3%)"; else empty."""
        if not self.part_file.is_file():
            return ""
        part = json.loads(self.part_file.read_text())
        share = part["samples"] / part["of"]
        return f"{part['samples']:,} of {part['of']:,} samples ({share:.1%})"

    def require_writable(self) -> None:
        """Create the root and prove that it can be written. Raises DraftworksError."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise DraftworksError(
                f"workspace {self.root} cannot be written: {error.strerror}. "
                "Choose another folder (`workspace` in the config) or fix its permissions."
            ) from None


def sync_directory(path: Path) -> None:
    """Flush a directory entry, so that a rename inside it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit_file(path: Path, write: Callable[[Path], object]) -> None:
    """Make `path` appear complete or not at all: temporary name, fsync, rename, fsync.

    `write` receives the temporary path and must close what it writes. A full disk or a kill
    leaves at most a ``*.partial`` file, which `remove_partial` clears at the next start.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def commit_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON under the commit protocol."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    commit_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def commit_directory(path: Path) -> Iterator[Path]:
    """A directory that appears complete or not at all. Yields the temporary directory."""
    temporary = path.with_name(path.name + TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            else:
                sync_directory(file)
        sync_directory(temporary)
        shutil.rmtree(path, ignore_errors=True)
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(path.parent)


def remove_partial(root: Path) -> None:
    """Clear what a killed writer left behind. Call only while holding the job's lock."""
    for path in sorted(root.rglob(f"*{TEMPORARY}"), reverse=True):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
