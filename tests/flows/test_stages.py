"""The six flows, one after another, as a host runs them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect import Flow
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled

from draftworks.config import PipelineConfig
from draftworks.records.manifest import rewrite_manifest
from draftworks.stages import STAGES
from draftworks.supervision.job import Job, State
from flows import host
from tasks.jobs import stop_job
from tasks.places import experiment, stage_of, workspace_of

FLOWS: dict[str, Flow[[PipelineConfig], None]] = {name: getattr(host, name) for name in STAGES}


def files(config: PipelineConfig) -> dict[Path, int]:
    """Every file of every artifact, with the time of its last change."""
    root = workspace_of(config).root / "artifacts"
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def test_each_stage_runs_once_however_often_its_flow_runs(
    tiny_config: PipelineConfig, ear: Any, job_of: Callable[[str, PipelineConfig], Job]
) -> None:
    jobs = tiny_config.jobs.model_copy(update={"prepare": False})
    tiny_config = tiny_config.model_copy(update={"jobs": jobs})
    for name in STAGES:
        FLOWS[name](tiny_config)
        assert stage_of(name, tiny_config).verify().complete
        assert job_of(name, tiny_config).state() is State.FINISHED
    made = files(tiny_config)
    assert not any("nothing to do" in line for line in ear.lines)

    for name in STAGES:
        FLOWS[name](tiny_config)
        assert ear.heard(f"{name} is there already; nothing to do")
    assert files(tiny_config) == made
    for name in STAGES:
        history = job_of(name, tiny_config).history()
        assert [run["outcome"] for run in history] == ["finished"]


def test_a_stage_without_its_inputs_starts_no_job(
    tiny_config: PipelineConfig, job_of: Callable[[str, PipelineConfig], Job]
) -> None:
    state = FLOWS["extract"](tiny_config, return_state=True)
    assert state.is_failed()
    assert "not yet. samples: 0 of 24 prompts (0.0%); no job is running" in state.message
    assert job_of("extract", tiny_config).state() is State.NEVER_STARTED


def test_every_flow_stops_its_job_when_it_is_cancelled() -> None:
    for flow in FLOWS.values():
        assert flow.on_cancellation_hooks == [stop_job]


def test_a_cancelled_run_stops_its_job_and_keeps_what_is_committed(
    served_config: PipelineConfig,
    model_server: Any,
    job_of: Callable[[str, PipelineConfig], Job],
) -> None:
    flow = FLOWS["generate"]
    # As Prefect hands it to the hook, in a process of its own: parameters are plain JSON there.
    run = FlowRun(flow_id=uuid4(), parameters={"config": served_config.model_dump(mode="json")})
    model_server.at[6] = lambda: stop_job(flow, run, Cancelled())
    state = flow(served_config, return_state=True)
    assert state.is_failed()
    assert "generate was stopped on request" in state.message
    job = job_of("generate", served_config)
    assert job.state() is State.STOPPED
    kept = files(served_config)
    verdict = stage_of("generate", served_config).verify()
    assert (verdict.done, verdict.problems) == (8, ())

    flow(served_config)
    assert [run["outcome"] for run in job.history()] == ["stopped", "finished"]
    assert len(model_server.asked) == len(set(model_server.asked)) == 12
    after = files(served_config)
    parts = [path for path in kept if path.suffix == ".parquet"]
    assert len(parts) == 2
    assert {path: after[path] for path in parts} == {path: kept[path] for path in parts}


def test_cancelling_a_run_whose_job_is_gone_does_nothing(tiny_config: PipelineConfig) -> None:
    run = FlowRun(flow_id=uuid4(), parameters={"config": tiny_config.model_dump(mode="json")})
    stop_job(FLOWS["generate"], run, Cancelled())
    assert not list(workspace_of(tiny_config).root.glob("jobs/*"))


def test_an_experiment_trains_on_the_part_that_is_there(
    finished: PipelineConfig, ear: Any, job_of: Callable[[str, PipelineConfig], Job]
) -> None:
    """Half of the hidden states, by name; the pipeline itself is not touched."""
    states: Any = stage_of("extract", finished)
    kept = sorted(states.store.ids())[:12]
    rewrite_manifest(states.store.manifest, lambda row: row["id"] in kept)
    before = files(finished)
    config = finished.model_copy(
        update={
            "allow_partial": "half",
            "jobs": finished.jobs.model_copy(update={"prepare": False}),
        }
    )
    for name in ("generate", "extract", "vocab", "train"):
        FLOWS[name](config)
    assert ear.heard("generate is there already; nothing to do")
    assert ear.heard("extract is there already; nothing to do")
    inside = experiment(config)
    record = stage_of("train", inside).record()
    assert record["training_samples"] + record["validation_samples"] == 12
    assert job_of("train", inside).state() is State.FINISHED
    assert files(finished) == before


def test_a_damaged_sample_is_set_aside_and_made_again_by_itself(
    finished: PipelineConfig, ear: Any, job_of: Callable[[str, PipelineConfig], Job]
) -> None:
    """One bit of one file flipped: the extract flow mends just that."""
    states: Any = stage_of("extract", finished)
    name = min(states.store.ids())
    path = states.store.path(name)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = files(finished)
    jobs = finished.jobs.model_copy(update={"prepare": False})
    FLOWS["extract"](finished.model_copy(update={"jobs": jobs}))
    assert path.read_bytes() == content
    assert stage_of("extract", finished).verify().complete
    changed = {file for file, time in files(finished).items() if before.get(file) != time}
    kept = [file for file in changed if file.suffix == ".safetensors" and file != path]
    assert [file.parent.name for file in kept] in ([], ["quarantine"])
    assert name in (states.directory / "quarantine.jsonl").read_text()
