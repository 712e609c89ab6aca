"""The stages, in the order in which they first can run."""

import shutil

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.stages.base import Check, Plan, Stage, check, size
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


def all_stages(config: PipelineConfig, workspace: Workspace) -> dict[str, Stage]:
    """The stages of one pipeline by name; prompts and target are read once for all of them."""
    first = Generate(config, workspace)
    return {name: first.of(stage) for name, stage in STAGES.items()}


def check_all(config: PipelineConfig, workspace: Workspace) -> list[tuple[str, Check]]:
    """(stage, check) of everything that can be known before any work starts.

    Checks that rest on one that failed are left out: without prompts or a target there is
    nothing to hold the other stages against, and a plan needs sound settings.
    """
    checks = [("pipeline", check("workspace", lambda: _writable(workspace)))]
    for stage in all_stages(config, workspace).values():
        found = stage.prepare()
        checks += [(stage.name, item) for item in found]
        if isinstance(stage, Generate) and not all(item.passed for item in found):
            return checks
    if all(item.passed for _, item in checks):
        checks.append(("pipeline", check("disk space", lambda: _room(config, workspace))))
    return checks


def plan_all(config: PipelineConfig, workspace: Workspace) -> list[Plan]:
    """The plans of all stages."""
    return [stage.plan() for stage in all_stages(config, workspace).values()]


def _writable(workspace: Workspace) -> str:
    workspace.require_writable()
    return str(workspace.root)


def _room(config: PipelineConfig, workspace: Workspace) -> str:
    """What all stages together will write against what is free."""
    needed = sum(plan.bytes for plan in plan_all(config, workspace))
    free = shutil.disk_usage(workspace.root).free
    if needed > free:
        raise DraftworksError(
            f"the pipeline will write {size(needed)} and {workspace.root} has {size(free)} free. "
            "Free some or choose another `workspace`."
        )
    return f"needs {size(needed)} of {size(free)} free"
