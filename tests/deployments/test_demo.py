"""The whole thing for real: server, workers, deployments, every stage, and kills on the way."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments import DEMO, ROOT, demo, stack
from deployments.stack import Stack
from draftworks.config import PipelineConfig
from draftworks.report.model import Report
from draftworks.stages import STAGES
from draftworks.stages.generate import Generate
from draftworks.stages.train import Train
from draftworks.supervision.job import Job
from draftworks.workspace import Workspace

PIPELINES = {f"pipeline/{name}" for name in (DEMO, "kimi-k2.5", "weekly-retrain")}
HOSTS = {f"{name}/host" for name in ("check", "prepare", *STAGES, "report")}
PATIENCE = 120.0


class Server:
    """What a running server knows, asked over its API."""

    def __init__(self, url: str) -> None:
        self.api = f"{url}/api"

    def deployments(self) -> dict[str, dict[str, Any]]:
        """flow/name -> what bootstrap declares of it, without the times of its changes."""
        flows = {flow["id"]: flow["name"] for flow in self._all("flows")}
        declared = ("id", "parameters", "parameter_openapi_schema", "tags", "entrypoint")
        return {
            f"{flows[found['flow_id']]}/{found['name']}": {
                **{field: found[field] for field in declared},
                "pool": found["work_pool_name"],
                "schedules": [
                    (item["schedule"]["cron"], item["active"]) for item in found["schedules"]
                ],
            }
            for found in self._all("deployments")
        }

    def declared(self) -> dict[str, Any]:
        """All that bootstrap is responsible for."""
        return {
            "deployments": self.deployments(),
            "pools": {pool["name"]: pool["id"] for pool in self._all("work_pools")},
            "variables": {item["name"]: item["value"] for item in self._all("variables")},
            "blocks": {kind["slug"]: kind["id"] for kind in self._all("block_types")},
        }

    def open_runs(self) -> list[str]:
        """Runs that somebody ought to be working on."""
        types = {"any_": ["RUNNING", "PENDING", "CANCELLING"]}
        found = self._all("flow_runs", flow_runs={"state": {"type": types}})
        return [run["name"] for run in found]

    def _all(self, what: str, **filters: Any) -> list[dict[str, Any]]:
        answer = httpx.post(f"{self.api}/{what}/filter", json=filters, trust_env=False)
        rows: list[dict[str, Any]] = answer.raise_for_status().json()
        return rows


class Home:
    """The place of a demo: its files, its jobs, and the processes that belong to it."""

    def __init__(self, path: Path, config: PipelineConfig) -> None:
        self.path = path
        self.workspace = Workspace(Stack(path).workspace)
        self.config = config.model_copy(update={"workspace": str(self.workspace.root)})
        self.samples = Generate(self.config, self.workspace).store
        self.checkpoints = Train(self.config, self.workspace).directory / "checkpoints"

    def job(self, name: str) -> Job:
        return Job(STAGES[name](self.config, self.workspace).job_directory)

    def kill(self, name: str) -> None:
        """SIGKILL to a stage's job and all its processes."""
        job = self.job(name)
        status = job.status()
        assert status is not None
        assert job.alive(), f"{name} had ended before it could be killed"
        os.killpg(status.pid, signal.SIGKILL)

    def outcomes(self) -> dict[str, list[str]]:
        """How each run of each job ended."""
        return {name: [run["outcome"] for run in self.job(name).history()] for name in STAGES}

    def processes(self) -> list[str]:
        """Command lines of everything that has this home in its arguments or environment."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command, environment = (
                    (process / name).read_bytes() for name in ("cmdline", "environ")
                )
            except OSError:  # it has just ended
                continue
            if str(self.path).encode() in command + environment:
                found.append(command.replace(b"\0", b" ").decode())
        return found

    def held_locks(self) -> list[Path]:
        return [lock for lock in self.path.rglob("lock") if Job(lock.parent).alive()]


@pytest.fixture
def config(tiny_config: PipelineConfig) -> PipelineConfig:
    """Small parts and a longer training, so that a kill finds some work committed and some not."""
    generate = tiny_config.generate.model_copy(update={"part_size": 1})
    train = tiny_config.train.model_copy(update={"epochs": 24, "validate_every": 1000})
    return tiny_config.model_copy(update={"generate": generate, "train": train})


@pytest.fixture
def recipe(config: PipelineConfig, tmp_path: Path) -> str:
    file = tmp_path / "tiny.json"
    file.write_text(config.model_dump_json(exclude_defaults=True))
    return str(file)


@pytest.fixture
def home(config: PipelineConfig, tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home", config)
    yield home
    Stack(home.path).down()
    for directory in home.workspace.jobs():
        Job(directory).end(grace=5)


@pytest.fixture
def taken_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Somebody else listens on the usual port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        monkeypatch.setattr(stack, "DEFAULT_PORT", port)
        yield port


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], list[str]]]:
    """Of each demo in this process, in the moment between its bootstrap and its pipeline: the
    server's address, all that is declared there, and the runs that are open."""
    seen: list[tuple[str, dict[str, Any], list[str]]] = []
    run = demo.run_pipeline

    def look_and_run(stack: Stack, jobs: dict[str, Job]) -> None:
        server = Server(stack.url)
        seen.append((stack.url, server.declared(), server.open_runs()))
        run(stack, jobs)

    monkeypatch.setattr(demo, "run_pipeline", look_and_run)
    return seen


def until(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    """Wait for what a process will have done, as long as it lives."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_until_killed(recipe: str, home: Home) -> dict[str, Any]:
    """A demo whose first job is killed while it generates, and which is killed, right after the
    job of the moment, while it trains. Returns what was declared on its server."""
    log = home.path.parent / "killed.log"
    with log.open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", "deployments.demo", "--recipe", recipe, "--home", home.path],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until(home.samples.rows, running)
        home.kill("generate")
        declared = Server(Stack(home.path).url).declared()
        until(lambda: list(home.checkpoints.glob("step-????????")), running)
        home.kill("train")
    except AssertionError as fault:
        pytest.fail(f"{fault}\n{log.read_text()}")
    finally:
        running.kill()
        running.wait()
    return declared


@pytest.mark.timeout(600)
def test_a_killed_demo_goes_on_where_it_was(
    recipe: str,
    home: Home,
    taken_port: int,
    servers: list[tuple[str, dict[str, Any], list[str]]],
) -> None:
    declared_before = run_until_killed(recipe, home)
    outcomes = home.outcomes()
    assert outcomes["generate"] == ["lost", "finished"]
    assert outcomes["extract"] == ["finished"]
    samples = home.samples.rows()

    path = demo.demo(recipe, home.path)
    check_report(Report.model_validate_json(path.read_text()), home)
    assert home.outcomes() == {
        "generate": ["lost", "finished"],
        "vocab": ["finished"],
        "extract": ["finished"],
        "train": ["lost", "finished"],
        "evaluate": ["finished"],
        "publish": ["finished"],
    }
    assert home.samples.rows() == samples
    assert home.processes() == []
    assert home.held_locks() == []

    ((url, declared, open_runs),) = servers
    assert not url.endswith(f":{taken_port}")
    assert open_runs == [], "nobody works on these any more"
    check_declared(declared, home)
    assert declared == declared_before, "a second bootstrap changed something"


def check_report(report: Report, home: Home) -> None:
    """Every figure that a reader looks for, held against what lies on disk."""
    samples = list(home.samples.samples())
    assert report.name == "tiny"
    assert report.conversations == 24
    assert report.samples == len(samples) == 24 - sum(report.rejected.values())
    assert report.loss_tokens == sum(sample.loss_tokens for sample in samples) > report.samples
    assert report.tokens == sum(len(sample.token_ids) for sample in samples)
    assert 0.5 < report.coverage <= 1
    assert (report.draft_vocabulary, report.target_vocabulary) == (128, 320)
    assert len(report.accuracy_per_position) == home.config.train.ttt_steps
    assert all(0 <= share <= 1 for share in report.accuracy_per_position)
    length, longest = report.acceptance_length, 1 + home.config.evaluate.draft_tokens
    assert 1 <= length.measured <= longest
    assert 1 <= length.estimated <= longest
    assert length.agree
    assert report.outputs_identical
    assert report.evaluated_prompts == home.config.evaluate.prompts
    assert list(report.seconds) == list(STAGES)
    assert all(seconds > 0 for seconds in report.seconds.values())
    assert {span.stage for span in report.timeline} == set(STAGES)
    steps = [row.step for row in report.training.history]
    assert steps == list(range(1, report.training.steps + 1))
    assert set(report.published) == {"eagle", "speculators"}
    for folder in report.published.values():
        assert (Path(folder) / "config.json").is_file()
        assert list(Path(folder).glob("*.safetensors"))
    assert report.config == home.config.model_dump(mode="json")


def check_declared(declared: dict[str, Any], home: Home) -> None:
    """Deployments with typed parameters, a weekly one that sleeps, and two pools."""
    deployments = declared["deployments"]
    assert set(deployments) == PIPELINES | HOSTS
    assert set(declared["pools"]) == {"cpu", "gpu"}
    assert "draftworks-endpoint" in declared["blocks"]
    assert {name: found["pool"] for name, found in deployments.items()} == dict.fromkeys(
        PIPELINES, "cpu"
    ) | dict.fromkeys(HOSTS, "gpu")
    schedules = {name: found["schedules"] for name, found in deployments.items()}
    assert schedules.pop("pipeline/weekly-retrain") == [("0 2 * * 1", False)]
    assert not any(schedules.values())
    for name, found in deployments.items():
        config = found["parameters"]["config"]
        assert isinstance(config, dict), f"{name}: the form would show a text, not settings"
        placed = PipelineConfig.model_validate(config)
        assert placed.workspace == str(home.workspace.root)
        assert (placed == home.config) is (name != "pipeline/kimi-k2.5")
    schema = deployments[f"pipeline/{DEMO}"]["parameter_openapi_schema"]
    check_form(schema)


def check_form(schema: dict[str, Any]) -> None:
    """A form that explains itself: every field of every group has its words."""
    assert schema["properties"]["dry_run"]["description"]
    groups = schema["definitions"]
    assert {"PipelineConfig", "TrainConfig", "DrafterConfig", "EndpointConfig"} <= set(groups)
    mute = [
        f"{group}.{field}"
        for group, found in groups.items()
        for field, facts in found["properties"].items()
        if not (facts.get("description") or groups_description(facts, groups))
    ]
    assert mute == []
    assert groups["TrainConfig"]["properties"]["ttt_steps"]["maximum"] == 16


def groups_description(facts: dict[str, Any], groups: dict[str, Any]) -> str:
    """The description of the group that a field refers to."""
    references = [facts, *facts.get("allOf", ())]
    names = [item["$ref"].rsplit("/", 1)[-1] for item in references if "$ref" in item]
    return "".join(groups[name].get("description", "") for name in names)
