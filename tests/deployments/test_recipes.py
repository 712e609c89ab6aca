"""The shipped parameter sets, as a server takes them."""

import json

import pytest

from deployments import DEMO, ROOT
from draftworks.config import PipelineConfig, load, recipes

PREFECT_VARIABLE = 5000  # characters


@pytest.fixture
def kimi() -> PipelineConfig:
    return load("kimi-k2.5")


def test_the_recipes_of_the_deployments_are_there() -> None:
    assert recipes() == sorted([DEMO, "kimi-k2.5"])


@pytest.mark.parametrize("name", [DEMO, "kimi-k2.5"])
def test_a_recipe_fits_a_variable_and_comes_back_whole(name: str) -> None:
    placed = load(name).model_copy(update={"workspace": str(ROOT / "workspace")})
    value = json.dumps(placed.model_dump(mode="json", exclude_defaults=True))
    assert len(value) < PREFECT_VARIABLE
    assert PipelineConfig.model_validate_json(value) == placed


def test_kimi_is_the_job_at_its_real_size(kimi: PipelineConfig) -> None:
    assert kimi.target.model == "moonshotai/Kimi-K2.5"
    assert kimi.extract.engine == "vllm"
    assert kimi.extract.server.tensor_parallel == 8
    assert kimi.extract.layers == (2, 30, 58)
    assert kimi.vocab.size == 32_000
    assert {"<think>", "</think>"} <= set(kimi.vocab.always)
    assert kimi.train.gpus == 4


def test_every_flag_and_variable_of_the_server_has_its_reason(kimi: PipelineConfig) -> None:
    server = kimi.extract.server
    assert server.flags
    assert server.environment
    assert {*server.flags, *server.environment} == set(server.reasons)
    assert all(server.reasons.values())


def test_the_flags_say_what_the_settings_say(kimi: PipelineConfig) -> None:
    flags = kimi.extract.server.flags
    assert flags["--tensor-parallel-size"] == str(kimi.extract.server.tensor_parallel)
    assert int(flags["--max-model-len"]) > kimi.generate.max_new_tokens
