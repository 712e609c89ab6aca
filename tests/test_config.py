"""Settings: what is refused, what decides an identity, what the form shows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from draftworks import config
from draftworks.config import PipelineConfig, Settings
from draftworks.errors import DraftworksError


def refused(text: str) -> str:
    with pytest.raises(DraftworksError) as caught:
        config.parse(text, "my.yaml")
    return str(caught.value)


def changed(path: str, value: Any) -> PipelineConfig:
    """The default config with one setting changed."""
    values = PipelineConfig().model_dump(mode="json")
    inner = values
    *parents, name = path.split(".")
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    return PipelineConfig.model_validate(values)


# Reading


@pytest.mark.parametrize("name", config.recipes())
def test_every_recipe_loads(name: str) -> None:
    loaded = config.load(name)
    assert loaded == config.recipe(name)
    assert loaded.name == name


def test_there_are_recipes() -> None:
    assert "smollm2-demo" in config.recipes()


def test_an_unknown_recipe_lists_those_there_are() -> None:
    with pytest.raises(DraftworksError, match=r"no recipe 'none'; there are .*smollm2-demo"):
        config.recipe("none")


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_a_config_comes_back_from_its_own_json(tmp_path: Path, name: str) -> None:
    for source in (PipelineConfig(), config.recipe("smollm2-demo")):
        (tmp_path / name).write_text(source.model_dump_json())
        assert config.load(str(tmp_path / name)) == source


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        PipelineConfig().train.epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("trian: {}", ["trian: Extra inputs"], id="unknown-section"),
        pytest.param("train: {epoch: 3}", ["train.epoch: Extra inputs"], id="unknown-field"),
        pytest.param(
            "generate: {endpoint: {url: x}}", ["generate.endpoint.url: Extra"], id="unknown-deep"
        ),
        pytest.param("train: {epochs: many}", ["train.epochs: ", '(found "many")'], id="type"),
        pytest.param("train: {epochs: 1.5}", ["train.epochs: ", "(found 1.5)"], id="fraction"),
        pytest.param("train: 3", ["train: ", "(found 3)"], id="section-type"),
        pytest.param(
            "train: {epochs: 0}", ["train.epochs: ", "greater than or equal to 1"], id="ge"
        ),
        pytest.param("train: {validation_share: 1}", ["train.validation_share: "], id="lt"),
        pytest.param("train: {learning_rate: .nan}", ["train.learning_rate: "], id="nan"),
        pytest.param("generate: {temperature: -1}", ["generate.temperature: "], id="negative"),
        pytest.param("generate: {engine: vllm}", ["generate.engine: ", '"vllm"'], id="choice"),
        pytest.param("extract: {layers: [1, 2]}", ["extract.layers.2: "], id="two-layers"),
        pytest.param("extract: {layers: [1, 2, 3, 4]}", ["extract.layers: "], id="four-layers"),
        pytest.param("name: a/b", ["name: "], id="name"),
        pytest.param("target: {model: 2024-01-01}", ["target.model: "], id="date"),
        pytest.param("train: {epochs: !!binary aGk=}", ["train.epochs: "], id="binary"),
        pytest.param("", ["config: "], id="empty"),
        pytest.param("[1]", ["config: "], id="list"),
        pytest.param("train: {epochs: [}", ["neither YAML nor JSON"], id="syntax"),
        pytest.param("a: !!python/object:os.system {}", ["neither YAML nor JSON"], id="python"),
        pytest.param("a: \x00", ["neither YAML nor JSON"], id="control"),
    ],
)
def test_a_wrong_setting_is_one_message_that_names_it(text: str, expected: list[str]) -> None:
    message = refused(text)
    assert message.startswith("my.yaml: ")
    assert [part for part in expected if part not in message] == []


def test_all_wrong_settings_are_named_at_once() -> None:
    message = refused("train: {epochs: 0, seed: -1}\nvocab: {size: 1}")
    assert message.startswith("my.yaml: 3 wrong settings\n")
    assert len(message.splitlines()) == 4


def test_drafting_more_than_was_trained_is_refused() -> None:
    message = refused("train: {ttt_steps: 2}\nevaluate: {draft_tokens: 3}")
    assert "evaluate.draft_tokens 3 is more than train.ttt_steps 2" in message
    assert config.parse("train: {ttt_steps: 4}\nevaluate: {draft_tokens: 4}", "my.yaml")


def test_a_missing_file_is_one_message() -> None:
    with pytest.raises(DraftworksError, match=r"none.yaml: neither a file nor a recipe"):
        config.load("none.yaml")


def test_a_file_that_is_no_text_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(DraftworksError, match=r"c\.yaml: not UTF-8"):
        config.load(str(tmp_path / "c.yaml"))


# Identity


OPERATIONAL = {
    "name": "other",
    "workspace": "/elsewhere",
    "prompts.path": "/elsewhere/prompts.jsonl",
    "generate.endpoint.block": "server",
    "generate.endpoint.base_url": "http://10.0.0.1/v1",
    "generate.endpoint.model": "alias",
    "generate.endpoint.api_key_env": "KEY",
    "generate.endpoint.in_flight": 7,
    "generate.endpoint.timeout_seconds": 7,
    "generate.endpoint.attempts": 7,
    "extract.batch_tokens": 7,
    "extract.server.reasons": {"--flag": "why"},
    "train.compile": True,
    "train.validate_every": 7,
    "train.checkpoint_every": 7,
    "train.keep_checkpoints": 7,
    "evaluate.batch": 7,
    "extract.server.port": 7,
    "gates.on_incomplete": "wait",
    "gates.share": 0.5,
    "jobs.python": "/elsewhere/bin/python",
    "jobs.requires": {"torch": ">=2"},
    "jobs.prepare": False,
    "jobs.notify": "slack-webhook/team",
    "plan.samples": 7,
    "plan.tokens_per_sample": 7,
    "plan.hidden_size": 7,
    "plan.target_gb": 7,
    "plan.generate_rate": 7,
    "plan.extract_rate": 7,
    "plan.train_tflops": 7,
    "plan.bus_gbps": {2: 7},
    "plan.disk_gbps": 7,
    "allow_partial": "half",
}
"""Everything that may differ between two runs of the same work."""


def leaves(settings: Settings, prefix: str = "") -> Iterator[str]:
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Settings):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("path", OPERATIONAL)
def test_where_and_how_fast_is_no_part_of_the_identity(path: str) -> None:
    assert changed(path, OPERATIONAL[path]).identity() == PipelineConfig().identity()


def test_everything_else_is_part_of_the_identity() -> None:
    identity = PipelineConfig().identity()

    def names(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, dict) and value:
                yield from names(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    assert set(names(identity)) == set(leaves(PipelineConfig())) - OPERATIONAL.keys()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("target.revision", "main"),
        ("generate.max_new_tokens", 7),
        ("generate.temperature", 0.7),
        ("generate.endpoint.extra_body", {"thinking": True}),
        ("vocab.always", ["<think>"]),
        ("extract.layers", [1, 2, 3]),
        ("extract.server.flags", {"--dtype": "auto"}),
        ("train.drafter.heads", 3),
        ("train.seed", 1),
        ("evaluate.tolerance", 0.2),
        ("publish.formats", ["eagle"]),
    ],
)
def test_what_decides_the_result_changes_the_identity(path: str, value: Any) -> None:
    other = changed(path, value).identity()
    assert other != PipelineConfig().identity()
    assert json.loads(json.dumps(other)) == other


# The form


def undescribed(model: type[BaseModel]) -> list[str]:
    schema = model.model_json_schema()
    found = []

    def visit(node: dict[str, Any], path: str) -> None:
        for name, field in node.get("properties", {}).items():
            inner = field
            if reference := field.get("$ref"):
                inner = schema["$defs"][reference.rsplit("/", 1)[1]]
            if not (field.get("description") or inner.get("description")):
                found.append(f"{path}{name}")
            visit(inner, f"{path}{name}.")

    visit(schema, "")
    return found


def test_every_field_of_the_form_is_described() -> None:
    assert undescribed(PipelineConfig) == []


def test_every_number_of_the_form_has_a_lower_bound() -> None:
    schema = PipelineConfig.model_json_schema()
    unbounded = [
        f"{model}.{name}"
        for model, definition in schema["$defs"].items()
        for name, field in definition["properties"].items()
        for kind in [field, *field.get("anyOf", [])]
        if kind.get("type") in ("integer", "number")
        and not {"minimum", "exclusiveMinimum"} & kind.keys()
    ]
    assert unbounded == []
