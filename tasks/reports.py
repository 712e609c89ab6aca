"""The final report: made on the host that holds the data, linked from the pipeline's run."""

from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from draftworks.config import PipelineConfig
from tasks.places import workspace_of

if TYPE_CHECKING:
    from draftworks.report.model import Report


@task(name="report", cache_policy=NO_CACHE)
def make_report(config: PipelineConfig) -> str:
    """Write report.json and report.html. Returns a summary in Markdown that says where they are."""
    from draftworks.report.build import write_report
    from draftworks.report.model import Report

    path = write_report(config, workspace_of(config))
    summary = _summary(Report.model_validate_json(path.read_text()), str(path))
    link_report.fn(summary)
    get_run_logger().info("report: %s", path)
    return summary


@task(name="link report", cache_policy=NO_CACHE)
def link_report(summary: str) -> None:
    """Show the summary as an artifact of the current run."""
    create_markdown_artifact(summary, key="report")


def _summary(result: "Report", path: str) -> str:
    length = result.acceptance_length
    accuracy = ", ".join(f"{share:.1%}" for share in result.accuracy_per_position)
    published = "\n".join(f"- {form}: `{folder}`" for form, folder in result.published.items())
    return f"""# {result.name}: acceptance length {length.measured:.2f}

| | |
|---|---|
| measured by speculation | **{length.measured:.3f}** on {result.evaluated_prompts} prompts |
| estimated offline | {length.estimated:.3f} |
| outputs identical to plain greedy | {"yes" if result.outputs_identical else "**no**"} |
| accuracy per position | {accuracy} |
| draft vocabulary | {result.draft_vocabulary:,} tokens, coverage {result.coverage:.1%} |
| samples | {result.samples:,} with {result.loss_tokens:,} loss tokens |

{published}

The whole report: `{path.replace(".json", ".html")}` and `{path}`
"""
