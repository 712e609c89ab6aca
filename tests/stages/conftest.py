"""A whole pipeline of the tiny target, run once and copied for every test that spoils it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftworks.config import PipelineConfig
from draftworks.progress import Progress
from draftworks.stages import STAGES
from draftworks.workspace import Workspace


@pytest.fixture(scope="session")
def finished_once(
    tmp_path_factory: pytest.TempPathFactory, make_config: Callable[..., PipelineConfig]
) -> PipelineConfig:
    """Never to be changed."""
    config = make_config(tmp_path_factory.mktemp("finished"))
    for stage in STAGES.values():
        stage(config, Workspace(Path(config.workspace))).run(Progress())
    return config


@pytest.fixture
def finished(finished_once: PipelineConfig, tiny_config: PipelineConfig) -> PipelineConfig:
    """A finished pipeline to spoil."""
    shutil.copytree(finished_once.workspace, tiny_config.workspace)
    return tiny_config
