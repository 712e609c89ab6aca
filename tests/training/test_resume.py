"""Resuming is exact: a run that was stopped, killed or crashed ends in the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import toys
from torch import Tensor

from draftworks.errors import StopRequested
from draftworks.progress import Progress
from draftworks.training.loop import Data, Trainer, Validation

SCRIPT = Path(__file__).with_name("train_until_killed.py")
CONFIG = toys.cycle_config()
"""A checkpoint after every fourth step, a validation after every fifth."""


class StopAt(Progress):
    """Asks to end while step number `step` is worked on."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def begin(self, total: int, unit: str, done: int = 0) -> None:
        super().begin(total, unit, done)
        self.stop_requested = done == self.step - 1

    def advance(self, units: int = 1) -> None:
        super().advance(units)
        self.stop_requested = self.stop_requested or self.done == self.step - 1


class CrashAt(Progress):
    """Breaks off right after step number `step`, whether it left a checkpoint or not."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def advance(self, units: int = 1) -> None:
        super().advance(units)
        if self.done == self.step:
            raise MemoryError


@dataclass(frozen=True)
class Ended:
    """What a finished run leaves."""

    weights: dict[str, Tensor]
    metrics: list[dict[str, Any]]
    validation: Validation


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows without their speed, which is never twice the same."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def trainer(folder: Path, data: Data) -> Trainer:
    return toys.cycle_trainer(folder, data, CONFIG)


def finish(folder: Path, data: Data, progress: Progress | None = None) -> Ended:
    """A new trainer takes the folder up and trains to the end."""
    made = trainer(folder, data)
    validation = made.run(progress or Progress())
    return Ended(made.drafter.state_dict(), metrics(folder), validation)


def assert_same(found: Ended, expected: Ended) -> None:
    assert found.metrics == expected.metrics
    assert found.validation == expected.validation
    for name, tensor in expected.weights.items():
        assert found.weights[name].equal(tensor), name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return toys.cycle_data(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def uninterrupted(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = finish(tmp_path_factory.mktemp("uninterrupted"), data)
    steps = [row["step"] for row in ended.metrics if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 20
    return ended


@pytest.mark.parametrize(
    "stops", [[1], [8], [10], [2, 3, 13, 20]], ids=["first", "checkpointed", "between", "often"]
)
def test_a_stopped_run_ends_as_an_uninterrupted_one(
    stops: list[int], data: Data, uninterrupted: Ended, tmp_path: Path
) -> None:
    for step in stops:
        progress = StopAt(step)
        with pytest.raises(StopRequested):
            trainer(tmp_path, data).run(progress)
        assert progress.done == step
        assert trainer(tmp_path, data).checkpoints.steps()[-1] == step
        assert metrics(tmp_path) == [row for row in uninterrupted.metrics if row["step"] <= step]
    progress = Progress()
    assert_same(finish(tmp_path, data, progress), uninterrupted)
    assert progress.done == progress.total


def test_a_stop_during_the_last_step_is_the_end(
    data: Data, uninterrupted: Ended, tmp_path: Path
) -> None:
    last = uninterrupted.metrics[-1]["step"]
    assert_same(finish(tmp_path, data, StopAt(last)), uninterrupted)


@pytest.mark.parametrize("step", [3, 4, 7, 10])
def test_a_crashed_run_goes_back_to_its_checkpoint_and_ends_the_same(
    step: int, data: Data, uninterrupted: Ended, tmp_path: Path
) -> None:
    with pytest.raises(MemoryError):
        trainer(tmp_path, data).run(CrashAt(step))
    assert metrics(tmp_path)[-1]["step"] == step
    assert_same(finish(tmp_path, data), uninterrupted)


def test_a_kill_in_mid_checkpoint_and_mid_line_is_survived(
    data: Data, uninterrupted: Ended, tmp_path: Path
) -> None:
    with pytest.raises(MemoryError):
        trainer(tmp_path, data).run(CrashAt(11))
    torn = tmp_path / "checkpoints" / "step-00000012.partial"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"\x08\0\0\0")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":12,"loss":0.1')
    assert_same(finish(tmp_path, data), uninterrupted)
    assert not torn.exists()


def test_a_finished_run_is_not_trained_again(
    data: Data, uninterrupted: Ended, tmp_path: Path
) -> None:
    finish(tmp_path, data)
    assert_same(finish(tmp_path, data), uninterrupted)


def test_the_newest_checkpoints_are_kept(data: Data, uninterrupted: Ended, tmp_path: Path) -> None:
    finish(tmp_path, data)
    last = uninterrupted.metrics[-1]["step"]
    expected = sorted({*range(4, last, 4), last})[-CONFIG.keep_checkpoints :]
    assert trainer(tmp_path, data).checkpoints.steps() == expected


def test_sigkill_at_an_unforeseen_moment_is_survived(
    data: Data, uninterrupted: Ended, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    paths = os.pathsep.join([str(SCRIPT.parents[1]), str(SCRIPT.parents[2])])
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(tmp_path)], env={**os.environ, "PYTHONPATH": paths}
    )
    try:
        while lines(run) < 12:
            assert child.poll() is None, "training ended before it was killed"
            time.sleep(0.005)
    finally:
        child.kill()
    assert child.wait() == -signal.SIGKILL
    done = trainer(run, data).checkpoints.steps()[-1]
    assert done < uninterrupted.metrics[-1]["step"]
    assert_same(finish(run, data), uninterrupted)


def test_a_stopped_run_with_muon_ends_as_an_uninterrupted_one(data: Data, tmp_path: Path) -> None:
    """Two optimizers, each with its own moments."""
    config = CONFIG.model_copy(update={"optimizer": "muon"})

    def finish_with_muon(folder: Path, progress: Progress) -> Ended:
        made = toys.cycle_trainer(folder, data, config)
        validation = made.run(progress)
        return Ended(made.drafter.state_dict(), metrics(folder), validation)

    with pytest.raises(StopRequested):
        finish_with_muon(tmp_path / "stopped", StopAt(6))
    resumed = finish_with_muon(tmp_path / "stopped", Progress())
    assert_same(resumed, finish_with_muon(tmp_path / "uninterrupted", Progress()))
