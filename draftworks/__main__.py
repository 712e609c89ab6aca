"""The command line of a host: run, look at and check stages without Prefect.

    python -m draftworks fetch                      the bundled target, once
    python -m draftworks check  CONFIG              everything that can be known before work starts
    python -m draftworks plan   CONFIG              bytes, hours and GPUs, from what is known
    python -m draftworks prepare CONFIG STAGE       its checks, and a run of it on a few samples
    python -m draftworks run    CONFIG [STAGE ...]  stages in order; all when none is named
    python -m draftworks verify CONFIG              what lies on disk, by reading every byte
    python -m draftworks status WORKSPACE           all jobs of a workspace
    python -m draftworks report CONFIG              report.json and the page

CONFIG is a recipe's name or a YAML or JSON file.
"""

import argparse
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bar
from rich.table import Table

from draftworks import bundled, config
from draftworks.errors import DraftworksError
from draftworks.progress import Progress
from draftworks.workspace import Workspace, commit_json

NICE = 10  # of a preparation

if TYPE_CHECKING:
    from draftworks.stages.base import Stage


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; a DraftworksError is one message, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="draftworks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["fetch", "status", *COMMANDS])
    parser.add_argument("subject", nargs="?", default="smollm2-demo", help="CONFIG or WORKSPACE")
    parser.add_argument("stages", nargs="*", help="stages to run or to prepare")
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="verify: share of the files whose every byte is read, chosen anew each time; 0 looks\n"
        "at presence and sizes only",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="STAGE=DIGEST",
        help="run: what the gate behind an input saw; the stage refuses to start on anything else",
    )
    options = parser.parse_intermixed_args(arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        if options.command == "fetch":
            print(bundled.fetch())
            return 0
        if options.command == "status":
            return _status(Path(options.subject))
        pipeline = config.load(options.subject)
        if pipeline.allow_partial:
            from draftworks.stages.frozen import experiment

            pipeline = experiment(pipeline)
        return COMMANDS[options.command](pipeline, options)
    except DraftworksError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _check(pipeline: config.PipelineConfig, _options: argparse.Namespace) -> int:
    from draftworks.stages import check_all

    workspace = Workspace(Path(pipeline.workspace))
    table = Table("stage", "check", "", "found")
    checks = check_all(pipeline, workspace)
    for stage, item in checks:
        mark = "[green]ok[/]" if item.passed else "[red]failed[/]"
        table.add_row(stage, item.name, mark, item.detail)
    Console().print(table)
    return 0 if all(item.passed for _, item in checks) else 1


def _plan(pipeline: config.PipelineConfig, _options: argparse.Namespace) -> int:
    from rich.markdown import Markdown

    from draftworks.report.plan import advise
    from draftworks.stages import plan_all
    from draftworks.stages.base import size

    workspace = Workspace(Path(pipeline.workspace))
    plans = plan_all(pipeline, workspace)
    table = Table("stage", "makes", "time", "GPUs", "disk", "assumes", title=pipeline.name)
    for plan in plans:
        made, gpus = f"{plan.units:,} {plan.unit}", str(plan.gpus or "-")
        assumed = "\n".join(plan.assumptions)
        table.add_row(plan.stage, made, plan.time, gpus, size(plan.bytes), assumed)
    table.add_row("all", "", "", "", size(sum(plan.bytes for plan in plans)), "")
    console = Console()
    console.print(table)
    console.print(Markdown(advise(pipeline, workspace)))
    return 0


def _prepare(pipeline: config.PipelineConfig, options: argparse.Namespace) -> int:
    from draftworks.preparation.prepare import Preparation
    from draftworks.stages import stage_named
    from draftworks.supervision.runner import run_job

    os.nice(NICE)  # what runs now comes first
    workspace = Workspace(Path(pipeline.workspace))
    workspace.require_writable()
    for name in options.stages:
        preparation = Preparation(stage_named(name)(pipeline, workspace))
        status = run_job(preparation.job.directory, preparation.run)
        for item in preparation.checks():
            print(f"{'ok    ' if item.passed else 'FAILED'}  {item.name}: {item.detail}")
        if status:
            return status
    return 0


def _run(pipeline: config.PipelineConfig, options: argparse.Namespace) -> int:
    from draftworks.stages import STAGES, stage_named
    from draftworks.supervision.runner import run_job

    names = options.stages or list(STAGES)
    gates = _gates(options.input)
    known = {source.name for name in names for source in stage_named(name).inputs}
    if strange := sorted(gates.keys() - known):
        raise DraftworksError(f"--input {strange[0]}: not an input of {', '.join(names)}")
    workspace = Workspace(Path(pipeline.workspace))
    workspace.require_writable()
    for name in names:
        stage = stage_named(name)(pipeline, workspace)
        # Says what kind of work it was, for the rates that plans are made of.
        commit_json(stage.job_directory / "config.json", pipeline.model_dump(mode="json"))
        if status := run_job(stage.job_directory, partial(_pass_gates, stage, gates)):
            return status
        print(stage.verify(share=0).sentence)
    return 0


def _pass_gates(stage: "Stage", gates: dict[str, str], progress: Progress) -> None:
    stage.require_inputs(gates)
    stage.run(progress)


def _gates(pairs: list[str]) -> dict[str, str]:
    """Digests by the name of their stage. Raises DraftworksError."""
    gates = dict(pair.partition("=")[::2] for pair in pairs)
    if not all(gates.values()):
        raise DraftworksError("--input expects STAGE=DIGEST, such as extract=0123456789abcdef")
    return gates


def _verify(pipeline: config.PipelineConfig, options: argparse.Namespace) -> int:
    from draftworks.stages import all_stages

    if not 0 <= options.share <= 1:
        raise DraftworksError(f"--share {options.share:g}: expected a share between 0 and 1")
    stages = all_stages(pipeline, Workspace(Path(pipeline.workspace)))
    terminal = Console(stderr=True)
    with Bar(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        verdicts = [
            stage.verify(share=options.share, progress=_Shown(bar, stage.title))
            for stage in stages.values()
        ]
    table = Table("stage", "found", "count", "which")
    for verdict in verdicts:
        print(("ok       " if verdict.complete else "not yet  ") + verdict.sentence)
        for row in verdict.rows():
            table.add_row(verdict.stage, *map(escape, row.values()))
    print("checked: " + "; ".join(dict.fromkeys(verdict.checked for verdict in verdicts)))
    if table.rows:
        Console().print(table)
    return 0 if all(verdict.complete for verdict in verdicts) else 1


class _Shown(Progress):
    """What a verification has read, as a bar in the terminal."""

    def __init__(self, bar: Bar, title: str) -> None:
        super().__init__()
        self._bar, self._task = bar, bar.add_task(title, total=None)

    def begin(self, total: int, unit: str, done: int = 0) -> None:
        super().begin(total, unit, done)
        self._bar.update(self._task, total=total, completed=done)

    def advance(self, units: int = 1) -> None:
        super().advance(units)
        self._bar.advance(self._task, units)


def _report(pipeline: config.PipelineConfig, _options: argparse.Namespace) -> int:
    from draftworks.report.build import write_report

    print(write_report(pipeline, Workspace(Path(pipeline.workspace))))
    return 0


def _status(root: Path) -> int:
    from draftworks.supervision.job import Job

    table = Table("job", "state", "progress", "phase", "to go")
    for directory in Workspace(root).jobs():
        job = Job(directory)
        status = job.status()
        counted = f"{status.done:,} of {status.total:,} {status.unit}" if status else ""
        phase = status.phase if status else ""
        if status and status.phase_total:
            phase += f" {status.phase_done:,} of {status.phase_total:,}"
        estimate = job.estimate()
        togo = estimate.sentence if estimate else ""
        table.add_row(directory.name, job.state().value, counted, phase, togo)
    Console().print(table)
    return 0


COMMANDS = {
    "check": _check,
    "plan": _plan,
    "prepare": _prepare,
    "run": _run,
    "verify": _verify,
    "report": _report,
}

if __name__ == "__main__":
    sys.exit(main())
