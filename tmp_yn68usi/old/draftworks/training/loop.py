"""The training loop: packs in, drafter out, resumable at every checkpoint."""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftworks.config import TrainConfig
from draftworks.eagle3.acceptance import Acceptance
from draftworks.eagle3.drafter import Drafter
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.errors import DraftworksError
from draftworks.hidden_states.store import StateStore
from draftworks.progress import Progress
from draftworks.records.manifest import ManifestWriter, rewrite_manifest
from draftworks.records.samples import SampleEntry
from draftworks.training.checkpoints import Checkpoints
from draftworks.training.optimizer import learning_rate, optimizers, set_learning_rate
from draftworks.training.packing import Pack, epoch_packs, plan_packs, read_ahead
from draftworks.training.step import learned_rows, pack_loss, walk_pack


@dataclass(frozen=True)
class Data:
    """Where the samples are, which ones are trained on, and what ends an answer."""

    store: StateStore
    training: Sequence[SampleEntry]
    validation: Sequence[SampleEntry]
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Validation:
    """Over whole held-out conversations.

    loss: mean loss of a row, draft steps weighted as in training, so that it can be held
    against the training loss. accuracy: per step, a row whose teacher is outside the draft
    vocabulary counted as wrong. acceptance: by walking the recorded answers.
    """

    loss: float
    accuracy: list[float]
    acceptance: Acceptance


class Trainer:
    """One training run in `folder` (checkpoints and metrics.jsonl)."""

    def __init__(
        self,
        config: TrainConfig,
        drafter: Drafter,
        teacher_head: Tensor,
        vocabulary: DraftVocabulary,
        data: Data,
        folder: Path,
    ) -> None:
        self.config = config
        self.drafter = drafter
        self.drafter.lm_head.requires_grad_(config.train_head)
        if config.compile:
            self.drafter.compile_steps()
        self.teacher_head = teacher_head
        self.vocabulary = vocabulary
        self.data = data
        self.metrics_path = folder / "metrics.jsonl"
        self.checkpoints = Checkpoints(folder / "checkpoints", config.keep_checkpoints)
        self.optimizers = optimizers(drafter, config)

    def run(self, progress: Progress) -> Validation:
        """Train to the end, from the newest checkpoint if there is one.

        Raises StopRequested after a checkpoint when asked to end, and DraftworksError when the
        loss is no number.
        """
        plan = plan_steps(self.data.training, self.config)
        done = self.checkpoints.restore(self.drafter, self.optimizers)
        self._forget_after(done)
        progress.begin(len(plan), "steps", done)
        metrics = ManifestWriter(self.metrics_path)
        packs = read_ahead(
            self.data.store, itertools.chain.from_iterable(plan[done:]), self.data.stop_ids
        )
        validation = None
        for step in range(done + 1, len(plan) + 1):
            group = list(itertools.islice(packs, len(plan[step - 1])))
            metrics.append(self._step(step, len(plan), group))
            last = step == len(plan)
            if last or step % self.config.validate_every == 0:
                validation = self.validate()
                metrics.append({"step": step, "validation": _record(validation)})
            stopping = progress.stop_requested and not last
            if last or stopping or step % self.config.checkpoint_every == 0:
                self.checkpoints.save(step, self.drafter, self.optimizers)
            progress.advance()
            if stopping:
                progress.check_stop()
        metrics.close()
        return validation or self.validate()

    def validate(self) -> Validation:
        """Loss, accuracy and estimated acceptance over the held-out conversations."""
        steps = self.config.ttt_steps
        plan = plan_packs(
            self.data.validation, self.config.pack_tokens, range(len(self.data.validation))
        )
        correct, valid, learned = (torch.zeros(steps, dtype=torch.long) for _ in range(3))
        loss = 0.0
        acceptance = Acceptance(0, (0,) * steps)
        one = torch.ones(steps, dtype=torch.long)
        with torch.no_grad(), self._precision():
            for pack in read_ahead(self.data.store, plan, self.data.stop_ids):
                outcome = pack_loss(
                    self.drafter,
                    self.teacher_head,
                    self.vocabulary,
                    pack,
                    one,
                    self.config.step_decay,
                    self.config.loss,
                    guess=True,
                )
                assert outcome.correct is not None
                loss += float(outcome.loss)
                learned += learned_rows([pack], steps, self.vocabulary)
                correct += outcome.correct.sum(1)
                valid += outcome.valid.sum(1)
                acceptance += walk_pack(outcome, pack.lengths, steps)
        accuracy = (correct / valid.clamp_min(1)).tolist()
        rows = float((learned * self._step_weights()).sum())
        return Validation(loss / max(1.0, rows), accuracy, acceptance)

    def _step(self, step: int, steps: int, packs: Sequence[Pack]) -> dict[str, Any]:
        """One optimizer step over its packs. Returns its metrics row."""
        started = time.perf_counter()
        rate = learning_rate(self.config, step, steps)
        set_learning_rate(self.optimizers, rate)
        normaliser = learned_rows(packs, self.config.ttt_steps, self.vocabulary)
        total = 0.0
        for pack in packs:
            with self._precision():
                outcome = pack_loss(
                    self.drafter,
                    self.teacher_head,
                    self.vocabulary,
                    pack,
                    normaliser,
                    self.config.step_decay,
                    self.config.loss,
                )
            outcome.loss.backward()
            total += float(outcome.loss.detach())
        norm = float(
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.clip_norm)
        )
        # Before the weights take it in: a gradient can break while its loss is still a number.
        if not math.isfinite(total + norm):
            raise DraftworksError(
                f"training step {step}: the loss is {total}, the norm of its gradient {norm}. "
                "Lower train.learning_rate or train.clip_norm; the newest checkpoint is kept."
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - started
        return {
            "step": step,
            "loss": total / float(self._step_weights().sum()),
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens_per_second": sum(len(pack.tokens) for pack in packs) / seconds,
        }

    def _step_weights(self) -> Tensor:
        """The loss's weight of every draft step, [K]."""
        return self.config.step_decay ** torch.arange(self.config.ttt_steps)

    def _precision(self) -> torch.autocast:
        low = self.config.compute_dtype == "bfloat16"
        return torch.autocast(self.drafter.fc.weight.device.type, torch.bfloat16, enabled=low)

    def _forget_after(self, step: int) -> None:
        """Drop metrics of steps that a kill took back, so the curve has each step once."""
        rewrite_manifest(self.metrics_path, lambda row: row["step"] <= step)


def plan_steps(
    training: Sequence[SampleEntry], config: TrainConfig
) -> list[list[list[SampleEntry]]]:
    """The packs of every optimizer step of a run, from sample lengths alone."""
    steps = []
    for epoch in range(config.epochs):
        packs = epoch_packs(training, config.pack_tokens, config.seed, epoch)
        steps += [
            packs[start : start + config.accumulate]
            for start in range(0, len(packs), config.accumulate)
        ]
    return steps


def _record(validation: Validation) -> dict[str, Any]:
    return {
        "loss": validation.loss,
        "accuracy_per_position": validation.accuracy,
        "acceptance_length": validation.acceptance.length,
        "acceptance_rates": validation.acceptance.rates,
        "drafts": validation.acceptance.drafts,
    }
