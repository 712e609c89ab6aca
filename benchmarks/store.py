"""The hidden-state store against plain files of the same sizes, on the same disk.

Writing includes fsync, checksum and manifest row on our side, fsync on the other. The gate is
measured twice. Deep: every byte is read for its checksum and for values that are not finite,
against plain sequential reading of the same files; all files are evicted from the page cache
before, and the ways take turns. Shallow: presence and sizes of the full-size job's 37,312 samples,
which lie there as sparse files.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import show
from draftworks.hidden_states.store import Convention, SampleStates, StateStore, StateWriter
from draftworks.hidden_states.verification import faults
from draftworks.records import inspection
from draftworks.records.inspection import Findings, Inspection
from draftworks.workspace import digest

CONVENTION = Convention((2, 30, 58), True, "bfloat16", "reference", "benchmark")
FULL_SIZE, FULL_BYTES = 37_312, 135_861_000
READERS = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    states = SampleStates(
        torch.arange(options.tokens, dtype=torch.int32),
        torch.randn(options.tokens, 3, options.hidden).bfloat16(),
        torch.randn(options.tokens, options.hidden).bfloat16(),
        torch.zeros(options.tokens, dtype=torch.int32),
    )
    samples = [replace(states, token_ids=states.token_ids + i) for i in range(options.samples)]
    names = [digest(sample.token_ids.tolist()) for sample in samples]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        store, plain = StateStore(Path(folder) / "store"), Path(folder) / "plain"
        plain.mkdir()
        writing = seconds(lambda: write(store, names, samples))
        files = [store.path(name) for name in names]
        content = files[0].read_bytes()
        writing_plain = seconds(lambda: write_plain(plain, names, content))
        ways: dict[str, Callable[[], object]] = {"plain": lambda: read_plain(files)}
        for readers in READERS:
            ways[f"{readers} readers"] = lambda readers=readers: check(
                store, names, options.hidden, readers
            )
        taken: dict[str, list[float]] = {name: [] for name in ways}
        memory = resident()
        for _ in range(options.rounds):
            for name, way in ways.items():
                evict(files)
                taken[name].append(seconds(way))
        memory = resident(peak=True) - memory
        full = StateStore(Path(folder) / "full")
        expected = fill(full)
        opened = seconds(full.ids)
        shallow = seconds(lambda: require_sound(full, expected, options.hidden, 0))
    size = options.samples * len(content) / 1e9
    speed = {name: size / min(values) for name, values in taken.items()}
    show(
        f"Hidden states, {options.samples} samples of {options.tokens} x 4 x {options.hidden} "
        f"({size:.1f} GB), best of {options.rounds}",
        ["", "store", "plain files", "ratio"],
        [
            ["write, GB/s", *compared(size / writing, size / writing_plain)],
            *(
                [f"deep check, {name}, GB/s", *compared(speed[name], speed["plain"])]
                for name in ways
                if name != "plain"
            ),
            ["memory of the checks, MB", f"{memory / 1e6:.0f}", "", ""],
            [f"open {FULL_SIZE:,} samples, s", f"{opened:.2f}", "", ""],
            [f"shallow check of {FULL_SIZE:,} samples, s", f"{shallow:.2f}", "", ""],
        ],
    )


def write(store: StateStore, names: list[str], samples: list[SampleStates]) -> None:
    writer = StateWriter(store, CONVENTION)
    for name, states in zip(names, samples, strict=True):
        writer.commit(name, states.token_ids.tolist(), states)
    writer.close()


def write_plain(folder: Path, names: list[str], content: bytes) -> None:
    for name in names:
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def check(store: StateStore, names: list[str], hidden: int, readers: int) -> None:
    inspection.READERS = readers
    require_sound(store, set(names), hidden, 1)


def require_sound(store: StateStore, expected: set[str], hidden: int, share: float) -> None:
    assert faults(store, expected, CONVENTION, hidden, Inspection(share)) == Findings()


def read_plain(files: Iterable[Path]) -> None:
    buffer = bytearray(1 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(files: Iterable[Path]) -> None:
    """Out of the page cache; what was written is on the disk already."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(store: StateStore) -> set[str]:
    """Rows as the writer makes them and files of the promised size, without content."""
    names = [digest(index) for index in range(FULL_SIZE)]
    line = {"rows": 2369, "bytes": FULL_BYTES, "sha256": "0" * 64, **vars(CONVENTION)}
    for folder in {name[:2] for name in names}:
        (store.root / folder).mkdir(parents=True)
    for name in names:
        with store.path(name).open("wb") as file:
            file.truncate(FULL_BYTES)
    rows = (json.dumps({"id": name, **line}) + "\n" for name in names)
    store.manifest.write_text("".join(rows))
    return set(names)


def resident(*, peak: bool = False) -> int:
    """Bytes of memory that the process holds; peak: the most it held since the last question."""
    status = Path("/proc/self/status").read_text()
    field = "VmHWM" if peak else "VmRSS"
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compared(ours: float, theirs: float) -> list[str]:
    return [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]


if __name__ == "__main__":
    main()
