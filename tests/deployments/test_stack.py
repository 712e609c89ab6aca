"""A stack that meets a taken port, or cannot start."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments import stack
from deployments.stack import Stack, free_port
from draftworks.errors import DraftworksError

SOON = 60.0


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The usual port, with somebody listening on it."""
    with socket.create_server((request.param, 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(stack, "DEFAULT_PORT", port)
        yield port


def test_a_taken_port_is_left_alone(taken: int) -> None:
    port = free_port()
    assert port != taken
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_the_usual_port_is_used_when_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setattr(stack, "DEFAULT_PORT", port)
    assert free_port() == port


def test_a_server_that_cannot_start_says_why_at_once(tmp_path: Path) -> None:
    home = Stack(tmp_path / "home")
    home.home.mkdir()
    (home.home / "prefect").write_text("where Prefect wants its folder")
    started = time.monotonic()
    with pytest.raises(DraftworksError) as fault:
        home.up()
    assert time.monotonic() - started < SOON < stack.START_SECONDS
    assert "the Prefect server does not answer on http://127.0.0.1:" in str(fault.value)
    assert str(home.server.log) in str(fault.value)
    assert "unable to open database file" in str(fault.value)
    assert not any(job.alive() for job in (home.server, *home.workers.values()))


def test_ending_what_never_ran_is_nothing(tmp_path: Path) -> None:
    home = Stack(tmp_path / "home")
    home.down()
    assert not home.running
    assert not home.home.exists()
