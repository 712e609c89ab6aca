"""What the three trainers of the comparison share: the same data in, the same report out.

Runs in each trainer's own environment, so it needs torch and safetensors alone. A folder holds
`settings.json`, `start.safetensors` (the drafter's first weights by our names),
`target.safetensors` (its embeddings and head, and the draft vocabulary), and one file per optimizer
step with its samples end to end.
"""

import json
import resource
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Sample = dict[str, Tensor]  # tokens [T], aux [T, 3H], last [T, H] (normed), argmax [T], counts [T]
KEYS = ("tokens", "aux", "last", "argmax", "counts")


class Exchange:
    """The folder of one comparison."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())

    def samples(self, step: int) -> list[Sample]:
        """The samples of an optimizer step, which counts from 0."""
        pack = load_file(self.folder / f"step-{step}.safetensors")
        lengths = pack["lengths"].tolist()
        parts = {key: pack[key].split(lengths) for key in KEYS}
        return [{key: parts[key][i] for key in KEYS} for i in range(len(lengths))]

    def weights(self) -> dict[str, Tensor]:
        """The drafter's first weights."""
        return load_file(self.folder / "start.safetensors")

    def target(self) -> dict[str, Tensor]:
        """embeddings and head [V, H] in bfloat16, d2t and t2d."""
        return load_file(self.folder / "target.safetensors")

    def run(
        self, name: str, started: float, step: Callable[[int], int], weights: Callable[[], Any]
    ) -> None:
        """Train and report. step(number) -> tokens of that step; weights() -> by our names."""
        marks = [time.time()]
        tokens = []
        for number in range(self.settings["steps"]):
            tokens.append(step(number))
            marks.append(time.time())
            if number % 10 == 0:
                print(f"{name}: step {number}, {marks[-1] - started:.0f} s", flush=True)
        rates = [
            count / (end - begin)
            for count, (begin, end) in zip(tokens, pairwise(marks), strict=True)
        ]
        report = {
            # Of the middle step: the first ones compile, and others may use the machine at times.
            "tokens_per_second": median(rates),
            "first_step_seconds": marks[1] - started,
            "total_seconds": marks[-1] - started,
            "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        }
        kept = {key: value.detach().float().contiguous() for key, value in weights().items()}
        save_file(kept, self.folder / f"{name}.safetensors")
        (self.folder / f"{name}.json").write_text(json.dumps(report))


def process_started() -> float:
    """When this process began, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / 100


def set_rate(optimizer: torch.optim.Optimizer, rate: float, beta2: float) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = rate, (0.9, beta2)
