"""The endpoint block: filled in once, named by any run."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from blocks import with_blocks
from blocks.endpoint import Endpoint
from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError

KEY = "sk-very-secret-0123456789"
VARIABLE = "DRAFTWORKS_TEST_KEY"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    monkeypatch.setenv(VARIABLE, KEY)
    block = Endpoint(
        base_url="http://gpu-7:8000/v1", model="served-name", api_key_env=VARIABLE, in_flight=17
    )
    block.save("gpu-7", overwrite=True)
    return block


@pytest.fixture
def naming(tiny_config: PipelineConfig) -> Callable[[str | None], PipelineConfig]:
    def config(block: str | None) -> PipelineConfig:
        endpoint = tiny_config.generate.endpoint.model_copy(update={"block": block})
        generate = tiny_config.generate.model_copy(update={"endpoint": endpoint})
        return tiny_config.model_copy(update={"generate": generate})

    return config


def test_a_block_comes_back_as_it_was_saved(endpoint: Endpoint) -> None:
    loaded = Endpoint.load("gpu-7")
    assert loaded.model_dump() == endpoint.model_dump()


def test_the_named_block_replaces_the_values_of_the_config(
    endpoint: Endpoint, naming: Callable[[str | None], PipelineConfig]
) -> None:
    before, after = naming("gpu-7"), with_blocks(naming("gpu-7"))
    settings = after.generate.endpoint
    assert settings.base_url == "http://gpu-7:8000/v1"
    assert settings.model == "served-name"
    assert settings.api_key_env == VARIABLE
    assert settings.in_flight == 17
    assert settings.timeout_seconds == before.generate.endpoint.timeout_seconds
    assert after.generate.identity() == before.generate.identity(), "a host changed the result"
    restored = after.generate.model_copy(update={"endpoint": before.generate.endpoint})
    assert after.model_copy(update={"generate": restored}) == before


def test_a_config_that_names_no_block_stays_as_it_is(
    naming: Callable[[str | None], PipelineConfig],
) -> None:
    config = naming(None)
    assert with_blocks(config) is config


def test_the_key_never_reaches_the_server(endpoint: Endpoint) -> None:
    with get_client(sync_client=True) as client:
        documents = client.read_block_documents(include_secrets=True)
    text = json.dumps([document.model_dump(mode="json") for document in documents])
    assert VARIABLE in text
    assert KEY not in text


def test_the_connection_can_be_tried(model_server: Any) -> None:
    Endpoint(base_url=model_server.url).test_connection("tiny")
    with pytest.raises(DraftworksError, match="no model 'other' among the 1 there"):
        Endpoint(base_url=model_server.url, model="other").test_connection("tiny")


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        with pytest.raises(DraftworksError) as refusal:
            Endpoint(base_url=url).test_connection("tiny")
    assert str(refusal.value).startswith(f"endpoint {url} cannot be used: ConnectError")
    assert "Start the server" in str(refusal.value)


def test_a_missing_key_is_told_by_the_name_of_its_variable(
    model_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    block = Endpoint(base_url=model_server.url, api_key_env=VARIABLE)
    with pytest.raises(DraftworksError, match=f"{VARIABLE} is not set"):
        block.test_connection("tiny")
