"""The training step: documents apart against one packed mask, and the machine's bf16 peak.

The second way computes the same loss with attention over the whole pack under a dense mask, as
packed training is often written. Sizes are those of the demo; states are random.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import show
from draftworks.eagle3.drafter import Drafter, DrafterShape, PackedAttend
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.training import step as training_step
from draftworks.training.packing import Pack
from draftworks.training.step import learned_rows, pack_loss

HIDDEN, TARGET_VOCABULARY, STEPS = 576, 49_152, 3


class DenseAttend(PackedAttend):
    """Every query scores every key of the pack; a mask removes other documents and the future."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__([sum(lengths)])
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        rows = torch.arange(sum(lengths))
        self.hidden = (owner[:, None] != owner) | (rows[:, None] < rows)
        self.keys: tuple[Tensor, Tensor] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = len(query) // len(key)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        if self.keys is None:
            self.keys = (key, value)
        else:
            self.own_keys.append(key)
            self.own_values.append(value)
        context, values = self.keys
        scale = query.shape[-1] ** -0.5
        scores = (query @ context.transpose(1, 2) * scale).masked_fill(self.hidden, -torch.inf)
        own = [(query * other).sum(-1, keepdim=True) * scale for other in self.own_keys]
        weights = torch.cat([scores, *own], -1).float().softmax(-1).to(value.dtype)
        out = weights[..., : len(self.hidden)] @ values
        for index, other in enumerate(self.own_values):
            out = out + weights[..., len(self.hidden) + index, None] * other
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=int, default=2048, help="tokens per pack")
    parser.add_argument("--document", type=int, default=160, help="tokens per document")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    vocabulary = DraftVocabulary(torch.arange(options.vocabulary), TARGET_VOCABULARY)
    drafter, head = build(options.vocabulary)
    pack = random_pack(options.pack, options.document, options.vocabulary)

    def step() -> None:
        normaliser = learned_rows([pack], STEPS, vocabulary)
        with torch.autocast("cpu", torch.bfloat16):
            outcome = pack_loss(drafter, head, vocabulary, pack, normaliser, 0.8)
        outcome.loss.backward()
        drafter.zero_grad()

    times: dict[type[PackedAttend], list[float]] = {PackedAttend: [], DenseAttend: []}
    for _ in range(options.rounds + 1):
        for attend, taken in times.items():
            training_step.PackedAttend = attend  # type: ignore[misc]
            taken.append(seconds(step))
    ours, dense = min(times[PackedAttend][1:]), min(times[DenseAttend][1:])
    rows = len(pack.tokens)
    show(
        f"Forward and backward, pack of {rows:,} tokens, K = {STEPS}, best of {options.rounds}",
        ["", "tokens/s", "ratio"],
        [
            ["documents apart", f"{rows / ours:,.0f}", f"{dense / ours:.2f}"],
            ["one packed mask", f"{rows / dense:,.0f}", "1.00"],
            ["bf16 matrix product, TFLOP/s", f"{peak():.2f}", ""],
        ],
    )


def build(vocabulary: int) -> tuple[Drafter, Tensor]:
    shape = DrafterShape(
        hidden_size=HIDDEN,
        intermediate_size=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        draft_vocab_size=vocabulary,
        target_vocab_size=TARGET_VOCABULARY,
        norm_eps=1e-5,
        max_position_embeddings=8192,
        rope={"rope_type": "default", "rope_theta": 100_000.0},
    )
    drafter = Drafter(shape, torch.randn(TARGET_VOCABULARY, HIDDEN).bfloat16())
    head = torch.randn(vocabulary, HIDDEN)
    drafter.initialize(head, torch.ones(HIDDEN), seed=0)
    return drafter, head.bfloat16()


def random_pack(tokens: int, document: int, vocabulary: int) -> Pack:
    lengths = (document,) * (tokens // document)
    rows = sum(lengths)
    offsets = torch.cat([torch.arange(length) for length in lengths])
    return Pack(
        lengths,
        torch.randint(TARGET_VOCABULARY, (rows,)),
        torch.randn(rows, 3 * HIDDEN).bfloat16(),
        torch.randn(rows, HIDDEN).bfloat16(),
        torch.randint(vocabulary, (rows,)),
        offsets,
        torch.arange(rows) - offsets + document - 1,
        offsets >= document // 3,
    )


def peak(size: int = 2048) -> float:
    """The best of ten square bf16 products, in TFLOP/s."""
    matrix = torch.randn(size, size).bfloat16()
    return 2 * size**3 / min(seconds(lambda: matrix @ matrix) for _ in range(10)) / 1e12


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
