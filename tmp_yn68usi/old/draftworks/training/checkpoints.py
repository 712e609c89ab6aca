"""Checkpoints: everything an exact resume needs, complete or absent.

A checkpoint is a directory ``step-<n>`` with `model.safetensors` and `optimizer.safetensors`
(float32, AdamW's step counter too, which bfloat16 would round) and appears by one rename. Data
order and learning rate are functions of the step, so the step is the whole position.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from draftworks.errors import DraftworksError
from draftworks.workspace import commit_directory


class Checkpoints:
    """The checkpoints of one training run, newest kept."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self.keep = keep
        root.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising."""
        names = (path.name for path in self.root.iterdir() if path.is_dir())
        return sorted(
            int(name.removeprefix("step-"))
            for name in names
            if name.removeprefix("step-").isdigit()
        )

    def save(self, step: int, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Write the state after `step` optimizer steps; drop the oldest beyond `keep`."""
        with commit_directory(self._path(step)) as folder:
            save_file(model.state_dict(), folder / "model.safetensors")
            moments = {
                f"{name}/{moment}": values.contiguous()
                for name, parameter in model.named_parameters()
                for optimizer in optimizers
                for moment, values in optimizer.state.get(parameter, {}).items()
            }
            save_file(moments, folder / "optimizer.safetensors")
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self._path(old))

    def restore(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> int:
        """Load the newest checkpoint into all. Returns its step; 0 when there is none.

        Raises DraftworksError when its files are damaged.
        """
        steps = self.steps()
        if not steps:
            return 0
        folder = self._path(steps[-1])
        try:
            weights = load_file(folder / "model.safetensors")
            moments = load_file(folder / "optimizer.safetensors")
        except (OSError, SafetensorError) as error:
            raise DraftworksError(
                f"checkpoint {folder} cannot be read: {error}. Remove this folder, and training "
                "goes on from the checkpoint before it."
            ) from None
        model.load_state_dict(weights)
        owners = {
            parameter: optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        parameters = dict(model.named_parameters())
        for key, values in moments.items():
            name, moment = key.split("/")
            parameter = parameters[name]
            owners[parameter].state[parameter][moment] = values
        return steps[-1]

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"
