"""A frozen part: the stages run in it as in any other workspace, and the original grows on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftworks.__main__ import main
from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.progress import Progress
from draftworks.records.manifest import rewrite_manifest
from draftworks.report.build import build_report
from draftworks.stages import stage_named
from draftworks.stages.extract import Extract
from draftworks.stages.frozen import experiment, freeze
from draftworks.stages.generate import Generate
from draftworks.workspace import Workspace, file_digest


def stage(name: str, config: PipelineConfig) -> Any:
    return stage_named(name)(config, Workspace(Path(config.workspace)))


@pytest.fixture
def half(finished: PipelineConfig) -> PipelineConfig:
    """All samples generated, the states of 12 of 24 committed."""
    extract = stage("extract", finished)
    kept = sorted(extract.store.ids())[:12]
    rewrite_manifest(extract.store.manifest, lambda row: row["id"] in kept)
    return finished


def test_it_holds_exactly_what_is_committed_and_takes_no_space(
    half: PipelineConfig, tmp_path: Path
) -> None:
    source = stage("extract", half)
    freeze(source, tmp_path / "part")
    frozen = stage("extract", half.model_copy(update={"workspace": str(tmp_path / "part")}))
    assert frozen.store.ids() == source.store.ids()
    assert {entry.sample_id for entry in frozen.of(Generate).store.index()} == source.store.ids()
    assert frozen.verify().complete
    for name in frozen.store.ids():
        assert frozen.store.path(name).samefile(source.store.path(name))


def test_the_original_may_lose_what_was_frozen(half: PipelineConfig, tmp_path: Path) -> None:
    source = stage("extract", half)
    freeze(source, tmp_path / "part")
    for name in source.store.ids():
        source.store.path(name).unlink()
    frozen = stage("extract", half.model_copy(update={"workspace": str(tmp_path / "part")}))
    assert frozen.verify().complete


def test_a_trial_takes_the_shortest_samples(half: PipelineConfig, tmp_path: Path) -> None:
    source = stage("generate", half)
    freeze(source, tmp_path / "part", states=False, shortest=5)
    frozen = stage("generate", half.model_copy(update={"workspace": str(tmp_path / "part")}))
    lengths = sorted(entry.tokens for entry in source.store.index())
    assert sorted(entry.tokens for entry in frozen.store.index()) == lengths[:5]
    assert not frozen.of(Extract).store.ids()


def test_nothing_committed_freezes_nothing(tiny_config: PipelineConfig, tmp_path: Path) -> None:
    with pytest.raises(DraftworksError, match="no hidden states are committed yet"):
        freeze(stage("extract", tiny_config), tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_an_experiment_is_frozen_once_and_says_what_it_is(half: PipelineConfig) -> None:
    """From half of the hidden states to a published drafter, whose card and report name the part;
    beside the real pipeline, which stays as it was."""
    source = stage("extract", half)
    before = {path: file_digest(path) for path in source.directory.rglob("*") if path.is_file()}
    config = experiment(half.model_copy(update={"allow_partial": "half"}))
    assert experiment(config) == config
    file = Path(half.workspace) / "half.json"
    file.write_text(half.model_copy(update={"allow_partial": "half"}).model_dump_json())
    assert main(["run", str(file)]) == 0
    report = build_report(config, Workspace(Path(config.workspace)))
    assert report.samples == 12
    words = "12 of 24 samples (50.0%)"
    assert any(words in line for line in report.warnings)
    for form in half.publish.formats:
        folder = stage("publish", config).folder(form)
        assert words in (folder / "README.md").read_text()
        assert json.loads((folder / "draftworks.json").read_text())["part"] == words
    now = {path: file_digest(path) for path in source.directory.rglob("*") if path.is_file()}
    assert now == before

    # The original goes on; the experiment stays what it was when it began.
    source.run(Progress())
    assert len(source.store.ids()) == 24
    assert experiment(half.model_copy(update={"allow_partial": "half"})) == config
    assert len(stage("extract", config).store.ids()) == 12


def test_a_part_is_never_taken_for_the_whole(half: PipelineConfig) -> None:
    with pytest.raises(DraftworksError, match=r"hidden states: 12 of 24 samples \(50\.0%\)"):
        stage("train", half.model_copy(update={"train": half.train})).require_inputs()


def test_an_experiment_on_damaged_states_does_not_start(
    half: PipelineConfig, make_config: Callable[..., PipelineConfig]
) -> None:
    config = experiment(half.model_copy(update={"allow_partial": "half"}))
    extract = stage("extract", config)
    path = extract.store.path(min(extract.store.ids()))
    path.unlink()
    with pytest.raises(DraftworksError, match="cannot start"):
        stage("train", config).require_inputs()
