""" "Seems done, proceed with the training", said at half: the real model, jobs and flows."""

import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from draftworks.config import PipelineConfig, recipe
from draftworks.stages.extract import Extract
from draftworks.stages.train import Train
from draftworks.supervision.job import Job
from flows.host import extract, generate, train, vocab
from tasks.places import stage_of

PATIENCE = 120.0


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    """The demo with 24 prompts and 16 tokens of answer, extracted sample by sample."""
    demo = recipe("smollm2-demo").model_dump()
    demo["workspace"] = str(tmp_path / "workspace")
    demo["prompts"]["limit"] = 24
    demo["generate"]["max_new_tokens"] = 16
    demo["vocab"]["size"] = 512
    demo["extract"]["batch_tokens"] = 1
    demo["train"]["epochs"] = 1
    demo["train"]["validation_share"] = 0.25
    demo["jobs"]["prepare"] = False  # but for the training that waits
    return PipelineConfig.model_validate(demo)


def in_background(work: Callable[[], Any]) -> threading.Thread:
    context = copy_context()  # with the settings of the test server
    thread = threading.Thread(target=context.run, args=[work])
    thread.start()
    return thread


def test_training_is_refused_at_half_and_starts_by_itself_when_the_rest_is_there(
    config: PipelineConfig, ear: Any, job_of: Callable[[str, PipelineConfig], Job]
) -> None:
    generate(config)
    vocab(config)
    states: Any = stage_of("extract", config)
    job = job_of("extract", config)
    extraction = in_background(lambda: extract(config, return_state=True))
    deadline = time.monotonic() + PATIENCE
    while len(states.store.ids()) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    status = job.status()
    assert status is not None
    os.killpg(status.pid, signal.SIGSTOP)
    done = len(states.store.ids())
    assert 10 <= done < 24
    try:
        state = train(config, return_state=True)
        assert state.is_failed()
        said = f"not yet. hidden states: {done} of 24 samples ({done / 24:.1%})"
        assert said in state.message
        assert f"job running on {platform.node()}" in state.message
        assert not job_of("train", config).history()

        patient = config.model_copy(
            update={
                "gates": config.gates.model_copy(update={"on_incomplete": "wait"}),
                "jobs": config.jobs.model_copy(update={"prepare": True}),
            }
        )
        training = in_background(lambda: train(patient, return_state=True))
        ear.wait_for("waiting for hidden states")
        assert not job_of("train", config).history()
    finally:
        os.killpg(status.pid, signal.SIGCONT)
    extraction.join(PATIENCE)
    training.join(PATIENCE)
    verdict = Train(config, states.workspace).verify()
    assert verdict.complete
    record = verdict and stage_of("train", config).record()
    assert record["training_samples"] + record["validation_samples"] == 24
    (ended,) = [run["ended"] for run in job.history()]
    (started,) = [run["started"] for run in job_of("train", config).history()]
    assert started > ended
    assert Extract(config, states.workspace).verify().complete
