"""What can be known before work starts is said before it starts."""

from collections.abc import Callable
from typing import Any

import pytest

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.stages import STAGES
from draftworks.supervision.job import Job, State
from flows.host import check, generate
from tasks.places import workspace_of
from tasks.preparation import check_everything, show_plan

NO_ROOM = (
    "generate, prompts fit the context: generate.max_new_tokens 512 leaves no room for a prompt "
    "in the context of 512"
)


@pytest.fixture
def hopeless(tiny_config: PipelineConfig) -> PipelineConfig:
    """Answers as long as the target's context."""
    settings = tiny_config.generate.model_copy(update={"max_new_tokens": 512})
    return tiny_config.model_copy(update={"generate": settings})


def test_a_failing_check_ends_the_flow_before_any_job(
    hopeless: PipelineConfig,
    job_of: Callable[[str, PipelineConfig], Job],
    shown: Callable[[str], Any],
) -> None:
    state = generate(hopeless, return_state=True)
    assert state.is_failed()
    assert state.message.endswith(f"DraftworksError: {NO_ROOM}")
    assert job_of("generate", hopeless).state() is State.NEVER_STARTED
    results = {row["check"]: row["result"] for row in shown("preparation-generate")}
    assert results == {"prompts": "ok", "target": "ok", "prompts fit the context": "FAILED"}


def test_the_checks_of_a_pipeline_fail_with_their_one_message(
    hopeless: PipelineConfig, shown: Callable[[str], Any]
) -> None:
    state = check(hopeless, return_state=True)
    assert state.is_failed()
    assert state.message.endswith(f"DraftworksError: {NO_ROOM}")
    assert not (workspace_of(hopeless).root / "jobs").exists()
    assert [row["result"] for row in shown("preparation")].count("FAILED") == 1


def test_every_failing_check_is_told_at_once(tiny_config: PipelineConfig) -> None:
    vocab = tiny_config.vocab.model_copy(update={"size": 1000})
    train = tiny_config.train.model_copy(update={"gpus": 4})
    config = tiny_config.model_copy(update={"vocab": vocab, "train": train})
    with pytest.raises(DraftworksError) as refusal:
        check_everything(config)
    first, second = str(refusal.value).split("; train, ")
    assert first.startswith("vocab, ")
    assert "vocab.size 1,000 is larger than the target's vocabulary of 320" in first
    assert second.startswith("device: train.gpus 4")


def test_checks_that_pass_are_shown(
    tiny_config: PipelineConfig, shown: Callable[[str], Any]
) -> None:
    check_everything(tiny_config)
    rows = shown("preparation")
    assert {row["stage"] for row in rows} >= STAGES.keys() - {"publish"}
    assert {row["result"] for row in rows} == {"ok"}


def test_the_plan_has_a_row_for_every_stage(
    tiny_config: PipelineConfig, shown: Callable[[str], Any]
) -> None:
    show_plan(tiny_config)
    plan = {row["stage"]: row for row in shown("plan")}
    assert list(plan) == list(STAGES)
    assert plan["generate"]["makes"] == "24 prompts"
    assert all(row["disk"] for row in plan.values())
    assert "24 new tokens" in plan["generate"]["assumes"]


def test_checks_and_plan_start_nothing(
    tiny_config: PipelineConfig, shown: Callable[[str], Any]
) -> None:
    check(tiny_config)
    assert len(shown("plan")) == len(STAGES)
    assert not list(workspace_of(tiny_config).root.iterdir())
