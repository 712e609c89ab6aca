"""From a pipeline's config to its stages on this host.

The orchestrator imports the tasks too, and has no torch: what needs it is imported when called.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from draftworks.config import PipelineConfig
from draftworks.workspace import Workspace

if TYPE_CHECKING:
    from draftworks.preparation.prepare import Preparation
    from draftworks.stages.base import Stage


def workspace_of(config: PipelineConfig) -> Workspace:
    return Workspace(Path(config.workspace))


def stage_of(name: str, config: PipelineConfig) -> "Stage":
    from draftworks.stages import stage_named

    return stage_named(name)(config, workspace_of(config))


def preparation_of(name: str, config: PipelineConfig) -> "Preparation":
    from draftworks.preparation.prepare import Preparation

    return Preparation(stage_of(name, config))


def experiment(config: PipelineConfig) -> PipelineConfig:
    """The config with the workspace of its experiment, if `allow_partial` names one."""
    if config.allow_partial is None:
        return config
    from draftworks.stages.frozen import experiment

    return experiment(config)
