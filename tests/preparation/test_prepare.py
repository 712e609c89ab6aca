"""A stage is proved on what is committed, before its turn comes."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.preparation.prepare import Preparation
from draftworks.preparation.smoke import SAMPLES
from draftworks.progress import Progress
from draftworks.records.manifest import rewrite_manifest
from draftworks.stages import STAGES, stage_named
from draftworks.supervision.job import Job, State, held_lock
from draftworks.supervision.runner import run_job
from draftworks.workspace import Workspace, file_digest

ROOT = Path(__file__).parents[2]


def stage(name: str, config: PipelineConfig) -> Any:
    return stage_named(name)(config, Workspace(Path(config.workspace)))


def prepared(name: str, config: PipelineConfig) -> Preparation:
    """Prepare in this process, as a job."""
    preparation = Preparation(stage(name, config))
    preparation.job.directory.mkdir(parents=True, exist_ok=True)
    run_job(preparation.job.directory, preparation.run)
    return preparation


def failures(preparation: Preparation) -> dict[str, str]:
    return {item.name: item.detail for item in preparation.checks() if not item.passed}


def content(config: PipelineConfig) -> dict[Path, str]:
    root = Path(config.workspace) / "artifacts"
    return {path: file_digest(path) for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def half(finished: PipelineConfig) -> PipelineConfig:
    """The states of 12 of 24 samples committed, nothing trained yet."""
    extract = stage("extract", finished)
    kept = sorted(extract.store.ids())[:12]
    rewrite_manifest(extract.store.manifest, lambda row: row["id"] in kept)
    return finished


@pytest.fixture
def unsignalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of these tests run in this process, whose signals stay pytest's."""
    monkeypatch.setattr("draftworks.supervision.runner._stop_on_signals", lambda _: None)


pytestmark = pytest.mark.usefixtures("unsignalled")


def test_every_stage_is_tried_small_and_leaves_the_real_one_alone(half: PipelineConfig) -> None:
    before = content(half)
    for name in STAGES:
        preparation = prepared(name, half)
        assert failures(preparation) == {}
        assert preparation.job.state() is State.FINISHED
        assert preparation.stale() == []
    assert content(half) == before
    names = {name: [c.name for c in Preparation(stage(name, half)).checks()] for name in STAGES}
    assert names["extract"][-3:] == ["frozen part", "extracts", "agrees with the engine"]
    assert names["train"][-5:] == [
        "frozen part",
        "trains and resumes",
        "loss falls",
        "exports as eagle",
        "exports as speculators",
    ]
    assert names["evaluate"][-1] == "speculates"
    assert names["publish"][-1] == "publishes"


def test_what_a_trial_finds_wrong_is_named(
    half: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of an earlier layer, without the final norm, in the place of the last ones."""
    from draftworks.engines.reference import ReferenceEngine

    capture = ReferenceEngine.capture

    def one_layer_early(self: Any, sequences: Any) -> Any:
        return [
            type(states)(states.aux, states.aux[:, 2], states.argmax)
            for states in capture(self, sequences)
        ]

    monkeypatch.setattr(ReferenceEngine, "capture", one_layer_early)
    found = failures(prepared("extract", half))
    assert list(found) == ["agrees with the engine"]
    assert "the final norm missing or applied twice" in found["agrees with the engine"]


def test_training_that_learns_nothing_is_named(half: PipelineConfig) -> None:
    train = half.train.model_copy(update={"learning_rate": 1e-12, "validate_every": 1000})
    found = failures(prepared("train", half.model_copy(update={"train": train})))
    assert list(found) == ["loss falls"]
    assert "check train.learning_rate" in found["loss falls"]


def test_a_package_out_of_range_fails_before_anything_is_tried(half: PipelineConfig) -> None:
    jobs = half.jobs.model_copy(update={"requires": {"torch": ">=99"}})
    preparation = prepared("train", half.model_copy(update={"jobs": jobs}))
    assert list(failures(preparation)) == ["environment"]
    assert "frozen part" not in [item.name for item in preparation.checks()]
    assert "train, environment: torch is" in preparation.job.exit()["error"]
    assert preparation.stale() == ["train has not been prepared"]


def test_a_warm_start_with_another_map_is_named(
    half: PipelineConfig, finished_once: PipelineConfig, tmp_path: Path
) -> None:
    published = stage("publish", finished_once).folder("speculators")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((published / "config.json").read_bytes())
    weights = load_file(published / "model.safetensors")
    weights["d2t"] = torch.zeros_like(weights["d2t"])  # says that tokens 0..127 are the map
    save_file(weights, other / "model.safetensors")
    train = half.train.model_copy(update={"warm_start": str(other)})
    found = failures(prepared("train", half.model_copy(update={"train": train})))
    assert "draft vocabulary: d2t and t2d name different tokens" in found["warm start"]


def test_an_older_package_says_which_argument_it_does_not_know(
    half: PipelineConfig, tmp_path: Path
) -> None:
    """The exact command in the exact environment: there, an older Draftworks."""
    old = tmp_path / "old" / "draftworks"
    shutil.copytree(ROOT / "draftworks", old, ignore=shutil.ignore_patterns("__pycache__"))
    source = (old / "config.py").read_text()
    for text in ("    ttt_steps: int", "self.train.ttt_steps"):
        source = source.replace(text, text.replace("ttt_steps", "draft_steps"))
    (old / "config.py").write_text(source)
    file = tmp_path / "config.json"
    file.write_text(half.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-m", "draftworks", "prepare", str(file), "train"],
        env={**os.environ, "PYTHONPATH": str(old.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "train.ttt_steps" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_waits_for_samples_while_a_job_makes_them(
    half: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tries the stage as soon as there are enough."""
    monkeypatch.setattr("draftworks.preparation.prepare.POLL_SECONDS", 0.01)
    extract = stage("extract", half)
    rows = list(extract.store.rows())
    rewrite_manifest(extract.store.manifest, lambda row: False)
    waiting = threading.Event()

    class Told(Progress):
        def phase(self, name: str) -> None:
            if name.startswith("waiting"):
                waiting.set()

    preparation = Preparation(stage("train", half))
    preparation.job.directory.mkdir(parents=True, exist_ok=True)
    with held_lock(Job(extract.job_directory).directory):
        thread = threading.Thread(target=preparation.run, args=[Told()])
        thread.start()
        assert waiting.wait(60)
        names = [item.name for item in preparation.checks()]
        assert "disk space" in names
        assert "frozen part" not in names
        text = "".join(json.dumps(row) + "\n" for row in rows[:SAMPLES])
        extract.store.manifest.write_text(text)
        thread.join(60)
    assert not thread.is_alive()
    assert failures(preparation) == {}
    assert "loss falls" in [item.name for item in preparation.checks()]


def test_without_any_samples_it_says_so(
    tiny_config: PipelineConfig, make_config: Callable[..., PipelineConfig]
) -> None:
    found = failures(prepared("train", tiny_config))
    assert list(found) == ["frozen part"]
    assert "no hidden states are committed yet" in found["frozen part"]


def test_what_changed_since_makes_it_stale(
    half: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = half.jobs.model_copy(update={"prepare": False})  # the checks alone
    preparation = prepared("train", half.model_copy(update={"jobs": jobs}))
    assert preparation.stale() == []
    with monkeypatch.context() as patch:
        patch.setattr("draftworks.preparation.environment.version", lambda _: "9.9")
        assert any(text.endswith("is 9.9") for text in preparation.stale())

    def full(_: Any) -> str:
        raise DraftworksError("the disk is full")

    monkeypatch.setattr("draftworks.preparation.host.room", full)
    assert preparation.stale() == ["the disk is full"]
