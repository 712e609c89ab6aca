"""What updates the weights, and how fast."""

import math

from torch.optim import AdamW, Muon, Optimizer

from draftworks.config import TrainConfig
from draftworks.eagle3.drafter import Drafter


def optimizers(drafter: Drafter, config: TrainConfig) -> list[Optimizer]:
    """The optimizers that together hold every trained weight once, in float32.

    adamw: all weights, decay on matrices only. muon: the layer's matrices by orthogonalised
    momentum, scaled to AdamW's step size so that one learning rate serves both; head and norms
    stay with AdamW (Muon is not meant for them).
    """
    named = {name: w for name, w in drafter.named_parameters() if w.requires_grad}
    vectors = [weight for weight in named.values() if weight.dim() != 2]
    head = [w for name, w in named.items() if name.startswith("lm_head")]
    body = [w for name, w in named.items() if w.dim() == 2 and not name.startswith("lm_head")]
    by_adamw = head if config.optimizer == "muon" else body + head
    adamw = AdamW(
        [
            {"params": by_adamw, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, config.beta2),
        fused=True,
    )
    if config.optimizer == "adamw":
        return [adamw]
    muon = Muon(
        body,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, adamw]


def set_learning_rate(optimizers: list[Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to `final_rate` of the peak. Steps count from 1."""
    warmup = round(config.warmup_share * steps)
    if step <= warmup:
        return config.learning_rate * step / warmup
    share = (step - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return config.learning_rate * (config.final_rate + (1 - config.final_rate) * cosine)
