"""Checkpoints: an exact copy of model and optimizer, complete or absent, the newest kept."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from draftworks.errors import DraftworksError
from draftworks.training.checkpoints import Checkpoints

Pair = tuple[nn.Module, list[torch.optim.Optimizer]]


def pair(seed: int = 0) -> Pair:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)]


def advance(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> Pair:
    for step in range(steps):
        model(torch.full((5, 3), 0.1 * step)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(300, *advance(*pair(), 300))
    resumed = pair(seed=1)
    assert checkpoints.restore(*resumed) == 300
    expected, _ = advance(*advance(*pair(), 300), 20)
    found, _ = advance(*resumed, 20)
    for name, tensor in expected.state_dict().items():
        assert found.state_dict()[name].equal(tensor), name


def test_everything_of_the_optimizer_is_float32_and_its_counter_exact(tmp_path: Path) -> None:
    """bfloat16 would make 256 of 257."""
    Checkpoints(tmp_path, 2).save(257, *advance(*pair(), 257))
    stored = load_file(tmp_path / "step-00000257" / "optimizer.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    counters = {float(tensor) for name, tensor in stored.items() if name.endswith("/step")}
    assert counters == {257.0}
    model, (optimizer,) = pair()
    Checkpoints(tmp_path, 2).restore(model, [optimizer])
    assert {float(state["step"]) for state in optimizer.state.values()} == {257.0}


def test_the_newest_are_kept_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.restore(*pair()) == 0
    trained = advance(*pair(), 1)
    for step in (2, 9, 10, 100_000_000):
        checkpoints.save(step, *trained)
    assert checkpoints.steps() == [10, 100_000_000]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_torn_checkpoint_is_none_and_is_written_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 3)
    trained = advance(*pair(), 1)
    checkpoints.save(4, *trained)
    torn = tmp_path / "step-00000008.partial"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half of")
    (torn / "stale.safetensors").write_bytes(b"")
    assert checkpoints.steps() == [4]
    assert checkpoints.restore(*pair()) == 4
    checkpoints.save(8, *trained)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000008"]
    files = {path.name for path in (tmp_path / "step-00000008").iterdir()}
    assert files == {"model.safetensors", "optimizer.safetensors"}


def test_a_kill_before_the_rename_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    trained = advance(*pair(), 1)
    checkpoints.save(4, *trained)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(8, *trained)
    assert checkpoints.steps() == [4]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_named(name: str, damage: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(4, *advance(*pair(), 1))
    path = tmp_path / "step-00000004" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[:-5])
    with pytest.raises(DraftworksError, match=str(path.parent)):
        checkpoints.restore(*pair())
