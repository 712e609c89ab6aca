"""The loop: it learns, its schedule is right, and it never goes on with a broken drafter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import load_file

from draftworks.config import Loss
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.errors import DraftworksError
from draftworks.progress import Progress
from draftworks.training.loop import Data, Trainer, plan_steps
from draftworks.training.optimizer import learning_rate
from draftworks.training.packing import load_pack


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return toys.cycle_data(tmp_path_factory.mktemp("states"))


class After(Progress):
    """Does something once, when so many steps are counted."""

    def __init__(self, steps: int, action: Callable[[], object]) -> None:
        super().__init__()
        self.steps, self.action = steps, action

    def advance(self, units: int = 1) -> None:
        super().advance(units)
        if self.done == self.steps:
            self.action()


def rows(trainer: Trainer, kind: str = "loss") -> list[dict[str, Any]]:
    lines = trainer.metrics_path.read_text().splitlines()
    return [row for row in map(json.loads, lines) if kind in row]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_learnable_language_is_learnt(precision: str, data: Data, tmp_path: Path) -> None:
    config = toys.cycle_config(epochs=12, compute_dtype=precision)
    trainer = toys.cycle_trainer(tmp_path, data, config)
    before = trainer.validate()
    progress = Progress()
    after = trainer.run(progress)
    losses = [row["loss"] for row in rows(trainer)]
    assert len(losses) == progress.done == progress.total == len(plan_steps(data.training, config))
    assert losses[-1] < 0.3 * losses[0]
    assert after.loss < 0.3 * before.loss
    assert min(after.accuracy) > 0.95 > 0.5 > max(before.accuracy)
    assert after.acceptance.length > 2.5 > before.acceptance.length


@pytest.mark.parametrize("loss", ["total_variation", "acceptance", "hybrid"])
def test_every_loss_learns_it_too(loss: Loss, data: Data, tmp_path: Path) -> None:
    """Total variation alone stays behind: from fresh weights its gradient is small."""
    trainer = toys.cycle_trainer(tmp_path, data, toys.cycle_config(epochs=15, loss=loss))
    before, after = trainer.validate(), trainer.run(Progress())
    assert after.loss < 0.3 * before.loss
    assert min(after.accuracy) > 0.75 > 0.5 > max(before.accuracy)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_frozen_head_stays_the_targets(optimizer: str, data: Data, tmp_path: Path) -> None:
    config = toys.cycle_config(train_head=False, optimizer=optimizer)
    trainer = toys.cycle_trainer(tmp_path, data, config)
    before = trainer.validate()
    assert trainer.run(Progress()).loss < before.loss
    assert trainer.drafter.lm_head.weight.equal(toys.CYCLE_HEAD[list(toys.USED)])


def test_validation_counts_what_the_drafter_cannot_utter_as_wrong(
    data: Data, tmp_path: Path
) -> None:
    """A drafter that knows the language loses every row whose teacher leaves the map; a count
    inside the map would stay at 1."""
    trainer = toys.cycle_trainer(tmp_path, data, toys.cycle_config(epochs=12))
    assert trainer.run(Progress()).accuracy[0] == 1
    *kept, lost = toys.USED
    trainer.vocabulary = DraftVocabulary(torch.tensor([*kept, lost - 1]), toys.TARGET_VOCAB)
    held_out = load_pack(data.store, data.validation, data.stop_ids)
    teachers = held_out.argmax[held_out.counts]
    inside = int((teachers != lost).sum())
    assert 0 < inside < len(teachers)
    assert trainer.validate().accuracy[0] == pytest.approx(inside / len(teachers))


def test_validation_is_pooled_and_does_not_depend_on_the_packs(data: Data, tmp_path: Path) -> None:
    narrow, wide = (
        toys.cycle_trainer(tmp_path / str(size), data, toys.cycle_config(pack_tokens=size))
        for size in (2, 500)
    )
    one, other = narrow.validate(), wide.validate()
    assert one.acceptance == other.acceptance
    assert one.accuracy == other.accuracy
    assert one.loss == pytest.approx(other.loss, rel=1e-5)


def test_accumulated_packs_make_the_step_of_one_big_pack(data: Data, tmp_path: Path) -> None:
    whole = toys.cycle_trainer(tmp_path / "one", data, toys.cycle_config(epochs=1, pack_tokens=500))
    parts = toys.cycle_trainer(
        tmp_path / "four", data, toys.cycle_config(epochs=1, pack_tokens=30, accumulate=500)
    )
    for trainer in (whole, parts):
        trainer.run(Progress())
    [one], [four] = rows(whole), rows(parts)
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert four["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-5)


def test_a_step_keeps_nothing_of_the_gradient_before(data: Data, tmp_path: Path) -> None:
    """With weights that hardly move, the same pack gives the same gradient in every epoch."""
    config = toys.cycle_config(epochs=3, pack_tokens=500, learning_rate=1e-12)
    trainer = toys.cycle_trainer(tmp_path, data, config)
    trainer.run(Progress())
    first, *others = (row["gradient_norm"] for row in rows(trainer))
    assert others == pytest.approx([first] * 2, rel=1e-5)


def test_a_step_takes_so_many_packs_and_an_epoch_ends_with_what_is_left(data: Data) -> None:
    """With one sample to a pack: five steps of two and one of one for eleven samples."""
    samples = data.training[:11]
    steps = plan_steps(samples, toys.cycle_config(epochs=2, pack_tokens=2, accumulate=2))
    assert [len(step) for step in steps] == [2, 2, 2, 2, 2, 1] * 2
    for epoch in (steps[:6], steps[6:]):
        seen = [entry.sample_id for step in epoch for pack in step for entry in pack]
        assert sorted(seen) == sorted(entry.sample_id for entry in samples)


def test_the_learning_rate_warms_up_and_falls_as_a_cosine_to_its_end(
    data: Data, tmp_path: Path
) -> None:
    config = toys.cycle_config(learning_rate=0.5, warmup_share=0.1, final_rate=0.02)
    rates = [learning_rate(config, step, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert max(rates) == rates[9] == 0.5
    assert rates == [*sorted(rates[:10]), *sorted(rates[10:], reverse=True)]
    assert rates[54] == pytest.approx(0.5 * (0.02 + 0.98 / 2))  # half of the way down
    assert rates[-1] == pytest.approx(0.01)


@pytest.mark.parametrize(("share", "steps"), [(0.0, 1), (0.0, 3), (0.5, 1), (0.99, 2), (0.05, 5)])
def test_the_learning_rate_of_short_runs_stays_in_bounds(share: float, steps: int) -> None:
    config = toys.cycle_config(warmup_share=share)
    for step in range(1, steps + 1):
        assert 0 < learning_rate(config, step, steps) <= config.learning_rate


def test_the_optimizer_uses_the_schedule_and_decays_matrices_only(
    data: Data, tmp_path: Path
) -> None:
    config = toys.cycle_config(epochs=1, weight_decay=0.1)
    trainer = toys.cycle_trainer(tmp_path, data, config)
    trainer.run(Progress())
    used = [row["learning_rate"] for row in rows(trainer)]
    assert used == [learning_rate(config, step, len(used)) for step in range(1, len(used) + 1)]
    (adamw,) = trainer.optimizers
    matrices, vectors = adamw.param_groups
    assert [group["lr"] for group in adamw.param_groups] == [used[-1]] * 2
    assert {parameter.dim() for parameter in matrices["params"]} == {2}
    assert {parameter.dim() for parameter in vectors["params"]} == {1}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert held_by(trainer) == {id(parameter) for parameter in trainer.drafter.parameters()}


def test_muon_takes_the_layers_matrices_and_leaves_head_and_norms_to_adamw(
    data: Data, tmp_path: Path
) -> None:
    trainer = toys.cycle_trainer(tmp_path, data, toys.cycle_config(optimizer="muon"))
    muon, adamw = trainer.optimizers
    (body,) = muon.param_groups
    head = trainer.drafter.lm_head.weight
    assert {parameter.dim() for parameter in body["params"]} == {2}
    assert head in set(adamw.param_groups[0]["params"])
    assert head not in set(body["params"])
    assert held_by(trainer) == {id(parameter) for parameter in trainer.drafter.parameters()}


def held_by(trainer: Trainer) -> set[int]:
    return {
        id(parameter)
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def spoil_weights(trainer: Trainer) -> None:
    trainer.drafter.lm_head.weight.data[0, 0] = torch.nan


def spoil_gradients(trainer: Trainer) -> None:
    """The loss is a number still, its gradient is none."""
    trainer.drafter.fc.weight.register_hook(lambda gradient: gradient * torch.inf)


@pytest.mark.parametrize("spoil", [spoil_weights, spoil_gradients])
def test_training_ends_at_the_step_that_is_no_number(
    spoil: Callable[[Trainer], None], data: Data, tmp_path: Path
) -> None:
    config = toys.cycle_config(checkpoint_every=1)
    trainer = toys.cycle_trainer(tmp_path, data, config)
    with pytest.raises(DraftworksError, match="training step 4: "):
        trainer.run(After(3, lambda: spoil(trainer)))
    assert trainer.checkpoints.steps() == [2, 3]
    kept = load_file(trainer.checkpoints.root / "step-00000003" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in kept.values())
    assert [row["step"] for row in rows(trainer)] == [1, 2, 3]


def test_a_bad_sample_ends_training_and_is_named(tmp_path: Path) -> None:
    data = toys.cycle_data(tmp_path / "states")
    config = toys.cycle_config(epochs=1)
    [bad, *_] = plan_steps(data.training, config)[-1][0]
    data.store.path(bad.sample_id).unlink()
    trainer = toys.cycle_trainer(tmp_path / "run", data, config)
    with pytest.raises(DraftworksError, match=f"sample {bad.sample_id}"):
        trainer.run(Progress())


def test_metrics_hold_validations_at_their_steps(data: Data, tmp_path: Path) -> None:
    trainer = toys.cycle_trainer(tmp_path, data, toys.cycle_config(epochs=2, validate_every=5))
    trainer.run(Progress())
    last = rows(trainer)[-1]["step"]
    validations = rows(trainer, "validation")
    assert [row["step"] for row in validations] == [*range(5, last, 5), last]
    record = validations[-1]["validation"]
    assert len(record["accuracy_per_position"]) == len(record["acceptance_rates"]) == 3
