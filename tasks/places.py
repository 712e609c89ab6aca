"""From a pipeline's config to its stages on this host."""

from pathlib import Path
from typing import TYPE_CHECKING

from draftworks.config import PipelineConfig
from draftworks.workspace import Workspace

if TYPE_CHECKING:
    from draftworks.stages.base import Stage


def workspace_of(config: PipelineConfig) -> Workspace:
    return Workspace(Path(config.workspace))


def stage_of(name: str, config: PipelineConfig) -> "Stage":
    # The orchestrator imports the tasks too, and has no torch.
    from draftworks.stages import stage_named

    return stage_named(name)(config, workspace_of(config))
