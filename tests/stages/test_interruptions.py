"""Killed, stopped, out of disk: the next start ends byte for byte where a calm run ends."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftworks.config import PipelineConfig
from draftworks.errors import StopRequested
from draftworks.progress import Progress
from draftworks.records.manifest import read_manifest
from draftworks.stages import STAGES, Stage, stage_named
from draftworks.stages.extract import Extract
from draftworks.stages.generate import Generate
from draftworks.stages.train import Train
from draftworks.supervision.job import Job, State
from draftworks.workspace import Workspace, file_digest

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0
CONTENT = ("*.parquet", "*.safetensors")

Make = Callable[[Path], PipelineConfig]


@pytest.fixture(scope="session")
def fine_grained(make_config: Callable[..., PipelineConfig]) -> Make:
    """Many small units, so that there are many moments to be killed at; answers are sampled."""

    def make(folder: Path) -> PipelineConfig:
        folder.mkdir(exist_ok=True)
        return make_config(
            folder,
            generate={"part_size": 2, "temperature": 0.8, "top_p": 0.95},
            extract={"batch_tokens": 1},
            train={"epochs": 8, "checkpoint_every": 3, "keep_checkpoints": 3},
            evaluate={"batch": 2},
        )

    return make


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fine_grained: Make) -> PipelineConfig:
    config = fine_grained(tmp_path_factory.mktemp("undisturbed"))
    for name in STAGES:
        stage(name, config).run(Progress())
    return config


def stage(name: str, config: PipelineConfig) -> Stage:
    return stage_named(name)(config, Workspace(Path(config.workspace)))


def up_to(name: str, source: PipelineConfig, config: PipelineConfig) -> None:
    """Copy what lies before a stage."""
    for earlier in list(STAGES)[: list(STAGES).index(name)]:
        shutil.copytree(stage(earlier, source).directory, stage(earlier, config).directory)


def content(config: PipelineConfig, name: str) -> dict[str, str]:
    """Every data file of a stage with its checksum. Of what training keeps on its way, the last."""
    folder = stage(name, config).directory
    return {
        str(path.relative_to(folder)): file_digest(path)
        for pattern in CONTENT
        for path in folder.rglob(pattern)
    }


def committed(config: PipelineConfig, name: str) -> int:
    """Units that a running stage has written down so far."""
    file = "metrics.jsonl" if name == "train" else "manifest.jsonl"
    return len(read_manifest(stage(name, config).directory / file))


def kill_at(config: PipelineConfig, name: str, moment: int) -> bool:
    """Run a stage as people do, and kill it as soon as `moment` units are written down. Returns
    whether it lived long enough to be killed."""
    path = Path(config.workspace).parent / "config.json"
    path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "draftworks", "run", str(path), name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + PATIENCE
        while committed(config, name) < moment:
            assert process.poll() in (None, 0)
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("name", ["generate", "extract", "train"])
def test_a_killed_stage_ends_as_if_it_had_not_been_killed(
    tmp_path: Path, fine_grained: Make, undisturbed: PipelineConfig, name: str
) -> None:
    config = fine_grained(tmp_path / name)
    up_to(name, undisturbed, config)
    total = committed(undisturbed, name)
    item = stage(name, config)
    moment = random.randint(1, total // 2)
    print(f"killed after {moment} of {total} rows")
    while not kill_at(config, name, moment):
        shutil.rmtree(item.directory)
    assert Job(item.job_directory).state() is State.LOST
    assert not item.verify().complete
    assert moment <= committed(config, name) < total
    item.run(Progress())
    assert stage(name, config).verify().complete
    assert content(config, name) == content(undisturbed, name)
    assert list(item.directory.rglob("*.partial")) == []
    match item:
        case Generate():
            kept = Counter(sample.conversation_id for sample in item.store.samples())
            kept += Counter(name for row in item.store.rows() for name in row["rejected"])
            assert kept == Counter(prompt.id for prompt in item.prompts)
        case Extract():
            rows = [row["id"] for row in item.store.rows()]
            assert sorted(rows) == sorted(stage("extract", undisturbed).store.ids())  # type: ignore[attr-defined]
        case Train():
            assert steps(config) == steps(undisturbed)


def steps(config: PipelineConfig) -> list[tuple[int, float]]:
    """The curve of the loss: every step once, with its value."""
    path = stage("train", config).directory / "metrics.jsonl"
    return [(row["step"], row["loss"]) for row in read_manifest(path) if "loss" in row]


class Stopping(Progress):
    """Asks to end once so many units are counted."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def advance(self, units: int = 1) -> None:
        super().advance(units)
        self.stop_requested = self.done >= self.after


@pytest.mark.parametrize("name", ["generate", "extract", "train", "evaluate", "publish"])
def test_a_stage_that_is_stopped_again_and_again_ends_the_same(
    tmp_path: Path, fine_grained: Make, undisturbed: PipelineConfig, name: str
) -> None:
    config = fine_grained(tmp_path / name)
    up_to(name, undisturbed, config)
    stops = 0
    while not stage(name, config).verify().complete:
        progress = Stopping(after=1 + stage(name, config).verify().expected * (stops + 1) // 3)
        try:
            stage(name, config).run(progress)
        except StopRequested:
            stops += 1
            assert progress.done >= progress.after
        assert stops < 10
    assert stops >= 1
    assert content(config, name) == content(undisturbed, name)
    if name == "evaluate":
        evaluations: list[Any] = [stage(name, item).record() for item in (config, undisturbed)]  # type: ignore[attr-defined]
        assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("name", ["generate", "extract", "train"])
def test_a_full_disk_is_an_error_and_what_was_committed_stays(
    small_disk: Path, fine_grained: Make, undisturbed: PipelineConfig, name: str
) -> None:
    config = fine_grained(small_disk)
    up_to(name, undisturbed, config)
    disk = os.statvfs(small_disk)
    room = {"generate": 40_000, "extract": 200_000, "train": 400_000}[name]
    (small_disk / "filler").write_bytes(bytes(max(0, disk.f_bavail * disk.f_bsize - room)))
    with pytest.raises(Exception, match="No space left"):
        stage(name, config).run(Progress())
    assert not stage(name, config).verify().complete
    assert stage(name, config).verify().problems == ()
    whole = content(undisturbed, name)
    kept = {file: digest for file, digest in content(config, name).items() if "step-" not in file}
    assert kept.items() <= whole.items()
    assert list(small_disk.rglob("*.partial")) == []
