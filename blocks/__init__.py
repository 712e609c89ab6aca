"""What a person configures once in the UI, and every run can name."""

from typing import cast

from blocks.endpoint import Endpoint
from draftworks.config import PipelineConfig

BLOCKS = [Endpoint]


def with_blocks(config: PipelineConfig) -> PipelineConfig:
    """The config with the values of the blocks that it names."""
    name = config.generate.endpoint.block
    if not name:
        return config
    endpoint = cast("Endpoint", Endpoint.load(name))
    return endpoint.applied(config)
