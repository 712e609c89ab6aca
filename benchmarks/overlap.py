"""Idle time between the stages of a whole pipeline through Prefect, with preparation and without.

Runs the demo's pipeline twice from nothing, each in a home of its own, and reads from the jobs'
own histories how long nothing worked between the end of one and the start of the next.
"""

import argparse
import tempfile
from pathlib import Path

import yaml

from benchmarks import show
from deployments.demo import demo, jobs_of
from draftworks.config import PipelineConfig, load
from draftworks.report.plots import duration
from draftworks.supervision.job import Job

FOLLOWS = [
    ("generate", "vocab"),
    ("generate", "extract"),
    ("extract", "train"),
    ("train", "evaluate"),
    ("evaluate", "publish"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="smollm2-demo", help="recipe or config file")
    parser.add_argument("--prompts", type=int, default=150, help="use only so many prompts")
    options = parser.parse_args()
    config = load(options.recipe)
    config = config.model_copy(
        update={"prompts": config.prompts.model_copy(update={"limit": options.prompts})}
    )
    idle, total = {}, {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for prepare in (True, False):
            jobs = config.jobs.model_copy(update={"prepare": prepare})
            home = Path(folder).absolute() / f"prepare-{prepare}"
            idle[prepare], total[prepare] = run(config.model_copy(update={"jobs": jobs}), home)
    show(
        f"Idle time between jobs, {config.name}, {options.prompts} prompts",
        ["", "prepared, s", "not prepared, s", "ratio"],
        [[" → ".join(pair), *compared(idle[True][pair], idle[False][pair])] for pair in FOLLOWS]
        + [["first job to last", duration(total[True]), duration(total[False]), ""]],
    )


def run(config: PipelineConfig, home: Path) -> tuple[dict[tuple[str, str], float], float]:
    """(before, after) -> seconds from the end of one job to the start of the next; seconds from
    the first start to the last end."""
    home.mkdir(parents=True)
    recipe = home / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    demo(str(recipe), home)
    placed = config.model_copy(update={"workspace": str(home / "workspace")})
    jobs = jobs_of(placed)
    idle = {(a, b): started(jobs[b]) - ended(jobs[a]) for a, b in FOLLOWS}
    return idle, ended(jobs["publish"]) - started(jobs["generate"])


def started(job: Job) -> float:
    return float(job.history()[0]["started"])


def ended(job: Job) -> float:
    return float(job.history()[-1]["ended"])


def compared(ours: float, theirs: float) -> list[str]:
    return [f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"]


if __name__ == "__main__":
    main()
