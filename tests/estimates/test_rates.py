"""Plans take up what earlier runs have shown."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from draftworks.__main__ import main
from draftworks.config import PipelineConfig
from draftworks.estimates.rates import measured
from draftworks.stages import plan_all
from draftworks.workspace import Workspace


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, make_config: object) -> PipelineConfig:
    """A pipeline that ran through as jobs."""
    config: PipelineConfig = make_config(tmp_path_factory.mktemp("ran"))  # type: ignore[operator]
    file = Path(config.workspace).parent / "config.json"
    file.write_text(config.model_dump_json())
    assert main(["run", str(file), "generate", "vocab", "extract", "train"]) == 0
    return config


def test_a_second_pipeline_is_planned_with_the_first_ones_rates(ran: PipelineConfig) -> None:
    """Other prompts, same target: nothing of it is there, but its speed is known."""
    workspace = Workspace(Path(ran.workspace))
    other = ran.model_copy(update={"prompts": ran.prompts.model_copy(update={"limit": 7})})
    plans = {plan.stage: plan for plan in plan_all(other, workspace)}
    today = f"measured here on {datetime.now(UTC).date()}"
    for name in ("generate", "extract", "train"):
        rate = measured(workspace, other, name)
        assert rate is not None
        assert today in rate.source
        assert plans[name].hours
        assert any(today in text for text in plans[name].assumptions)
    (history,) = [
        json.loads(line)
        for path in workspace.jobs()
        if path.name.startswith("extract")
        for line in (path / "history.jsonl").read_text().splitlines()
    ]
    rate = measured(workspace, other, "extract")
    assert rate is not None
    tokens = rate.tokens * (history["ended"] - history["started"])
    rows = next((workspace.root / "artifacts").glob("extract-*")) / "manifest.jsonl"
    stored = sum(json.loads(line)["rows"] for line in rows.read_text().splitlines())
    assert tokens == pytest.approx(stored)


def test_another_target_or_engine_is_another_speed(ran: PipelineConfig) -> None:
    workspace = Workspace(Path(ran.workspace))
    target = ran.target.model_copy(update={"model": "another"})
    assert measured(workspace, ran.model_copy(update={"target": target}), "extract") is None
    served = ran.generate.model_copy(update={"engine": "endpoint"})
    assert measured(workspace, ran.model_copy(update={"generate": served}), "generate") is None


def test_another_drafter_is_another_speed(ran: PipelineConfig) -> None:
    workspace = Workspace(Path(ran.workspace))
    larger = ran.train.drafter.model_copy(update={"intermediate_size": 8192})
    for change in ({"drafter": larger}, {"ttt_steps": ran.train.ttt_steps + 1}):
        other = ran.model_copy(update={"train": ran.train.model_copy(update=change)})
        assert measured(workspace, other, "train") is None


def test_looking_again_at_what_is_there_is_no_work(ran: PipelineConfig) -> None:
    workspace = Workspace(Path(ran.workspace))
    first = measured(workspace, ran, "extract")
    assert main(["run", str(Path(ran.workspace).parent / "config.json"), "extract"]) == 0
    (job,) = (path for path in workspace.jobs() if path.name.startswith("extract"))
    assert len((job / "history.jsonl").read_text().splitlines()) == 2
    assert measured(workspace, ran, "extract") == first


def test_what_nothing_is_known_of_is_not_made_up(tiny_config: PipelineConfig) -> None:
    plans = plan_all(tiny_config, Workspace(Path(tiny_config.workspace)))
    known = {plan.stage: plan.hours for plan in plans}
    assert known["generate"] is known["extract"] is known["train"] is None
