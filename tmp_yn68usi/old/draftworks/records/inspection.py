"""Looking at what lies on disk: how closely, what was read before, and what was found."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom

from draftworks.progress import Progress
from draftworks.workspace import file_digest

NO_ROW = "no row of the manifest names it"

READERS = 4  # one waits for the disk while another hashes; both release the GIL

Stamp = tuple[int, int, int, str]
"""Size, time of change in ns, inode, promised checksum: what changes with a file."""


@dataclass(frozen=True)
class Findings:
    """What is wrong with the units of an artifact, each named in full.

    missing: expected, not committed yet. duplicate: committed twice. foreign: there without
    being expected, by id or by file. damaged: committed, but not what lies there now, and why.
    """

    missing: tuple[str, ...] = ()
    duplicate: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Committed:
    """A file as its manifest row promises it. bytes: None where the size is not recorded."""

    name: str
    path: Path
    sha256: str
    bytes: int | None = None


class Seen(dict[Path, Stamp]):
    """Files that were read whole and found sound. A gate that waits keeps it from one look to the
    next, so that it reads every file once; what changed since is read again."""


def checksum_fault(file: Committed) -> str | None:
    """Read a file whole; None when it is what was promised."""
    return None if file_digest(file.path) == file.sha256 else "differs from its checksum"


class Inspection:
    """One look at an artifact.

    share: of the files whose every byte is read. 0 looks at presence and sizes, 1 reads all; in
    between a choice by chance, made anew each time, of one file at least.
    """

    def __init__(
        self, share: float = 1.0, progress: Progress | None = None, seen: Seen | None = None
    ) -> None:
        self._share = share
        self._progress = progress or Progress()
        self._seen = Seen() if seen is None else seen
        self._files = self._chosen = 0

    @property
    def checked(self) -> str:
        """How closely it looked, for people."""
        if self._share >= 1:
            return "every byte"
        if not self._chosen:
            return "presence and sizes"
        return (
            f"a sample of {self._chosen:,} of {self._files:,} files "
            f"({100 * self._share:g} %), chosen anew"
        )

    def damaged(
        self,
        files: Sequence[Committed],
        check: Callable[[Committed], str | None] = checksum_fault,
    ) -> dict[str, str]:
        """Name -> what is wrong, in the order of `files`. `check` reads a file whole.

        Several files are read at once. Raises StopRequested between two of them.
        """
        found: dict[str, str] = {}
        stamps: dict[Path, Stamp] = {}
        for file in files:
            try:
                status = os.stat(file.path)
            except OSError as error:
                found[file.name] = _unreadable(error)
                continue
            if file.bytes not in (None, status.st_size):
                found[file.name] = f"has {status.st_size} of {file.bytes} bytes"
            stamps[file.path] = (status.st_size, status.st_mtime_ns, status.st_ino, file.sha256)
        chosen = self._choose([file for file in files if file.name not in found])
        self._files, self._chosen = self._files + len(files), self._chosen + len(chosen)
        unread = [file for file in chosen if self._seen.get(file.path) != stamps[file.path]]
        for file, fault in zip(unread, self._each(unread, check), strict=True):
            if fault:
                found[file.name] = fault
            else:
                self._seen[file.path] = stamps[file.path]
        return {file.name: found[file.name] for file in files if file.name in found}

    def _choose(self, files: list[Committed]) -> list[Committed]:
        if self._share >= 1 or not files:
            return files
        if self._share <= 0:
            return []
        count = max(1, round(self._share * len(files)))
        chosen = set(SystemRandom().sample(range(len(files)), count))
        return [file for index, file in enumerate(files) if index in chosen]

    def _each(
        self, files: Sequence[Committed], check: Callable[[Committed], str | None]
    ) -> Iterator[str | None]:
        """The findings in the order of `files`, while several threads read ahead."""
        if not files:
            return
        self._progress.phase("checking")
        self._progress.begin(len(files), "files")
        with ThreadPoolExecutor(READERS) as pool:
            try:
                for fault in pool.map(lambda file: _tolerant(check, file), files):
                    self._progress.check_stop()
                    self._progress.advance()
                    yield fault
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _tolerant(check: Callable[[Committed], str | None], file: Committed) -> str | None:
    """A file may vanish or fail between the look at its size and the reading: that is a finding."""
    try:
        return check(file)
    except OSError as error:
        return _unreadable(error)


def _unreadable(error: OSError) -> str:
    gone = isinstance(error, FileNotFoundError | NotADirectoryError)
    return "is missing" if gone else f"cannot be read ({error.strerror})"
