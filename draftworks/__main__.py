"""The command line of a host: run, look at and check stages without Prefect.

    python -m draftworks fetch                      the bundled target, once
    python -m draftworks check  CONFIG              everything that can be known before work starts
    python -m draftworks run    CONFIG [STAGE ...]  stages in order; all when none is named
    python -m draftworks verify CONFIG              what lies on disk
    python -m draftworks status WORKSPACE           all jobs of a workspace
    python -m draftworks report CONFIG              report.json and the page

CONFIG is a recipe's name or a YAML or JSON file.
"""

import argparse
import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from draftworks import bundled, config
from draftworks.errors import DraftworksError
from draftworks.workspace import Workspace


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; a DraftworksError is one message, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="draftworks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["fetch", "check", "run", "verify", "status", "report"])
    parser.add_argument("subject", nargs="?", default="smollm2-demo", help="CONFIG or WORKSPACE")
    parser.add_argument("stages", nargs="*", help="stages to run")
    options = parser.parse_args(arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        if options.command == "fetch":
            print(bundled.fetch())
            return 0
        if options.command == "status":
            return _status(Path(options.subject))
        pipeline = config.load(options.subject)
        return COMMANDS[options.command](pipeline, options.stages)
    except DraftworksError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _check(pipeline: config.PipelineConfig, _stages: list[str]) -> int:
    from draftworks.stages import check_all

    workspace = Workspace(Path(pipeline.workspace))
    table = Table("stage", "check", "", "found")
    checks = check_all(pipeline, workspace)
    for stage, item in checks:
        mark = "[green]ok[/]" if item.passed else "[red]failed[/]"
        table.add_row(stage, item.name, mark, item.detail)
    Console().print(table)
    return 0 if all(item.passed for _, item in checks) else 1


def _run(pipeline: config.PipelineConfig, names: list[str]) -> int:
    from draftworks.stages import STAGES, stage_named
    from draftworks.supervision.runner import run_job

    workspace = Workspace(Path(pipeline.workspace))
    workspace.require_writable()
    for name in names or list(STAGES):
        stage = stage_named(name)(pipeline, workspace)
        if status := run_job(stage.job_directory, stage.run):
            return status
        print(stage.verify(deep=False).sentence)
    return 0


def _verify(pipeline: config.PipelineConfig, _stages: list[str]) -> int:
    from draftworks.stages import all_stages

    stages = all_stages(pipeline, Workspace(Path(pipeline.workspace)))
    verdicts = [stage.verify() for stage in stages.values()]
    for verdict in verdicts:
        print(("ok       " if verdict.complete else "not yet  ") + verdict.sentence)
    return 0 if all(verdict.complete for verdict in verdicts) else 1


def _report(pipeline: config.PipelineConfig, _stages: list[str]) -> int:
    from draftworks.report.build import write_report

    print(write_report(pipeline, Workspace(Path(pipeline.workspace))))
    return 0


def _status(root: Path) -> int:
    from draftworks.supervision.job import Job

    table = Table("job", "state", "progress", "phase", "to go")
    folder = Workspace(root).root / "jobs"
    for directory in sorted(folder.iterdir()) if folder.is_dir() else []:
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


COMMANDS = {"check": _check, "run": _run, "verify": _verify, "report": _report}

if __name__ == "__main__":
    sys.exit(main())
