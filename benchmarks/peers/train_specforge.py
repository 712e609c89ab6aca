"""SpecForge 0.2.0's EAGLE-3 model, training strategy and optimizer on the folder of a comparison.

Changed for a CPU without its data files: its loss is the same formula in plain torch, since the
package's is written in Triton; no FSDP wrapper; the target's head is put in place instead of
read, since the bundled target ties it to the embeddings. Its `compact_teacher` (no logits over
the whole vocabulary at once) is on, which is its faster way; samples are padded to a batch, and
each is masked one position earlier than the package does, so that the same rows count as ours.
"""

import sys
import types
from pathlib import Path
from typing import Any

import torch
from exchange import Exchange, process_started, set_rate
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

STARTED = process_started()


class PlainLoss:
    """The mean over all positions of the masked cross-entropy."""

    @staticmethod
    def apply(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        rows = -(target * torch.log_softmax(logits.float(), -1)).sum(-1, keepdim=True)
        return (rows * mask).mean()


def main() -> None:
    replaced: Any = types.ModuleType("specforge.core.loss")
    replaced.LogSoftmaxLoss = PlainLoss
    sys.modules["specforge.core.loss"] = replaced
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig

    exchange = Exchange(Path(sys.argv[1]))
    settings, target = exchange.settings, exchange.target()
    config = LlamaConfig(
        **settings["layer"], draft_vocab_size=settings["shape"]["draft_vocab_size"]
    )
    config.pretraining_tp = 1
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    ours = {
        name.replace("layer.", "midlayer.", 1) if name.startswith("layer.") else name: tensor
        for name, tensor in exchange.weights().items()
    }
    frozen = {
        "embed_tokens.weight": target["embeddings"],
        "t2d": target["t2d"],
        "d2t": target["d2t"],
    }
    missing, unknown = draft.load_state_dict(ours | frozen, strict=False)
    assert not missing, missing
    assert not unknown, unknown
    draft = draft.to(torch.bfloat16)
    draft.embed_tokens.weight.requires_grad_(False)
    head = TargetHead.__new__(TargetHead)
    torch.nn.Module.__init__(head)
    head.fc = torch.nn.Linear(*reversed(target["head"].shape), bias=False)
    head.fc.weight = torch.nn.Parameter(target["head"].bfloat16(), requires_grad=False)
    model = OnlineEagle3Model(draft, length=settings["draft_steps"], attention_backend="sdpa")
    strategy = Eagle3TrainStrategy(
        model, target_head=head, ploss_decay=settings["step_decay"], compact_teacher=True
    )
    optimizer = BF16Optimizer(
        draft,
        lr=1e-3,
        max_grad_norm=settings["clip_norm"],
        total_steps=settings["steps"],
    )

    def step(number: int) -> int:
        samples = exchange.samples(number)
        lengths = [len(sample["tokens"]) for sample in samples]

        def padded(key: str) -> Tensor:
            return pad_sequence([sample[key] for sample in samples], batch_first=True)

        counts = [
            torch.cat([sample["counts"][1:], torch.zeros(1, dtype=torch.bool)])
            for sample in samples
        ]
        tensors = {
            "input_ids": padded("tokens"),
            "attention_mask": pad_sequence(
                [torch.ones(n) for n in lengths], batch_first=True
            ).long(),
            "loss_mask": pad_sequence(counts, batch_first=True).long(),
            "hidden_state": padded("aux"),
            "target": padded("last"),
        }
        batch = TrainBatch(
            sample_ids=[str(i) for i in range(len(samples))],
            strategy="eagle3",
            tensors=tensors,
            metadata={"target_repr": "hidden_state"},
        )
        strategy.forward_loss(batch).loss.backward()
        set_rate(optimizer.optimizer, settings["rates"][number], settings["beta2"])
        optimizer.step()
        return sum(lengths)

    def weights() -> dict[str, Any]:
        masters = iter(optimizer.fp32_params)
        named = {name: next(masters) for name, w in draft.named_parameters() if w.requires_grad}
        return {name.replace("midlayer.", "layer."): tensor for name, tensor in named.items()}

    exchange.run("specforge", STARTED, step, weights)


main()
