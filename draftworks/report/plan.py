"""The plan as people read it: how many GPUs training should take and why, and its charts."""

import base64
from collections.abc import Sequence

from draftworks.config import PipelineConfig
from draftworks.estimates.scaling import Scaled, recommend, scaled_rate
from draftworks.stages.base import Plan
from draftworks.stages.train import Train
from draftworks.workspace import Workspace

BAR = 24  # characters of the longest step


def advise(config: PipelineConfig, workspace: Workspace) -> str:
    """Markdown: a table with bars, and the recommendation in one sentence. Empty where the config
    does not know how fast GPUs compute and exchange (`plan.train_tflops`, `plan.bus_gbps`)."""
    train = Train(config, workspace)
    scaled, work = train.scaling, train.work
    if not scaled:
        return ""
    chosen, reason = recommend(scaled)
    longest = max(item.step for item in scaled)
    rows = "\n".join(_row(item, scaled[0], longest) for item in scaled)
    rate, double = config.train.learning_rate, 2 * work.batch
    differing = (
        f" The config says train.gpus {config.train.gpus}."
        if config.train.gpus != chosen.gpus
        else ""
    )
    return f"""# Training on {chosen.gpus} GPUs

**{reason}**{differing}

| GPUs | compute, ms | exchange, ms | step, ms | efficiency | hours | computing █ exchanging ░ |
|---|---|---|---|---|---|---|
{rows}

A step has {work.batch:,} tokens, whatever the number of GPUs.
{work.trainable / 1e9:.2f} billion weights exchange {4 * work.trainable / 1e9:.1f} GB of float32
gradients, 2 (N-1)/N of it over every link. The learning rate {rate:g} belongs to this batch;
one of {double:,} tokens would want {scaled_rate(rate, work.batch, double):.2g} (square root, for
Adam), and give more GPUs more to do. How fast GPUs compute and exchange is taken from the config
(`plan.train_tflops`, `plan.bus_gbps`): put measured figures there.
"""


def charts(config: PipelineConfig, workspace: Workspace, plans: Sequence[Plan]) -> str:
    """Markdown with the hours of each stage and the step on each number of GPUs as images that lie
    in the text itself; empty where nothing is known yet."""
    from draftworks.report import plots  # matplotlib takes a second that a table need not wait for

    hours, scaled = {plan.stage: plan.hours for plan in plans}, Train(config, workspace).scaling
    drawn = {}
    if any(hours.values()):
        drawn["hours of each stage"] = plots.stage_hours(hours)
    if scaled:
        drawn["a step on each number of GPUs"] = plots.gpu_scaling(scaled, recommend(scaled)[0])
    return "\n".join(f"![{title}]({_inline(svg)})\n" for title, svg in drawn.items())


def _inline(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _row(item: Scaled, alone: Scaled, longest: float) -> str:
    computing, exchanging = (round(BAR * part / longest) for part in (item.compute, item.exchange))
    return (
        f"| {item.gpus} | {item.compute * 1000:,.0f} | {item.exchange * 1000:,.0f} "
        f"| {item.step * 1000:,.0f} | {item.efficiency(alone):.0%} | {item.hours:.1f} "
        f"| `{'█' * computing}{'░' * exchanging}` |"
    )
