"""An OpenAI-compatible endpoint that serves the target."""

import asyncio

from prefect.blocks.core import Block
from pydantic import Field

from draftworks.config import EndpointConfig, GenerateConfig, PipelineConfig
from draftworks.engines.endpoint import probe


class Endpoint(Block):
    """Name it in `generate.endpoint.block`, and runs take address and model from here.

    The key stays in an environment variable of the worker; the block knows only its name.
    """

    _block_type_name = "Draftworks endpoint"
    _block_type_slug = "draftworks-endpoint"

    base_url: str = Field(description="Address up to and including /v1.")
    model: str = Field(default="", description="Name of the model there; empty: the target's.")
    api_key_env: str | None = Field(
        default=None, description="Environment variable of the worker that holds the key."
    )
    in_flight: int = Field(default=64, ge=1, description="Requests kept open at once.")

    def applied(self, config: PipelineConfig) -> PipelineConfig:
        """The config with this endpoint's values in place."""
        chosen = {"base_url", "model", "api_key_env", "in_flight"}
        endpoint = config.generate.endpoint.model_copy(update=self.model_dump(include=chosen))
        generate = config.generate.model_copy(update={"endpoint": endpoint})
        return config.model_copy(update={"generate": generate})

    def test_connection(self, target: str) -> None:
        """Raises DraftworksError unless the endpoint answers and has the model."""
        endpoint = EndpointConfig(base_url=self.base_url, model=self.model)
        config = GenerateConfig(
            engine="endpoint",
            endpoint=endpoint.model_copy(update={"api_key_env": self.api_key_env}),
        )
        asyncio.run(probe(config, target))
