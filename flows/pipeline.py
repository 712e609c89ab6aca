"""The pipeline: prompts in, a proven drafter out."""

from prefect import flow

from blocks import with_blocks
from draftworks.config import PipelineConfig
from tasks.host_runs import cancel_host_runs, run_on_host
from tasks.reports import link_report


@flow(name="pipeline", flow_run_name="{config.name}", on_cancellation=[cancel_host_runs])
def pipeline(config: PipelineConfig, dry_run: bool = False) -> None:
    """Make a drafter. Everything that touches data runs on the host that holds it.

    Args:
        config: Everything that decides the drafter; a recipe fills it in.
        dry_run: Stop after checks and plan, before any work.
    """
    config = with_blocks(config)
    run_on_host("check", config)
    if dry_run:
        return
    samples = run_on_host.submit("generate", config)
    vocabulary = run_on_host.submit("vocab", config, wait_for=[samples])
    states = run_on_host.submit("extract", config, wait_for=[samples])
    drafter = run_on_host.submit("train", config, wait_for=[vocabulary, states])
    acceptance = run_on_host.submit("evaluate", config, wait_for=[drafter])
    published = run_on_host.submit("publish", config, wait_for=[acceptance])
    for step in (samples, vocabulary, states, drafter, acceptance, published):
        step.result()  # the first that failed says why
    link_report(run_on_host("report", config))
