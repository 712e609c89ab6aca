"""`make demo`: one command from nothing to a drafter with a measured acceptance length.

Fetches the model, starts server and workers on loopback, deploys, runs the pipeline with its
progress on the terminal, prints the result, and leaves nothing running. Work that is there
already, from an earlier or a killed demo, is found by its identity and not done again.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deployments import DEMO, ROOT
from deployments.stack import Stack
from draftworks import bundled
from draftworks.config import PipelineConfig, load
from draftworks.errors import DraftworksError
from draftworks.report.model import Report
from draftworks.report.page import percent
from draftworks.report.plots import duration
from draftworks.stages import all_stages
from draftworks.stages.publish import Publish
from draftworks.supervision.job import Job, State
from draftworks.workspace import Workspace

LINE_SECONDS = 10.0  # between progress lines where there is no terminal
console = Console(highlight=False)


def demo(recipe: str, home: Path) -> Path:
    """Run the pipeline of `recipe` on this machine. Returns the path of report.json.

    Raises DraftworksError with the run's last words when it does not complete.
    """
    config, stack = load(recipe), Stack(home)
    if config.target.model == bundled.NAME:
        with console.status("fetching the model, once"):
            console.print(f"target     {bundled.fetch()}")
    config = config.model_copy(update={"workspace": str(stack.workspace)})
    workspace = Workspace(Path(config.workspace))
    jobs = jobs_of(config)
    try:
        with console.status("starting Prefect"):
            stack.down()  # what a killed demo left behind; its jobs are attached to, not ended
            stack.up(recipe)
        console.print(f"Prefect UI {stack.url}")
        run_pipeline(stack, jobs)
    finally:
        stack.down()
        for directory in workspace.jobs():  # the preparations too
            Job(directory).end(grace=60)
    return workspace.report(Publish(config, workspace).identity) / "report.json"


def jobs_of(config: PipelineConfig) -> dict[str, Job]:
    """Stage name -> its job, as far as identities are known before work starts."""
    workspace = Workspace(Path(config.workspace))
    stages = all_stages(config, workspace)
    return {name: Job(stage.job_directory) for name, stage in stages.items()}


def run_pipeline(stack: Stack, jobs: dict[str, Job]) -> None:
    """`prefect deployment run pipeline/smollm2-demo --watch`, with the jobs' progress shown."""
    command = [sys.executable, "-m", "prefect", "deployment", "run", f"pipeline/{DEMO}"]
    log = stack.home / "run.log"
    with log.open("w") as output:
        run = subprocess.Popen(
            [*command, "--watch"],
            env=stack.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        show_progress(run, jobs)
    finally:
        run.terminate()
        run.wait()
    if run.returncode:
        raise DraftworksError(f"the pipeline did not complete.\n{log.read_text().strip()}")


def show_progress(run: subprocess.Popen[bytes], jobs: dict[str, Job]) -> None:
    """One bar per stage on a terminal, a line now and then elsewhere."""
    bars = Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    printed: dict[str, tuple[str, float]] = {}
    with bars:
        shown = {
            name: bars.add_task(name, start=False, total=None, count="waiting") for name in jobs
        }
        while run.poll() is None:
            for name, job in jobs.items():
                status, state = job.status(), job.state()
                if status is None:
                    continue
                ended = state not in (State.RUNNING, State.STALLED)
                word = state.value if ended else status.phase
                count = f"{word}, {status.done:,} of {status.total:,} {status.unit}"
                count = count if status.total else word
                bars.start_task(shown[name])
                bars.update(
                    shown[name], total=status.total or None, completed=status.done, count=count
                )
                if ended:
                    bars.stop_task(shown[name])
                last, due = printed.get(name, ("", 0.0))
                if not console.is_terminal and count != last and (ended or time.monotonic() > due):
                    console.print(f"{name:<9} {count}")
                    printed[name] = (count, time.monotonic() + LINE_SECONDS)
            time.sleep(0.3)


def show_result(path: Path) -> None:
    """The figures that count, and where everything lies."""
    report = Report.model_validate_json(path.read_text())
    length = report.acceptance_length
    table = Table("", "result", title=f"EAGLE-3 drafter for {report.target}", show_header=False)
    rates = zip(
        report.acceptance_per_position.measured,
        report.acceptance_per_position.estimated,
        strict=False,
    )
    rows = [
        ("acceptance length, measured", f"[bold]{length.measured:.3f}[/]"),
        ("acceptance length, estimated", f"{length.estimated:.3f}"),
        ("they agree within", f"{percent(length.tolerance)}: {'yes' if length.agree else 'NO'}"),
        *(
            (f"  position {position}", f"{percent(ours)} measured, {percent(theirs)} estimated")
            for position, (ours, theirs) in enumerate(rates, start=1)
        ),
        ("outputs identical to plain greedy", "yes" if report.outputs_identical else "NO"),
        ("held-out prompts", f"{report.evaluated_prompts}"),
        ("samples", f"{report.samples:,} with {report.loss_tokens:,} loss tokens"),
        ("draft vocabulary", f"{report.draft_vocabulary:,}, coverage {percent(report.coverage)}"),
        *((f"  {stage}", duration(seconds)) for stage, seconds in report.seconds.items()),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for form, folder in report.published.items():
        console.print(f"{form:<11} {folder}", soft_wrap=True)
    console.print(f"{'page':<11} {path.with_suffix('.html')}", soft_wrap=True)
    console.print(f"{'report.json':<11} {path}", soft_wrap=True)
    console.print("the run in Prefect's UI: `make up`, then the address it prints")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default=DEMO, help="recipe or config file")
    parser.add_argument("--home", type=Path, default=ROOT / ".draftworks")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()
    try:
        path = demo(options.recipe, options.home.expanduser().absolute())
    except DraftworksError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; what is committed stays, and the same command goes on", file=sys.stderr)
        return 130
    show_result(path)
    console.print(f"done in {duration(time.monotonic() - started)}")
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
