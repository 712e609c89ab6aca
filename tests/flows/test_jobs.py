"""A job under Prefect: started once, watched, started again only when it was lost."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from draftworks.config import PipelineConfig
from draftworks.supervision.job import Job
from draftworks.workspace import commit_json
from tasks.jobs import run_job
from tasks.places import stage_of

PATIENCE = 60.0
at_once = run_job.with_options(retry_delay_seconds=0)


def outcomes(job: Job) -> list[str]:
    return [run["outcome"] for run in job.history()]


def test_a_second_start_attaches_to_the_running_job(
    served_config: PipelineConfig,
    model_server: Any,
    ear: Any,
    job_of: Callable[[str, PipelineConfig], Job],
) -> None:
    model_server.at[6] = lambda: ear.wait_for("attached to")
    job = job_of("generate", served_config)
    settings = job.directory.parent / "config.json"
    commit_json(settings, served_config.model_dump(mode="json"))
    command = [sys.executable, "-m", "draftworks", "run", str(settings), "generate"]
    assert job.launch_or_attach(command, os.environ)
    run_job("generate", served_config)
    assert outcomes(job) == ["finished"]
    assert set(Counter(model_server.asked).values()) == {1}


def test_a_lost_job_is_started_again_and_resumes(
    served_config: PipelineConfig,
    model_server: Any,
    ear: Any,
    job_of: Callable[[str, PipelineConfig], Job],
    kill: Callable[[Job], None],
    shown: Callable[[str], Any],
) -> None:
    job = job_of("generate", served_config)
    model_server.at[6] = lambda: kill(job)
    at_once("generate", served_config)

    assert outcomes(job) == ["lost", "finished"]
    assert stage_of("generate", served_config).verify().complete
    asked = model_server.asked
    assert set(Counter(asked).values()) == {1, 2}
    assert not set(asked[:4]) & set(asked[6:]), "a committed answer was asked for again"
    assert ear.heard("generate is lost. Last lines of its log:")
    assert ear.heard("generating")
    progress = shown("generate-progress")
    assert progress.type == "progress"
    assert float(progress.data) == 100.0
    assert progress.description.startswith("generating: 12 of 12 prompts; heartbeat ")


def test_a_job_that_failed_for_a_reason_is_not_started_again(
    served_config: PipelineConfig,
    model_server: Any,
    job_of: Callable[[str, PipelineConfig], Job],
) -> None:
    model_server.at[6] = lambda: 401
    state = at_once("generate", served_config, return_state=True)
    assert state.is_failed()
    assert "DraftworksError: generate failed: endpoint " in state.message
    assert "401" in state.message
    assert "`generate.endpoint.api_key_env`" in state.message
    assert outcomes(job_of("generate", served_config)) == ["failed"]
    assert len(model_server.asked) == 6
