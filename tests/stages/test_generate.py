"""Generation by the reference engine: which prompts are answered, which answers are kept."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftworks.config import PipelineConfig
from draftworks.progress import Progress
from draftworks.stages.generate import Generate
from draftworks.target import Target
from draftworks.workspace import Workspace

LONG = "word " * 600
SHORT = ["Hi", "Ho", "What is rain?"]


@pytest.fixture
def generate(tmp_path: Path, make_config: Callable[..., PipelineConfig]) -> Callable[..., Generate]:
    """The stage over some prompts; keywords change sections of the config."""

    def make(texts: list[str], **changes: Any) -> Generate:
        config = make_config(tmp_path, **changes)
        Path(config.prompts.path).write_text("".join(json.dumps(text) + "\n" for text in texts))
        return Generate(config, Workspace(Path(config.workspace)))

    return make


def failed(stage: Generate) -> dict[str, str]:
    return {item.name: item.detail for item in stage.prepare() if not item.passed}


def test_a_prompt_beyond_the_context_is_named_before_the_work(
    generate: Callable[..., Generate],
) -> None:
    found = failed(generate([*SHORT, LONG]))
    assert list(found) == ["prompts fit the context"]
    assert found["prompts fit the context"].startswith("prompts prompts.jsonl line 4: ")
    assert (
        "and generate.max_new_tokens 24 exceed the context of 512"
        in found["prompts fit the context"]
    )


def test_prompts_beyond_the_context_are_left_out_when_asked_for(
    generate: Callable[..., Generate],
) -> None:
    stage = generate([LONG, *SHORT], prompts={"skip_too_long": True})
    assert failed(stage) == {}
    stage.run(Progress())
    verdict = stage.verify()
    assert (verdict.done, verdict.expected, verdict.complete) == (3, 3, True)


def test_an_answer_must_leave_room_for_a_prompt(generate: Callable[..., Generate]) -> None:
    found = failed(generate(SHORT, generate={"max_new_tokens": 512}))
    assert "leaves no room for a prompt in the context of 512" in found["prompts fit the context"]


def test_when_nothing_fits_that_is_said(generate: Callable[..., Generate]) -> None:
    found = failed(generate([LONG], prompts={"skip_too_long": True}))
    assert found == {"prompts fit the context": "no prompt fits the context"}


def test_answers_cut_by_the_limit_are_rejected_unless_kept(
    generate: Callable[..., Generate], prompt_texts: list[str]
) -> None:
    kept = generate(prompt_texts[:24])
    kept.run(Progress())
    cut = [item for item in kept.store.samples() if item.finish_reason == "length"]
    strict = generate(prompt_texts[:24], generate={"keep_truncated": False})
    strict.run(Progress())
    assert 0 < len(cut) < 24
    assert strict.store.rejected()["truncated"] == len(cut)
    assert {item.id for item in strict.store.samples()} == {
        item.id for item in kept.store.samples() if item.finish_reason == "stop"
    }
    assert strict.verify().complete
    assert sum(row["truncated"] for row in kept.store.rows()) == len(cut)


def test_prompts_that_render_to_the_same_tokens_make_one_sample(
    generate: Callable[..., Generate], tiny_target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "trimming"
    shutil.copytree(tiny_target.folder, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("['content']", "['content'] | trim"))
    prompts = ["Hi", "Hi ", *SHORT[1:], " Hi"]
    stage = generate(prompts, target={"model": str(folder)}, generate={"part_size": 1})
    stage.run(Progress())
    assert stage.store.rejected() == {"duplicate": 2}
    assert len(stage.store.index()) == 3
    assert stage.verify().complete


def test_parts_are_of_the_configured_size(generate: Callable[..., Generate]) -> None:
    stage = generate([f"Question {n}?" for n in range(7)], generate={"part_size": 3})
    stage.run(Progress())
    assert [len(row["conversation_ids"]) for row in stage.store.rows()] == [3, 3, 1]
