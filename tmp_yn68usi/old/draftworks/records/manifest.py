"""A manifest: the append-only list of the units that exist, one JSON object a line.

A row is appended only after what it names lies complete on disk. A torn last line (a kill in
mid-write) is no row, and the next writer cuts it off.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from draftworks.errors import DraftworksError
from draftworks.workspace import commit_file


def read_manifest(path: Path) -> list[dict[str, Any]]:
    """The complete rows in order of commitment; empty when there is no manifest yet."""
    return list(iterate_manifest(path))


def iterate_manifest(path: Path) -> Iterator[dict[str, Any]]:
    """As `read_manifest`, a row at a time. Raises DraftworksError on a damaged line."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row: dict[str, Any] = json.loads(line)
            except ValueError:
                raise DraftworksError(
                    f"manifest {path} line {number} is damaged; remove that line, and what it "
                    "named is made again"
                ) from None
            yield row


def rewrite_manifest(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the rows that `keep` refuses, in one atomic replacement. Absent is fine."""
    rows = [row for row in iterate_manifest(path) if keep(row)]
    if path.is_file():
        commit_file(path, lambda temporary: temporary.write_bytes(b"".join(map(_line, rows))))


class ManifestWriter:
    """Appends rows durably. One writer at a time: the job's lock sees to it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row durably, or raise (a full disk) and leave the manifest as it was."""
        line = _line(row)
        end = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"
