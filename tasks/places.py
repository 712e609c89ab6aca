"""From a pipeline's config to its stages on this host."""

from pathlib import Path

from draftworks.config import PipelineConfig
from draftworks.stages import stage_named
from draftworks.stages.base import Stage
from draftworks.workspace import Workspace


def workspace_of(config: PipelineConfig) -> Workspace:
    return Workspace(Path(config.workspace))


def stage_of(name: str, config: PipelineConfig) -> Stage:
    return stage_named(name)(config, workspace_of(config))
