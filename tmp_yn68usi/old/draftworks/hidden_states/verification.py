"""Verification of a store: every fault is found, told apart from the others, and named.

Each file is streamed once through a small buffer: its checksum and whether its states are finite
come from the same bytes. A sample's id is the digest of its token ids, so a file proves by itself
whose states it holds.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from draftworks.hidden_states.store import Convention, StateStore
from draftworks.records.inspection import Committed, Findings, Inspection
from draftworks.records.quarantine import FOLDER, LOG
from draftworks.workspace import TEMPORARY, digest

CHUNK = 1 << 20  # stays in the processor's cache between checksum and finiteness
LONGEST_HEADER = 1 << 16
STATES = ("aux", "last")
NOT_FINITE = {  # safetensors' name -> unsigned word, its bits without the sign, infinity
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000),
}
WIDTHS = {"I32": 4, "BF16": 2, "F16": 2, "F32": 4}
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def faults(
    store: StateStore,
    expected: Collection[str],
    convention: Convention,
    hidden_size: int,
    inspection: Inspection,
) -> Findings:
    """What is wrong with a store. expected: ids of the samples it should hold.

    foreign: rows of other samples, and files that no row names. A sample whose row is there and
    whose file is gone is damaged, not missing.
    """
    counts: Counter[str] = Counter()
    rows: dict[str, dict[str, Any]] = {}
    for row in store.rows():
        counts[row["id"]] += 1
        rows[row["id"]] = row
    ours = {name: row for name, row in rows.items() if name in expected}

    def check(file: Committed) -> str | None:
        return _content_fault(file, ours[file.name]["rows"], convention, hidden_size)

    damaged = {
        name: fault
        for name, row in ours.items()
        if (fault := _differs(row, convention)) is not None
    }
    damaged |= inspection.damaged(
        [
            Committed(name, store.path(name), row["sha256"], row["bytes"])
            for name, row in ours.items()
            if name not in damaged
        ],
        check,
    )
    for name, reason in damaged.items():
        owner = _owner(store.path(name))
        if owner not in (None, name):
            damaged[name] = f"{reason}, and holds sample {owner}"
    return Findings(
        missing=tuple(sorted(set(expected) - rows.keys())),
        duplicate=tuple(name for name, count in counts.items() if count > 1),
        foreign=(
            *(name for name in rows if name not in ours),
            *_strange_files(store.root, {*rows, *expected}),
        ),
        damaged=damaged,
    )


def _differs(recorded: Mapping[str, Any], convention: Convention) -> str | None:
    """In what a row or a file was not made as the samples of this store are."""
    for name, value in asdict(convention).items():
        wanted = list(value) if isinstance(value, tuple) else value
        if recorded.get(name) != wanted:
            return f"is recorded with {name} {recorded.get(name)}, expected {wanted}"
    return None


def _content_fault(
    file: Committed, rows: int, convention: Convention, hidden_size: int
) -> str | None:
    """Read the file of a sample of `rows` tokens once, from its first byte to its last."""
    with file.path.open("rb") as source:
        try:
            start, header = _header(source)
            fault = _header_fault(header, rows, convention, hidden_size)
        except (ValueError, KeyError, TypeError):
            source.seek(0)
            start, header, fault = b"", {}, "has no readable header"
        checksum = hashlib.sha256(start)
        tokens, infinite = bytearray(), set()
        buffer = memoryview(bytearray(CHUNK))
        position = 0
        while count := source.readinto(buffer):
            checksum.update(buffer[:count])
            for name, part in _parts(header, position, buffer[:count]) if not fault else ():
                if name == "token_ids":
                    tokens += part
                elif name in STATES and not _finite(part, header[name]["dtype"]):
                    infinite.add(name)
            position += count
    if checksum.hexdigest() != file.sha256:
        return "differs from its checksum"
    if fault:
        return fault
    if digest(np.frombuffer(tokens, "<i4").tolist()) != file.name:
        return "holds the states of other tokens"
    if infinite:
        return f"holds values that are not finite in {' and '.join(sorted(infinite))}"
    return None


def _header_fault(
    header: Mapping[str, Any], rows: int, convention: Convention, hidden_size: int
) -> str | None:
    if fault := _differs(_recorded(header), convention):
        return fault
    code = CODES[convention.dtype]
    wanted = {
        "token_ids": ("I32", [rows]),
        "aux": (code, [rows, 3, hidden_size]),
        "last": (code, [rows, hidden_size]),
        "argmax": ("I32", [rows]),
    }
    held = {name: (item.get("dtype"), item.get("shape")) for name, item in header.items()}
    del held["__metadata__"]
    for name in sorted({*wanted, *held}):
        if held.get(name) != wanted.get(name):
            return f"holds {name} {held.get(name)}, expected {wanted.get(name)}"
    for name, (code, shape) in wanted.items():
        begin, end = header[name]["data_offsets"]
        if begin % WIDTHS[code] or end - begin != WIDTHS[code] * math.prod(shape):
            return f"holds {name} at bytes {begin} to {end}"
    return None


def _parts(
    header: Mapping[str, Any], position: int, chunk: memoryview
) -> Iterator[tuple[str, memoryview]]:
    """The tensors that a chunk of the data touches, and the bytes of each in it."""
    for name, item in header.items():
        if name != "__metadata__":
            begin, end = (max(0, offset - position) for offset in item["data_offsets"])
            if part := chunk[begin:end]:
                yield name, part


def _finite(part: memoryview, dtype: str) -> bool:
    word, magnitude, infinity = NOT_FINITE[dtype]
    return bool((np.frombuffer(part, word) & magnitude).max() < infinity)


def _strange_files(root: Path, known: set[str]) -> list[str]:
    """Paths of what lies in the store and is no file of a known sample. The file of an expected
    sample may lie there before its row does; a partial file is somebody's work."""
    found = []
    for name in sorted(os.listdir(root) if root.is_dir() else []):
        if name in ("manifest.jsonl", FOLDER, LOG) or name.endswith(TEMPORARY):
            continue
        if len(name) != 2 or not (root / name).is_dir():
            found.append(name)
            continue
        for file in sorted(os.listdir(root / name)):
            sample = file.removesuffix(".safetensors")
            ours = sample != file and sample[:2] == name and sample in known
            if not ours and not file.endswith(TEMPORARY):
                found.append(f"{name}/{file}")
    return found


def _owner(path: Path) -> str | None:
    """The sample that a file says it holds; None when it says nothing that can be read."""
    try:
        with path.open("rb") as file:
            return str(_recorded(_header(file)[1])["id"])
    except (OSError, ValueError, KeyError):
        return None


def _header(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """The first bytes of a safetensors file, and what they say. Raises ValueError."""
    length = file.read(8)
    text = file.read(min(int.from_bytes(length, "little"), LONGEST_HEADER))
    header: dict[str, Any] = json.loads(text)
    return length + text, header


def _recorded(header: Mapping[str, Any]) -> dict[str, Any]:
    """The convention as the file has it. Raises KeyError, ValueError."""
    recorded: dict[str, Any] = json.loads(header["__metadata__"]["states"])
    return recorded
