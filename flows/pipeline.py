"""The pipeline: prompts in, a proven drafter out."""

from prefect import flow

from blocks import with_blocks
from draftworks.config import PipelineConfig
from tasks.preparation import check_everything, show_plan
from tasks.reports import report
from tasks.stage_runs import run_stage


@flow(name="pipeline", flow_run_name="{config.name}")
def pipeline(config: PipelineConfig, dry_run: bool = False) -> str | None:
    """Make a drafter. Returns the path of report.json.

    Args:
        config: Everything that decides the drafter; a recipe fills it in.
        dry_run: Stop after plan and checks, before any work.
    """
    config = with_blocks(config)
    check_everything(config)
    show_plan(config)
    if dry_run:
        return None
    samples = run_stage.submit("generate", config)
    vocabulary = run_stage.submit("vocab", config, wait_for=[samples])
    states = run_stage.submit("extract", config, wait_for=[samples])
    drafter = run_stage.submit("train", config, wait_for=[vocabulary, states])
    acceptance = run_stage.submit("evaluate", config, wait_for=[drafter])
    published = run_stage.submit("publish", config, wait_for=[acceptance])
    return report.submit(config, wait_for=[published]).result()
