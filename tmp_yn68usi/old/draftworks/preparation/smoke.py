"""The smoke run: a stage itself, on a few frozen samples, while the stage before it still runs.

It happens in a small workspace of its own, on the CPU and with the code of the real run: a stage
that works there has its arguments, libraries, shapes and formats right.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from draftworks.config import PipelineConfig
from draftworks.eagle3.formats import Format, write_checkpoint
from draftworks.errors import DraftworksError, StopRequested
from draftworks.progress import Progress
from draftworks.records.manifest import read_manifest
from draftworks.stages.base import Check, Stage, check
from draftworks.stages.evaluate import Evaluate
from draftworks.stages.extract import Extract
from draftworks.stages.frozen import freeze
from draftworks.stages.generate import Generate
from draftworks.stages.publish import Publish
from draftworks.stages.train import Train
from draftworks.stages.vocab import Vocab
from draftworks.training.loop import plan_steps
from draftworks.workspace import Workspace

SAMPLES = 8  # frozen; a quarter of them is held out
EPOCHS = 12
PACK_TOKENS = (
    8192  # so that short samples make one pack, and every epoch's loss is of the same rows
)
FALL = 1e-3  # share of the loss that training must at least take off; rounding is far below
LOGPROB_TOLERANCE = 0.05  # nats, mean over the tokens; bfloat16 states are within 0.01


def committed(stage: Stage) -> int:
    """How many samples there are now to try the stage on."""
    samples = stage.of(Generate).store.index()
    if not TRIALS[type(stage)].states:
        return len(samples)
    stored = stage.of(Extract).store.ids()
    return sum(entry.sample_id in stored for entry in samples)


def smoke(stage: Stage) -> Iterator[Check]:
    """Run the stage small. Yields what was found, check by check."""
    trial = TRIALS[type(stage)]
    home = stage.of(trial.home)
    root = stage.workspace.root / "smoke" / f"{home.name}-{home.identity}"
    small = type(stage)(small_config(stage.config, root), Workspace(root))
    if home is stage or not root.is_dir():
        frozen = check("frozen part", lambda: _freeze(stage, small, trial.states))
        yield frozen
        if not frozen.passed:
            return
    yield from trial.run(small)


def small_config(config: PipelineConfig, root: Path) -> PipelineConfig:
    """The same pipeline, so small that it ends in seconds on a CPU."""
    train = config.train.model_copy(
        update={
            "epochs": EPOCHS,
            "pack_tokens": PACK_TOKENS,
            "accumulate": 1,
            "warmup_share": 0.0,
            "validation_share": 0.25,
            "gpus": 0,
        }
    )
    evaluate = config.evaluate.model_copy(
        update={"prompts": 2, "max_new_tokens": 8, "batch": 2, "tolerance": 0.99}
    )
    return config.model_copy(
        update={
            "workspace": str(root),
            "allow_partial": "smoke",
            "train": train,
            "evaluate": evaluate,
        }
    )


def _freeze(stage: Stage, small: Stage, states: bool) -> str:
    freeze(stage, small.workspace.root, states=states, shortest=SAMPLES)
    entries = small.of(Generate).store.index()
    tokens = sum(entry.tokens for entry in entries)
    return f"{len(entries)} samples, {tokens:,} tokens, in {small.workspace.root}"


def _try_vocab(vocab: Stage) -> Iterator[Check]:
    yield check("counts tokens", lambda: _runs(vocab))


def _try_extract(extract: Stage) -> Iterator[Check]:
    yield (extracts := check("extracts", lambda: _runs(extract)))
    if extracts.passed:
        yield check("agrees with the engine", lambda: _agrees(cast("Extract", extract)))


def _try_train(train: Stage) -> Iterator[Check]:
    """Some steps, a stop with its checkpoint, the rest from there, the drafter out and in again."""
    train.of(Vocab).run(Progress())
    yield (trains := check("trains and resumes", lambda: _resumes(cast("Train", train))))
    if not trains.passed:
        return
    yield check("loss falls", lambda: _learns(cast("Train", train)))
    for form in train.config.publish.formats:
        yield check(f"exports as {form}", partial(_exports, train.of(Publish), form))
    shutil.rmtree(train.directory / "checkpoints", ignore_errors=True)


def _try_evaluate(evaluate: Stage) -> Iterator[Check]:
    for cls in (Vocab, Train):
        evaluate.of(cls).run(Progress())
    yield check("speculates", lambda: _runs(evaluate))


def _try_publish(publish: Stage) -> Iterator[Check]:
    for cls in (Vocab, Train, Evaluate):
        publish.of(cls).run(Progress())
    yield check("publishes", lambda: _runs(publish))


def _runs(stage: Stage) -> str:
    """Run it to its end and hold it to its own verification."""
    stage.run(Progress())
    verdict = stage.verify()
    if not verdict.complete:
        raise DraftworksError(verdict.sentence)
    return verdict.sentence


def _agrees(extract: Extract) -> str:
    """Log-probabilities of the samples' own tokens: by the engine, and from the stored states."""
    from draftworks.engines.reference import ReferenceEngine

    engine = ReferenceEngine(extract.target, extract.layers)
    difference, tokens = 0.0, 0
    for sample in extract.of(Generate).store.samples():
        states = extract.store.read(sample.id)
        following = torch.tensor(sample.token_ids[1:])[:, None]
        ours = (states.last[:-1] @ engine.head.T).float().log_softmax(-1).gather(1, following)
        theirs = engine.logprobs(sample.token_ids)[:, None]
        difference += float((ours - theirs).abs().sum())
        tokens += len(following)
    mean = difference / tokens
    if not mean <= LOGPROB_TOLERANCE:
        raise DraftworksError(
            f"log-probabilities from the stored states differ from the engine's by {mean:.3f} on "
            f"average over {tokens:,} tokens, at most {LOGPROB_TOLERANCE} is expected: another "
            "layer, or the final norm missing or applied twice"
        )
    return f"log-probabilities within {mean:.4f} on average over {tokens:,} tokens"


def _resumes(train: Train) -> str:
    steps = len(plan_steps(train.split()[0], train.config.train))
    half = max(1, steps // 2)
    with suppress(StopRequested):
        train.run(StopAfter(half))
    train.run(Progress())
    done = [row["step"] for row in _curve(train)]
    if done != list(range(1, steps + 1)):
        raise DraftworksError(f"the curve has the steps {done}, expected 1 to {steps}")
    return f"{steps} steps, stopped after {half} and resumed from the checkpoint"


def _learns(train: Train) -> str:
    losses = [row["loss"] for row in _curve(train)]
    epoch = len(losses) // EPOCHS
    first, last = (sum(part) / epoch for part in (losses[:epoch], losses[-epoch:]))
    if not last < first * (1 - FALL):
        raise DraftworksError(
            f"the loss went from {first:.3f} to {last:.3f} over {EPOCHS} passes over the same "
            "samples; check train.learning_rate and the warm start"
        )
    return f"{first:.3f} to {last:.3f} over {EPOCHS} passes over the same samples"


def _exports(publish: Publish, form: Format) -> str:
    drafter, vocabulary = publish.of(Train).drafter(), publish.of(Vocab).vocabulary()
    with TemporaryDirectory(dir=publish.workspace.root) as folder:
        write_checkpoint(Path(folder), form, drafter, vocabulary, publish.facts, {})
        publish.require_same_logits(Path(folder), drafter)
    return "reloaded with the same logits"


def _curve(train: Train) -> list[dict[str, Any]]:
    return [row for row in read_manifest(train.metrics_file) if "loss" in row]


class StopAfter(Progress):
    """Asks the work to end after a number of units."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def advance(self, units: int = 1) -> None:
        super().advance(units)
        self.stop_requested = self.done >= self.units


@dataclass(frozen=True)
class Trial:
    """How a stage is tried: on samples with or without their states, in the small workspace of
    `home`, which later stages share."""

    run: Callable[[Stage], Iterator[Check]]
    states: bool
    home: type[Stage]


TRIALS: dict[type[Stage], Trial] = {
    Vocab: Trial(_try_vocab, states=False, home=Vocab),
    Extract: Trial(_try_extract, states=False, home=Extract),
    Train: Trial(_try_train, states=True, home=Train),
    Evaluate: Trial(_try_evaluate, states=True, home=Train),
    Publish: Trial(_try_publish, states=True, home=Train),
}
