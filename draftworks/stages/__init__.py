"""The stages, in the order in which they first can run."""

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.stages.base import Check, Stage, check
from draftworks.stages.evaluate import Evaluate
from draftworks.stages.extract import Extract
from draftworks.stages.generate import Generate
from draftworks.stages.publish import Publish
from draftworks.stages.train import Train
from draftworks.stages.vocab import Vocab
from draftworks.workspace import Workspace

STAGES: dict[str, type[Stage]] = {
    stage.name: stage for stage in (Generate, Vocab, Extract, Train, Evaluate, Publish)
}


def stage_named(name: str) -> type[Stage]:
    """Raises DraftworksError for a name that is no stage."""
    if name not in STAGES:
        raise DraftworksError(f"no stage {name!r}; there are {', '.join(STAGES)}")
    return STAGES[name]


def check_all(config: PipelineConfig, workspace: Workspace) -> list[tuple[str, Check]]:
    """(stage, check) of everything that can be known before any work starts.

    When prompts or target cannot be read, the checks that need them are left out.
    """
    checks = [("pipeline", check("workspace", lambda: writable(workspace)))]
    for stage in STAGES.values():
        found = stage(config, workspace).prepare()
        checks += [(stage.name, item) for item in found]
        if stage is Generate and not all(item.passed for item in found):
            break
    return checks


def writable(workspace: Workspace) -> str:
    workspace.require_writable()
    return str(workspace.root)
