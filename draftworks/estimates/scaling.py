"""How training scales over the GPUs of one host: what a step computes, what it must exchange.

Every step has the same batch, whatever the number of GPUs N: each computes 1/N of it, and the
gradients travel by a ring, which moves 2 (N-1)/N of their bytes over every link (Patarasuk and
Yuan 2009). The exchange is taken as not hidden behind the backward pass: a drafter is one layer,
and most of its gradients are ready only at its end.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

WORTH = 1.4
"""Twice the GPUs must take at least this factor off the step: below it, most of what is added
waits for the exchange."""


@dataclass(frozen=True)
class Work:
    """What training has to do. trainable: weights; flops: of one token, forward and backward;
    batch: tokens of one optimizer step; tokens: of the whole run."""

    trainable: int
    flops: float
    batch: int
    tokens: int


@dataclass(frozen=True)
class Scaled:
    """Training on a number of GPUs. Seconds of one step: computing, and exchanging gradients."""

    gpus: int
    compute: float
    exchange: float
    steps: int

    @property
    def step(self) -> float:
        return self.compute + self.exchange

    @property
    def share(self) -> float:
        """Of the step that is exchange."""
        return self.exchange / self.step

    @property
    def hours(self) -> float:
        return self.step * self.steps / 3600

    def efficiency(self, alone: "Scaled") -> float:
        """Of N GPUs' work, how much is done; `alone` is one GPU."""
        return alone.step / (self.gpus * self.step)


def allreduce_seconds(size: float, gpus: int, bandwidth: float) -> float:
    """Seconds to sum `size` bytes over GPUs. bandwidth: bytes/s of a link, each way ("bus
    bandwidth" of nccl-tests)."""
    return 2 * (gpus - 1) / gpus * size / bandwidth if gpus > 1 else 0.0


def scale(work: Work, flops: float, bus: Mapping[int, float]) -> list[Scaled]:
    """Training on 1 GPU and on each number of `bus`.

    flops: FLOP/s that one GPU reaches in training. bus: GPUs -> bytes/s of a link while so many
    exchange. Gradients are float32.
    """
    steps = math.ceil(work.tokens / work.batch)
    alone = work.batch * work.flops / flops
    return [
        Scaled(
            gpus,
            alone / gpus,
            allreduce_seconds(4 * work.trainable, gpus, bus.get(gpus, math.inf)),
            steps,
        )
        for gpus in sorted({1, *bus})
    ]


def recommend(scaled: list[Scaled]) -> tuple[Scaled, str]:
    """The number of GPUs to take, and why, in one sentence."""
    chosen = scaled[0]
    for more in scaled[1:]:
        gain = chosen.step / more.step
        if gain < WORTH ** math.log2(more.gpus / chosen.gpus):
            return chosen, (
                f"{_gpus(chosen.gpus)}: on {more.gpus} a step takes "
                f"{more.step * 1000:,.0f} ms instead of {chosen.step * 1000:,.0f} ms, "
                f"{more.share:.0%} of it exchange of gradients, so {more.gpus - chosen.gpus} more "
                f"GPUs would make training only {gain:.2f} times faster."
            )
        chosen = more
    return (
        chosen,
        f"{_gpus(chosen.gpus)}: every doubling makes a step {WORTH} times faster or more.",
    )


def scaled_rate(rate: float, batch: int, other: int) -> float:
    """The learning rate that goes with another batch: with Adam it grows with the square root
    (Krizhevsky 2014; Malladi et al. 2022)."""
    return rate * math.sqrt(other / batch)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"
