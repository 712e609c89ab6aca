"""The hidden-state store against plain files of the same sizes, on the same disk.

Writing includes fsync, checksum and manifest row on our side, fsync on the other. Checking reads
every byte against its checksum on our side, reads every byte on the other. Opening is measured
for a manifest of the full-size job, 37,312 samples, whose files need not exist.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import show
from draftworks.hidden_states.store import Convention, SampleStates, StateStore, StateWriter
from draftworks.records.manifest import ManifestWriter
from draftworks.workspace import digest

CONVENTION = Convention((2, 30, 58), True, "bfloat16", "reference", "benchmark")
FULL_SIZE = 37_312


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--hidden", type=int, default=7168)
    options = parser.parse_args()
    states = SampleStates(
        torch.arange(options.tokens, dtype=torch.int32),
        torch.randn(options.tokens, 3, options.hidden).bfloat16(),
        torch.randn(options.tokens, options.hidden).bfloat16(),
        torch.zeros(options.tokens, dtype=torch.int32),
    )
    names = [digest(index) for index in range(options.samples)]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        store, plain = StateStore(Path(folder) / "store"), Path(folder) / "plain"
        plain.mkdir()
        writing = seconds(lambda: write(store, names, states))
        size = sum(store.path(name).stat().st_size for name in names)
        content = store.path(names[0]).read_bytes()
        writing_plain = seconds(lambda: write_plain(plain, names, content))
        expected = dict.fromkeys(names, options.tokens)
        checking = seconds(lambda: store.faults(expected, CONVENTION, options.hidden, deep=True))
        reading_plain = seconds(lambda: [(plain / name).read_bytes() for name in names])
        opening = StateStore(Path(folder) / "full")
        fill_manifest(opening)
        opened = seconds(opening.ids)
    rate = size / 1e9
    show(
        f"Hidden states, {options.samples} samples of {options.tokens} x 4 x {options.hidden} "
        f"({rate:.1f} GB)",
        ["", "store", "plain files", "ratio"],
        [
            ["write, GB/s", *compared(rate / writing, rate / writing_plain)],
            ["check, GB/s (from the page cache)", *compared(rate / checking, rate / reading_plain)],
            [f"open {FULL_SIZE:,} samples, s", f"{opened:.2f}", "", ""],
            ["peak memory, GB", f"{peak():.2f}", "", ""],
        ],
    )


def write(store: StateStore, names: list[str], states: SampleStates) -> None:
    writer = StateWriter(store, CONVENTION)
    ids = states.token_ids.tolist()
    for name in names:
        writer.commit(name, ids, states)
    writer.close()


def write_plain(folder: Path, names: list[str], content: bytes) -> None:
    for name in names:
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def fill_manifest(store: StateStore) -> None:
    """Rows as the writer makes them, without an fsync for each."""
    line = {"rows": 2369, "bytes": 135_861_000, "sha256": "0" * 64, **vars(CONVENTION)}
    ManifestWriter(store.manifest).close()
    with store.manifest.open("ab") as file:
        for index in range(FULL_SIZE):
            file.write(json.dumps({"id": digest(index), **line}).encode() + b"\n")


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compared(ours: float, theirs: float) -> list[str]:
    return [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    main()
