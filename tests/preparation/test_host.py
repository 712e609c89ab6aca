"""Room on a host: disk, port, memory."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.preparation.host import gpus_there, port_free, read_ahead, room, written
from draftworks.stages import stage_named
from draftworks.workspace import Workspace


def stage(name: str, config: PipelineConfig) -> Any:
    return stage_named(name)(config, Workspace(Path(config.workspace)))


def test_what_earlier_stages_will_still_write_counts_too(
    tiny_config: PipelineConfig, finished: PipelineConfig
) -> None:
    train = stage("train", finished)
    assert "stages before" not in room(train)
    for path in stage("extract", finished).directory.rglob("*.safetensors"):
        path.unlink()
    assert "and the stages before it still" in room(train)


def test_a_disk_that_is_too_small_says_how_much_is_missing(
    tiny_config: PipelineConfig, small_disk: Path
) -> None:
    config = tiny_config.model_copy(update={"workspace": str(small_disk)})
    with pytest.raises(
        DraftworksError, match=r"train will write .* still .* free\. Free .* or more"
    ):
        room(stage("train", config))


def test_written_counts_every_file(tmp_path: Path) -> None:
    assert written(tmp_path / "absent") == 0
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a").write_bytes(bytes(1000))
    (tmp_path / "b").write_bytes(bytes(24))
    assert written(tmp_path) == 1024


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DraftworksError, match=f"port {port} of 127.0.0.1 is taken"):
            port_free(port)
    assert port_free(port) == f"{port} is free"


def test_weights_larger_than_memory_are_left_alone(tmp_path: Path) -> None:
    huge, small = tmp_path / "huge", tmp_path / "small"
    huge.touch()
    os.truncate(huge, 1 << 42)  # sparse
    small.write_bytes(bytes(5000))
    assert read_ahead([huge]).startswith("left out: 4.4 TB of weights")
    assert read_ahead([small]) == "5 kB in the page cache"


NVIDIA = """#!/bin/sh
[ "$*" = "--query-gpu=name,memory.total --format=csv,noheader,nounits" ] || exit 9
printf 'RTX PRO 6000, 97887\\nRTX PRO 6000, 97887\\nT4, 15360\\n'
"""


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two large GPUs and a small one, as nvidia-smi tells it."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("nvidia")
def test_gpus_count_if_they_have_the_memory() -> None:
    assert gpus_there(2, 68 * 10**9).startswith("2 of 3 GPUs (RTX PRO 6000), 68 GB")
    assert gpus_there(3, 10**9).startswith("3 of 3 GPUs")
    with pytest.raises(DraftworksError, match=r"3 GPUs with 68 GB .* there are: RTX PRO 6000 with"):
        gpus_there(3, 68 * 10**9)


def test_a_host_without_gpus_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DraftworksError, match="4 GPUs are needed, but nvidia-smi fails"):
        gpus_there(4, 0)
