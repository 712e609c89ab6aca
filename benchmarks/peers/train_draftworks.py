"""Draftworks' own step and optimizer on the folder of a comparison."""

import sys
from pathlib import Path
from typing import Any

import torch
from exchange import Exchange, process_started

STARTED = process_started()


def main() -> None:
    from draftworks.config import TrainConfig
    from draftworks.eagle3.drafter import Drafter, DrafterShape
    from draftworks.eagle3.vocabulary import DraftVocabulary
    from draftworks.training.memory import keep_freed_memory
    from draftworks.training.optimizer import optimizers, set_learning_rate
    from draftworks.training.packing import Pack
    from draftworks.training.step import learned_rows, pack_loss

    keep_freed_memory()
    exchange = Exchange(Path(sys.argv[1]))
    settings, target = exchange.settings, exchange.target()
    vocabulary = DraftVocabulary.from_offsets(target["d2t"], target["t2d"])
    drafter = Drafter(DrafterShape(**settings["shape"]), target["embeddings"].bfloat16())
    drafter.load_state_dict(exchange.weights())
    head = target["head"][vocabulary.used].bfloat16()
    config = TrainConfig(optimizer="adamw", beta2=settings["beta2"])
    updates = optimizers(drafter, config)

    def step(number: int) -> int:
        samples = exchange.samples(number)
        lengths = tuple(len(sample["tokens"]) for sample in samples)
        joined = {key: torch.cat([sample[key] for sample in samples]) for key in samples[0]}
        offsets = torch.cat([torch.arange(length) for length in lengths])
        sizes = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
        ends = torch.arange(len(offsets)) - offsets + sizes - 1
        pack = Pack(lengths=lengths, offsets=offsets, ends=ends, **joined)
        normaliser = learned_rows([pack], settings["draft_steps"], vocabulary)
        with torch.autocast("cpu", torch.bfloat16):
            outcome = pack_loss(drafter, head, vocabulary, pack, normaliser, settings["step_decay"])
        outcome.loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), settings["clip_norm"])
        set_learning_rate(updates, settings["rates"][number])
        for optimizer in updates:
            optimizer.step()
            optimizer.zero_grad()
        return sum(lengths)

    def weights() -> dict[str, Any]:
        return drafter.state_dict()

    exchange.run("draftworks", STARTED, step, weights)


main()
