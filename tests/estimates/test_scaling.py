"""GPU scaling: the figures noted for the full-size job, and the rule behind the advice."""

import base64
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from draftworks.config import PipelineConfig, recipe
from draftworks.estimates.scaling import Work, allreduce_seconds, recommend, scale, scaled_rate
from draftworks.report.plan import advise, charts
from draftworks.stages import all_stages, plan_all
from draftworks.stages.base import size
from draftworks.workspace import Workspace

PCIE5 = 64e9


@pytest.fixture
def kimi(tmp_path: Path) -> PipelineConfig:
    return recipe("kimi-k2.5").model_copy(update={"workspace": str(tmp_path)})


def test_a_ring_moves_every_gradient_twice_but_for_its_own_part() -> None:
    """By walking the ring: N-1 steps of reduce-scatter and N-1 of all-gather, a chunk each."""
    for gpus in (2, 3, 4, 8):
        sent = sum(1 / gpus for _ in range(2 * (gpus - 1)))
        assert allreduce_seconds(4.8e9, gpus, PCIE5) == pytest.approx(sent * 4.8e9 / PCIE5)
    assert allreduce_seconds(4.8e9, 1, PCIE5) == 0


def test_the_noted_exchanges_over_pcie() -> None:
    assert allreduce_seconds(4.8e9, 2, PCIE5) == pytest.approx(0.075)
    assert allreduce_seconds(4.8e9, 4, PCIE5) == pytest.approx(0.1125)
    assert allreduce_seconds(4.8e9, 4, 48e9) == pytest.approx(0.150)


def test_the_full_size_job_takes_four_gpus(kimi: PipelineConfig) -> None:
    train = all_stages(kimi, Workspace(Path(kimi.workspace)))["train"]
    scaled = {item.gpus: item for item in train.scaling}
    gradients = 4 * train.work.trainable
    assert scaled[2].exchange == pytest.approx(0.075 * gradients / 4.8e9)
    assert scaled[4].exchange == pytest.approx(0.150 * gradients / 4.8e9)
    assert scaled[8].share > 0.5
    assert 10 < scaled[4].hours < 11.5  # 10.8 h were measured
    chosen, reason = recommend(train.scaling)
    assert chosen.gpus == kimi.train.gpus == 4
    assert reason.startswith("4 GPUs: on 8 a step takes")
    assert reason.count(". ") == 0
    said = advise(kimi, Workspace(Path(kimi.workspace)))
    assert reason in said
    assert "The config says" not in said
    other = kimi.model_copy(update={"train": kimi.train.model_copy(update={"gpus": 8})})
    assert "The config says train.gpus 8." in advise(other, Workspace(Path(kimi.workspace)))


def test_the_charts_lie_in_the_text(kimi: PipelineConfig) -> None:
    workspace = Workspace(Path(kimi.workspace))
    drawn = charts(kimi, workspace, plan_all(kimi, workspace))
    hours, gpus = (base64.b64decode(part.split(")")[0]) for part in drawn.split("base64,")[1:])
    for svg, words in ((hours, ["9 h 31 min", "not known yet"]), (gpus, ["recommended", "eff. "])):
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg")
        assert all(word in svg.decode() for word in words)


def test_the_plan_of_the_full_size_job_needs_neither_target_nor_data(kimi: PipelineConfig) -> None:
    plans = {plan.stage: plan for plan in plan_all(kimi, Workspace(Path(kimi.workspace)))}
    assert plans["extract"].units == 37_312
    assert plans["extract"].hours == pytest.approx(9.5, abs=0.05)
    assert plans["extract"].gpus == 8
    assert plans["evaluate"].hours is None
    assert plans["evaluate"].time == "unknown"
    assert not list(Path(kimi.workspace).iterdir())

    # Nor does it matter that other pipelines have been in this workspace.
    job = Path(kimi.workspace) / "jobs" / "generate-0123456789abcdef"
    job.mkdir(parents=True)
    (job / "config.json").write_text(recipe("smollm2-demo").model_dump_json())
    assert plan_all(kimi, Workspace(Path(kimi.workspace))) == list(plans.values())


def test_the_disk_of_the_first_run(kimi: PipelineConfig) -> None:
    """14.4 M tokens in bfloat16, and what float8 would take."""
    stated = kimi.plan.model_copy(update={"samples": 10_000, "tokens_per_sample": 1444})
    config = kimi.model_copy(update={"plan": stated})
    extract = all_stages(config, Workspace(Path(config.workspace)))["extract"].plan()
    assert size(extract.bytes) == "828 GB"
    assert "14,440,000 tokens of 57,352 bytes in bfloat16" in extract.assumptions[0]
    assert "414 GB" in extract.assumptions[0]


def test_the_sizes_of_a_drafter_are_those_of_its_matrices(finished_once: PipelineConfig) -> None:
    train = all_stages(finished_once, Workspace(Path(finished_once.workspace)))["train"]
    matrices = sum(w.numel() for w in train.drafter().parameters() if w.dim() == 2)
    assert sum(train.weights()) == matrices == train.work.trainable


def test_one_gpu_is_enough_where_exchange_eats_the_gain() -> None:
    work = Work(trainable=10**9, flops=6e9, batch=1024, tokens=10**6)
    chosen, reason = recommend(scale(work, 100e12, {2: 10e9}))
    assert chosen.gpus == 1
    assert reason.startswith("1 GPU: on 2 a step takes")


def test_all_gpus_where_every_doubling_pays() -> None:
    work = Work(trainable=10**7, flops=6e9, batch=10**6, tokens=10**9)
    chosen, reason = recommend(scale(work, 100e12, {2: 64e9, 4: 48e9, 8: 26e9}))
    assert chosen.gpus == 8
    assert "every doubling" in reason


def test_efficiency_is_work_done_of_work_paid() -> None:
    work = Work(trainable=10**9, flops=1e12, batch=100, tokens=1000)
    alone, two = scale(work, 100e12, {2: 8e9})
    assert alone.step == pytest.approx(1.0)
    assert two.step == pytest.approx(0.5 + 4e9 / 8e9)
    assert two.efficiency(alone) == pytest.approx(0.5)
    assert two.hours == pytest.approx(10 / 3600)


def test_the_learning_rate_grows_with_the_root_of_the_batch() -> None:
    assert scaled_rate(1e-4, 8192, 32768) == pytest.approx(2e-4)
    assert scaled_rate(1e-4, 8192, 16384) == pytest.approx(1e-4 * math.sqrt(2))
