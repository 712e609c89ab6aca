"""What can be known before work starts is said before it starts."""

import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.stages import STAGES
from draftworks.supervision.job import Job, State
from flows.host import check, extract, generate, prepare
from tasks.places import preparation_of, workspace_of
from tasks.preparation import check_everything, show_plan

PATIENCE = 60.0
NO_ROOM = (
    "generate, prompts fit the context: generate.max_new_tokens 512 leaves no room for a prompt "
    "in the context of 512"
)


@pytest.fixture
def hopeless(tiny_config: PipelineConfig) -> PipelineConfig:
    """Answers as long as the target's context."""
    settings = tiny_config.generate.model_copy(update={"max_new_tokens": 512})
    return tiny_config.model_copy(update={"generate": settings})


def test_a_failing_check_ends_the_flow_before_any_job(
    hopeless: PipelineConfig,
    job_of: Callable[[str, PipelineConfig], Job],
    shown: Callable[[str], Any],
) -> None:
    state = generate(hopeless, return_state=True)
    assert state.is_failed()
    assert state.message.endswith(f"DraftworksError: {NO_ROOM}")
    assert job_of("generate", hopeless).state() is State.NEVER_STARTED
    results = {row["check"]: row["result"] for row in shown("preparation-generate")}
    assert results.pop("prompts fit the context") == "FAILED"
    assert set(results.values()) == {"ok"}


def test_the_checks_of_a_pipeline_fail_with_their_one_message(
    hopeless: PipelineConfig, shown: Callable[[str], Any]
) -> None:
    state = check(hopeless, return_state=True)
    assert state.is_failed()
    assert state.message.endswith(f"DraftworksError: {NO_ROOM}")
    assert not (workspace_of(hopeless).root / "jobs").exists()
    assert [row["result"] for row in shown("preparation")].count("FAILED") == 1


def test_every_failing_check_is_told_at_once(tiny_config: PipelineConfig) -> None:
    vocab = tiny_config.vocab.model_copy(update={"size": 1000})
    train = tiny_config.train.model_copy(update={"gpus": 4})
    config = tiny_config.model_copy(update={"vocab": vocab, "train": train})
    with pytest.raises(DraftworksError) as refusal:
        check_everything(config)
    first, second = str(refusal.value).split("; train, ")
    assert first.startswith("vocab, ")
    assert "vocab.size 1,000 is larger than the target's vocabulary of 320" in first
    assert second.startswith("device: train.gpus 4")


def test_checks_that_pass_are_shown(
    tiny_config: PipelineConfig, shown: Callable[[str], Any]
) -> None:
    check_everything(tiny_config)
    rows = shown("preparation")
    assert {row["stage"] for row in rows} >= STAGES.keys() - {"publish"}
    assert {row["result"] for row in rows} == {"ok"}


def test_the_plan_has_a_row_for_every_stage(
    tiny_config: PipelineConfig, shown: Callable[[str], Any]
) -> None:
    show_plan(tiny_config)
    plan = {row["stage"]: row for row in shown("plan")}
    assert list(plan) == list(STAGES)
    assert plan["generate"]["makes"] == "24 prompts"
    assert all(row["disk"] for row in plan.values())
    assert "24 answer tokens" in plan["generate"]["assumes"]
    assert plan["generate"]["time"] == "unknown"


def test_checks_and_plan_start_nothing(
    tiny_config: PipelineConfig, shown: Callable[[str], Any]
) -> None:
    check(tiny_config)
    assert len(shown("plan")) == len(STAGES)
    assert not list(workspace_of(tiny_config).root.iterdir())


class Pager(HTTPServer):
    """Receives notifications."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), PagerHandler)
        self.texts: list[str] = []


class PagerHandler(BaseHTTPRequestHandler):
    server: Pager

    def do_POST(self) -> None:
        self.server.texts.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pager() -> Iterator[Pager]:
    with Pager() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_what_is_wrong_with_the_next_stage_is_told_while_this_one_runs(
    served_config: PipelineConfig,
    model_server: Any,
    pager: Pager,
    ear: Any,
    job_of: Callable[[str, PipelineConfig], Job],
    shown: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Extraction needs a package that is missing. Generation still runs when that is said, the
    package is installed and proved meanwhile, and extraction starts by itself."""
    site = tmp_path / "site"
    monkeypatch.setenv("PYTHONPATH", f"{site}:{Path(__file__).parents[2]}")
    CustomWebhookNotificationBlock(
        name="pager", url=f"http://127.0.0.1:{pager.server_port}", json_data={"text": "{{body}}"}
    ).save("pager", overwrite=True)
    needy = served_config.model_copy(
        update={
            "gates": served_config.gates.model_copy(update={"on_incomplete": "wait"}),
            "jobs": served_config.jobs.model_copy(
                update={"requires": {"fast-kernels": ">=2"}, "notify": "custom-webhook/pager"}
            ),
        }
    )
    reached, mended = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert mended.wait(PATIENCE)

    model_server.at[10] = hold
    runs = []

    def in_background(work: Callable[[], Any]) -> None:
        context = copy_context()  # with the settings of the test server
        runs.append(threading.Thread(target=context.run, args=[work]))
        runs[-1].start()

    try:
        in_background(lambda: generate(served_config))
        assert reached.wait(PATIENCE)
        in_background(lambda: extract(needy))
        ear.wait_for(
            "extract is not ready. environment: fast-kernels is not installed, >=2 is required"
        )
        ear.wait_for("waiting for samples: 8 of 12 prompts")
        assert job_of("generate", served_config).alive()
        note = shown("not-ready-extract")
        assert "fast-kernels is not installed" in note.data
        assert (
            f"-m draftworks prepare {preparation_of('extract', needy).job.directory}" in note.data
        )
        assert note.flow_run_id is not None
        assert any("extract is not ready" in text for text in pager.texts)
        with get_client(sync_client=True) as client:
            wanted = {"filter": {"event": {"name": ["draftworks.preparation.failed"]}}}
            events = client.request("POST", "/events/filter", json=wanted).json()["events"]
            payloads = [event["payload"] for event in events]
            assert [told["check"] for told in payloads if told["stage"] == "extract"] == [
                "environment"
            ]

        package = site / "fast_kernels-2.1.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: fast-kernels\nVersion: 2.1\n"
        )
        prepare("extract", needy)
        assert job_of("generate", served_config).alive()
    finally:
        mended.set()
        for run in runs:
            run.join(PATIENCE)
    outcomes = [run["outcome"] for run in preparation_of("extract", needy).job.history()]
    assert outcomes == ["failed", "finished"]
    assert job_of("extract", needy).state() is State.FINISHED
