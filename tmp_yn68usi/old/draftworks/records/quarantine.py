"""Quarantine: what was found damaged or foreign is moved aside with the reason, never deleted.

    quarantine/<name>-<n>.<suffix>   the files
    quarantine/pending.json          a move that has begun and has not ended
    quarantine.jsonl                 one row for each: id, reason, where its file is now, time

`pending.json` is written first and removed last, and every step between can be done again. So a
kill leaves the old state or one that `finish` carries to its end.
"""

import json
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draftworks.records.manifest import ManifestWriter, read_manifest, rewrite_manifest
from draftworks.workspace import commit_json, sync_directory

FOLDER, LOG = "quarantine", "quarantine.jsonl"


class Quarantine:
    """Of one artifact. key: what names a unit in the rows of its manifest.

    Change it only while holding the job's lock.
    """

    def __init__(self, root: Path, manifest: Path, key: str) -> None:
        self.folder = root / FOLDER
        self.log = root / LOG
        self._root, self._manifest, self._key = root, manifest, key
        self._pending = self.folder / "pending.json"

    def put(self, reasons: Mapping[str, str], files: Mapping[str, Path]) -> None:
        """Move files aside and take their rows out of the manifest. reasons: name -> why. files:
        name -> its file, for those that have one."""
        if not reasons:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        taken = {path.name for path in self.folder.glob("*")}
        entries = []
        for name, reason in reasons.items():
            entry = {"id": name, "reason": reason, "time": now}
            path = files.get(name)
            # A name from a manifest may be anything; only what lies inside is moved.
            if path and path.exists() and self._root.resolve() in path.resolve().parents:
                number = 1
                while (free := f"{path.stem}-{number}{path.suffix}") in taken:
                    number += 1
                taken.add(free)
                entry |= {"from": str(path.relative_to(self._root)), "file": f"{FOLDER}/{free}"}
            entries.append(entry)
        commit_json(self._pending, entries)
        self.finish()

    def finish(self) -> None:
        """Carry what a kill has interrupted to its end."""
        if not self._pending.is_file():
            return
        entries: list[dict[str, Any]] = json.loads(self._pending.read_text(encoding="utf-8"))
        for entry in entries:
            if "file" in entry and (source := self._root / entry["from"]).exists():
                source.rename(self._root / entry["file"])
                sync_directory(source.parent)
        sync_directory(self.folder)
        logged = read_manifest(self.log)
        log = ManifestWriter(self.log)
        for entry in entries:
            if entry not in logged:
                log.append(entry)
        log.close()
        names = {entry["id"] for entry in entries}
        rewrite_manifest(self._manifest, lambda row: row[self._key] not in names)
        self._pending.unlink()

    def drop_duplicates(self) -> None:
        """Of the rows of one unit keep the last: it is what its file was written for."""
        left = Counter(row[self._key] for row in read_manifest(self._manifest))

        def last(row: dict[str, Any]) -> bool:
            left[row[self._key]] -= 1
            return not left[row[self._key]]

        if left.total() > len(left):
            rewrite_manifest(self._manifest, last)
