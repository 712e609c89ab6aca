"""The command line: bad input is one message and a status of 1 before anything is made."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftworks.__main__ import main
from draftworks.config import PipelineConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")


def write(config: PipelineConfig, folder: Path) -> str:
    path = folder / "pipeline.json"
    path.write_text(config.model_dump_json())
    return str(path)


def failures(output: str) -> list[str]:
    """What the failed rows of the table say."""
    cells = [[cell.strip() for cell in line.split("│")] for line in output.splitlines()]
    return [row[4] for row in cells if len(row) > 4 and row[3] == "failed"]


def spoil_prompts(content: bytes) -> Callable[[PipelineConfig, Path], dict[str, Any]]:
    def spoil(config: PipelineConfig, _: Path) -> dict[str, Any]:
        Path(config.prompts.path).write_bytes(content)
        return {}

    return spoil


def no_prompts(config: PipelineConfig, _: Path) -> dict[str, Any]:
    Path(config.prompts.path).unlink()
    return {}


def broken_parquet(_: PipelineConfig, folder: Path) -> dict[str, Any]:
    path = folder / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "Hi"}] * 99), path)
    path.write_bytes(path.read_bytes()[:-8])
    return {"prompts": {"path": str(path)}}


def target_without(*names: str) -> Callable[[PipelineConfig, Path], dict[str, Any]]:
    def spoil(config: PipelineConfig, folder: Path) -> dict[str, Any]:
        shutil.copytree(config.target.model, folder / "target")
        for name in names:
            (folder / "target" / name).unlink()
        return {"target": {"model": str(folder / "target")}}

    return spoil


def missing_shard(config: PipelineConfig, folder: Path) -> dict[str, Any]:
    changes = target_without()(config, folder)
    index = folder / "target" / "model.safetensors.index.json"
    weights = {
        "model.embed_tokens.weight": "model.safetensors",
        "lm_head.weight": "gone.safetensors",
    }
    index.write_text(json.dumps({"weight_map": weights}))
    return changes


BAD = [
    pytest.param(no_prompts, "prompts.jsonl: no such file", id="no-prompts"),
    pytest.param(spoil_prompts(b""), "the file is empty", id="empty-prompts"),
    pytest.param(spoil_prompts(b"Hello\n"), "prompts.jsonl line 1: not JSON", id="no-json"),
    pytest.param(spoil_prompts(b'{"text": 1}\n'), "line 1: unknown fields text", id="unknown"),
    pytest.param(spoil_prompts(b"\xff\n"), "not UTF-8", id="no-text"),
    pytest.param(
        spoil_prompts(b'"Hi"\n"' + b"word " * 900 + b'"\n'),
        "prompts.jsonl line 2: ",
        id="too-long",
    ),
    pytest.param(broken_parquet, "not a readable Parquet file", id="broken-parquet"),
    pytest.param(
        lambda *_: {"target": {"model": "/no/such/folder"}}, "no such folder", id="no-target"
    ),
    pytest.param(target_without("tokenizer.json"), "no tokenizer", id="no-tokenizer"),
    pytest.param(target_without("config.json"), "no config.json", id="no-config"),
    pytest.param(target_without("model.safetensors"), "no *.safetensors", id="no-weights"),
    pytest.param(target_without("chat_template.jinja"), "no chat template", id="no-template"),
    pytest.param(missing_shard, "gone.safetensors", id="missing-shard"),
    pytest.param(
        lambda *_: {"vocab": {"size": 321}},
        "vocab.size 321 is larger than the target's vocabulary of 320",
        id="vocabulary",
    ),
    pytest.param(
        lambda *_: {"vocab": {"always": ["<think>"]}}, "not in the target's vocabulary", id="always"
    ),
    pytest.param(
        lambda *_: {"extract": {"layers": [2, 4, 8]}}, "a target of 8 layers", id="layers"
    ),
    pytest.param(
        lambda *_: {"train": {"warm_start": "/no/drafter"}}, "/no/drafter", id="no-warm-start"
    ),
    pytest.param(
        lambda *_: {"train": {"drafter": {"heads": 4, "kv_heads": 3}}},
        "4 heads cannot share 3 key-value heads",
        id="kv-heads",
    ),
    pytest.param(
        lambda *_: {"train": {"drafter": {"heads": 3}}}, "3 heads do not divide", id="heads"
    ),
    pytest.param(spoil_prompts(b'"Hi"\n'), "one prompt cannot be split", id="one-prompt"),
]


@pytest.mark.parametrize(("spoil", "expected"), BAD)
def test_bad_input_is_found_before_any_work(
    tmp_path: Path,
    make_config: Callable[..., PipelineConfig],
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[PipelineConfig, Path], dict[str, Any]],
    expected: str,
) -> None:
    config = make_config(tmp_path)
    changes = spoil(config, tmp_path)
    content = Path(config.prompts.path).read_bytes() if Path(config.prompts.path).exists() else None
    config = make_config(tmp_path, **changes)
    if content is None:
        Path(config.prompts.path).unlink()
    else:
        Path(config.prompts.path).write_bytes(content)
    status = main(["check", write(config, tmp_path)])
    out, err = capsys.readouterr()
    assert status == 1
    assert err == ""
    found = set(failures(out))
    assert len(found) == 1, found
    assert expected in found.pop()
    assert not (Path(config.workspace) / "artifacts").exists()


def test_a_sound_pipeline_passes_and_makes_nothing(
    tiny_config: PipelineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", write(tiny_config, tmp_path)]) == 0
    out = capsys.readouterr().out
    assert failures(out) == []
    assert "24 prompts in prompts.jsonl" in out
    assert list(Path(tiny_config.workspace).iterdir()) == []


def test_a_disk_that_is_too_small_is_found_before_any_work(
    small_disk: Path, make_config: Callable[..., PipelineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(small_disk)
    assert main(["check", write(config, small_disk)]) == 1
    (found,) = failures(capsys.readouterr().out)
    assert "the pipeline will write" in found
    assert not (Path(config.workspace) / "artifacts").exists()


def test_an_unwritable_workspace_is_found_before_any_work(
    tmp_path: Path, make_config: Callable[..., PipelineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, workspace="/proc/draftworks")
    assert main(["check", write(config, tmp_path)]) == 1
    (found,) = failures(capsys.readouterr().out)
    assert found.startswith("workspace /proc/draftworks cannot be written")


@pytest.mark.parametrize("command", ["check", "run", "verify", "report"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {epochs: 0}", "train.epochs"),
        ("epochs: 3", "epochs: Extra inputs"),
        ("a: [", "neither YAML nor JSON"),
    ],
)
def test_a_wrong_config_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, text: str, expected: str
) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    assert main([command, str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {path}: ")
    assert expected in err


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_missing_warm_start_is_one_message(
    tmp_path: Path,
    make_config: Callable[..., PipelineConfig],
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    config = make_config(tmp_path, train={"warm_start": "/no/drafter"})
    assert main([command, write(config, tmp_path), *(["vocab"] if command == "run" else [])]) == 1
    assert capsys.readouterr().err == (
        "error: train.warm_start /no/drafter: no model.safetensors in that folder\n"
    )


@pytest.mark.parametrize("command", ["run", "verify", "report"])
def test_a_missing_target_is_one_message(
    tmp_path: Path,
    make_config: Callable[..., PipelineConfig],
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    config = make_config(tmp_path, target={"model": "/no/such/folder"})
    assert main([command, write(config, tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: target '/no/such/folder': no such folder")


def test_an_unknown_stage_is_one_message(
    tiny_config: PipelineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", write(tiny_config, tmp_path), "polish"]) == 1
    assert "error: no stage 'polish'; there are generate" in capsys.readouterr().err


def test_verify_says_what_is_there(
    tiny_config: PipelineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", write(tiny_config, tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not yet  samples: 0 of 24 prompts (0.0%)"
    assert lines[6:] == ["checked: every byte"]
    assert not Path(tiny_config.workspace).exists()


@pytest.mark.usefixtures("own_signals")
def test_verify_and_run_hold_the_files_against_what_was_seen(
    tiny_config: PipelineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tiny_config, tmp_path)
    assert main(["run", path, "generate"]) == 0
    (part,) = Path(tiny_config.workspace).glob("artifacts/generate-*/part-000001.parquet")
    whole = part.read_bytes()
    part.write_bytes(bytes(len(whole)))
    (part.parent / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert main(["verify", path, "--share", "0"]) == 1
    shallow = capsys.readouterr().out
    assert "checked: presence and sizes" in shallow
    assert "differs" not in shallow
    assert main(["verify", path]) == 1
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│ generate")
    ]
    assert rows == [
        ["generate", "foreign", "1", "notes.txt"],
        ["generate", "damaged", "1", "part-000001.parquet differs from its checksum"],
    ]
    assert main(["verify", path, "--share", "2"]) == 1
    assert "--share 2: expected a share between 0 and 1" in capsys.readouterr().err
    part.write_bytes(whole)
    (part.parent / "notes.txt").unlink()
    assert main(["run", path, "--input", "generate=abc", "vocab"]) == 1
    assert "gate saw abc, disk holds" in capsys.readouterr().err
    assert main(["run", path, "vocab", "--input", "train=abc"]) == 1
    assert "error: --input train: not an input of vocab" in capsys.readouterr().err
    assert main(["run", path, "vocab", "--input", "generate"]) == 1
    assert "error: --input expects STAGE=DIGEST" in capsys.readouterr().err


def test_the_status_of_an_empty_workspace_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path / "none")]) == 0
    assert "job" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_a_run_from_end_to_end_in_a_process_of_its_own(
    tiny_config: PipelineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tiny_config, tmp_path)
    command = [sys.executable, "-m", "draftworks", "run", path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    sentences = [line for line in ran.stdout.splitlines() if "%)" in line]
    assert sentences == [
        "samples: 24 of 24 prompts (100.0%)",
        "draft vocabulary: 1 of 1 map (100.0%)",
        "hidden states: 24 of 24 samples (100.0%)",
        "training: 10 of 10 steps (100.0%)",
        "evaluation: 6 of 6 prompts (100.0%)",
        "published drafter: 2 of 2 formats (100.0%)",
    ]
    assert main(["verify", path]) == 0
    assert capsys.readouterr().out.count("ok       ") == 6
    assert main(["status", tiny_config.workspace]) == 0
    assert capsys.readouterr().out.count("finished") == 6


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A run takes over the signals of its process."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
def test_a_failing_run_ends_with_its_message_and_its_record(
    tiny_config: PipelineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", write(tiny_config, tmp_path), "train"]) == 1
    message = "train cannot start. samples: 0 of 24 prompts (0.0%)"
    assert capsys.readouterr().err == f"error: {message}\n"
    (record,) = Path(tiny_config.workspace).glob("jobs/train-*/exit.json")
    assert json.loads(record.read_text())["error"] == message
    assert main(["status", tiny_config.workspace]) == 0
    assert "failed" in capsys.readouterr().out
