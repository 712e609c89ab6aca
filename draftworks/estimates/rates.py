"""Rates of earlier runs: what this host has shown, from what its jobs left behind."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from draftworks.config import PipelineConfig
from draftworks.records.manifest import iterate_manifest, read_manifest
from draftworks.workspace import Workspace


@dataclass(frozen=True)
class Rate:
    """Tokens per second, and where that is known from."""

    tokens: float
    source: str


def measured(workspace: Workspace, config: PipelineConfig, stage: str) -> Rate | None:
    """The rate of the newest finished job of this kind; None when there is none."""
    newest: tuple[float, float] | None = None
    for directory in alike(workspace, config, stage):
        runs = read_manifest(directory / "history.jsonl")
        ends = [place for place, run in enumerate(runs) if run["outcome"] == "finished"]
        if not ends:
            continue
        runs = runs[: ends[0] + 1]  # what came later only looked at what was there
        seconds = sum(run["ended"] - run["started"] for run in runs)
        rate = _rate(workspace.root / "artifacts" / directory.name, stage, seconds)
        if rate and (newest is None or runs[-1]["ended"] > newest[0]):
            newest = (runs[-1]["ended"], rate)
    if newest is None:
        return None
    day = datetime.fromtimestamp(newest[0], UTC).date()
    return Rate(newest[1], f"{newest[1]:,.0f} tokens/s, measured here on {day}")


def alike(workspace: Workspace, config: PipelineConfig, stage: str) -> Iterator[Path]:
    """Directories of the jobs that did the same kind of work, as far as its speed goes: for the
    same target, with the same engine or GPUs, training a drafter and steps of the same size."""
    ours = _kind(config.model_dump(mode="json"), stage)
    for directory in workspace.jobs():
        settings = directory / "config.json"
        if directory.name.startswith(f"{stage}-") and settings.is_file():
            other = json.loads(settings.read_text(encoding="utf-8"))
            if _kind(other, stage) == ours:
                yield directory


def _kind(config: dict[str, Any], stage: str) -> list[Any]:
    """The settings that a speed belongs to."""
    settings = config.get(stage, {})
    same = {
        "generate": ("engine",),
        "extract": ("engine",),
        "train": ("gpus", "drafter", "ttt_steps", "pack_tokens", "accumulate"),
    }[stage]
    kind = [config.get("target"), *(settings.get(name) for name in same)]
    if stage == "extract" and settings.get("engine") != "reference":
        kind.append(settings.get("server", {}).get("tensor_parallel"))
    if stage == "train":
        kind.append(config.get("vocab", {}).get("size"))
    return kind


def _rate(artifact: Path, stage: str, seconds: float) -> float:
    """Tokens per second of a finished stage: of training the usual step's, which leaves out
    loading and validation; of the others all tokens over all seconds. 0 when it left nothing."""
    if stage == "train":
        rows = iterate_manifest(artifact / "metrics.jsonl")
        rates = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
        return median(rates) if rates else 0.0
    count = "tokens" if stage == "generate" else "rows"
    tokens = sum(row[count] for row in iterate_manifest(artifact / "manifest.jsonl"))
    return tokens / seconds if seconds > 0 else 0.0
