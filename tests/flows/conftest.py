"""One Prefect server for all tests in here, a model server that obeys them, and ears."""

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prefect.artifacts import Artifact
from prefect.testing.utilities import prefect_test_harness

from draftworks.config import PipelineConfig
from draftworks.progress import Progress
from draftworks.supervision.job import Job
from tasks.places import stage_of

PATIENCE = 60.0
MODEL = "tiny"


@pytest.fixture(scope="session", autouse=True)
def prefect_server() -> Iterator[None]:
    quiet = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # tasks are run without a flow here
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in quiet.items():
            patch.setenv(name, value)
        with prefect_test_harness(server_startup_timeout=120):
            yield


class ModelServer(ThreadingHTTPServer):
    """An OpenAI-compatible server. `at` says what happens before the nth answer, counted from 1;
    when that returns a status, the request is refused with it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.at: dict[int, Callable[[], int | None]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, prompt: str) -> tuple[int, dict[str, Any]]:
        self.asked.append(prompt)
        before = self.at.get(len(self.asked))
        if before and (status := before()):
            return status, {"error": "the model is out of order"}
        message = {"content": f"You said: {prompt}"}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}

    def handle_error(self, *_: Any) -> None:
        """A client that was killed in the middle of its question is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ModelServer

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._reply(*self.server.answer(body["messages"][-1]["content"]))

    def _reply(self, status: int, payload: dict[str, Any]) -> None:
        data = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def served_config(tiny_config: PipelineConfig, model_server: ModelServer) -> PipelineConfig:
    """12 prompts, asked one after another and committed in parts of 4."""
    generate = tiny_config.generate.model_dump() | {
        "engine": "endpoint",
        "part_size": 4,
        "endpoint": {"base_url": model_server.url, "model": MODEL, "in_flight": 1},
    }
    prompts = tiny_config.prompts.model_dump() | {"limit": 12}
    return PipelineConfig.model_validate(
        tiny_config.model_dump() | {"generate": generate, "prompts": prompts}
    )


class Ear(logging.Handler):
    """Hears what flows and tasks log, and can wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._news = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._news:
            self.lines.append(record.getMessage())
            self._news.notify_all()

    def heard(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def wait_for(self, text: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.heard(text), PATIENCE), f"never heard: {text}"


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    loggers = [logging.getLogger(f"prefect.{kind}_runs") for kind in ("flow", "task")]
    for logger in loggers:
        logger.addHandler(ear)
    yield ear
    for logger in loggers:
        logger.removeHandler(ear)


@pytest.fixture
def job_of() -> Callable[[str, PipelineConfig], Job]:
    return lambda name, config: Job(stage_of(name, config).job_directory)


@pytest.fixture
def kill() -> Callable[[Job], None]:
    """SIGKILL to a job and all its processes."""

    def now(job: Job) -> None:
        status = job.status()
        assert status is not None
        assert job.alive()
        os.killpg(status.pid, signal.SIGKILL)

    return now


@pytest.fixture
def shown() -> Callable[[str], Any]:
    """The newest artifact of a key: the rows of a table, else the artifact itself."""

    def newest(key: str) -> Any:
        artifact: Any = Artifact.get(key)
        assert artifact is not None, f"no artifact {key}"
        return json.loads(artifact.data) if artifact.type == "table" else artifact

    return newest


class Interrupted(Progress):
    """Asks the work to end after a number of units."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def advance(self, units: int = 1) -> None:
        super().advance(units)
        self.stop_requested = self.done >= self.after


@pytest.fixture
def interrupted() -> Callable[[int], Progress]:
    return Interrupted
