"""The pipeline: prompts in, a proven drafter out."""

from prefect import flow
from prefect.flow_runs import pause_flow_run

from blocks import with_blocks
from draftworks.config import PipelineConfig
from tasks.host_runs import Ordered, cancel_host_runs, complete, run_on_host
from tasks.reports import link_report

A_DAY = 24 * 3600
POLL_SECONDS = 5


@flow(name="pipeline", flow_run_name="{config.name}", on_cancellation=[cancel_host_runs])
def pipeline(config: PipelineConfig, dry_run: bool = False, approve: bool = False) -> None:
    """Make a drafter. Everything that touches data runs on the host that holds it.

    Each stage is ordered as soon as the one before it is at work: it prepares itself beside that
    job, and its gate opens when the files are complete.

    Args:
        config: Everything that decides the drafter; a recipe fills it in.
        dry_run: Stop after checks and plan, before any work.
        approve: Pause after checks and plan, for a day at most, until somebody resumes the run.
    """
    config = with_blocks(config)
    run_on_host("check", config)
    if dry_run:
        return
    if approve:
        pause_flow_run(timeout=A_DAY, poll_interval=POLL_SECONDS)
    samples = Ordered("generate", config)
    vocabulary = Ordered("vocab", config, beside=[samples])
    states = Ordered("extract", config, beside=[samples])
    drafter = Ordered("train", config, beside=[vocabulary, states])
    acceptance = Ordered("evaluate", config, beside=[drafter])
    published = Ordered("publish", config, beside=[acceptance])
    complete([samples, vocabulary, states, drafter, acceptance, published])
    link_report(run_on_host("report", config))
