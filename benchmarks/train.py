"""The training step, and what each way of saving work gives: one at a time is undone.

Sizes are those of the demo, states are random, a third of each document is prompt. All variants
take turns, so that a slow moment of the machine falls on all; the best time of each counts. A
variant computes the same loss and gradients (or the same and more) as the step itself.
"""

import argparse
import ctypes
import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import show
from draftworks.config import TrainConfig
from draftworks.eagle3 import attention
from draftworks.eagle3.attention import Span, query_rows, whole
from draftworks.eagle3.drafter import Attend, Drafter, DrafterShape
from draftworks.eagle3.loss import DraftLoss, Teacher, draft_loss
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.training import step as training_step
from draftworks.training.memory import MMAP_THRESHOLD, SETTINGS, TOP_PAD, TRIM_THRESHOLD
from draftworks.training.optimizer import optimizers
from draftworks.training.packing import Pack
from draftworks.training.step import learned_rows, pack_loss

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
TARGET_VOCABULARY, STEPS = 49_152, 3


def packed_mask(spans: Sequence[Span], device: torch.device) -> Attend:
    """Every query scores every key of the pack; a mask removes other documents and the future."""
    visible = attention.document_mask(spans, device)
    keys = torch.arange(spans[-1].stop)[None]
    hidden = ~visible(keys, keys, torch.arange(len(query_rows(spans)))[:, None], keys)
    states: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = len(query) // len(key)
        states.extend(item.repeat_interleave(groups, 0) for item in (key, value))
        context, values, *own = states
        scale = query.shape[-1] ** -0.5
        scores = (query @ context[:, : hidden.shape[1]].mT * scale).masked_fill(hidden, -torch.inf)
        later = [(query * other).sum(-1, keepdim=True) * scale for other in own[::2]]
        weights = torch.cat([scores, *later], -1).float().softmax(-1).to(value.dtype)
        shares, *rest = weights.split([hidden.shape[1], *[1] * len(later)], -1)
        mixed = shares @ values[:, : hidden.shape[1]]
        for share, other in zip(rest, own[1::2], strict=True):
            mixed = mixed + share * other
        return mixed

    return attend


def all_logits(
    student: Tensor,
    rows: Tensor,
    head: Tensor,
    teacher: Teacher,
    weights: Tensor,
    *_: Any,
    **__: Any,
) -> DraftLoss:
    """Logits, probabilities and their gradients of all rows at once, by autograd."""
    picked = student[torch.arange(len(student))[:, None], rows]
    target = torch.softmax((teacher.last @ teacher.head.T).float(), -1)
    row = -(torch.log_softmax((picked @ head.to(picked.dtype).T).float(), -1) * target).sum(-1)
    return DraftLoss((weights * row).sum(), None)


def step_by_step(
    student: Tensor,
    rows: Tensor,
    head: Tensor,
    teacher: Teacher,
    weights: Tensor,
    *_: Any,
    **__: Any,
) -> DraftLoss:
    """Head and teacher anew for each draft step."""
    parts = [
        draft_loss(student[k, None], rows[k, None], head, teacher, weights[k, None]).loss
        for k in range(len(student))
    ]
    return DraftLoss(torch.stack(parts).sum(), None)


def full_teacher(full: Tensor) -> Callable[..., DraftLoss]:
    """The target's logits over its whole vocabulary, as one needs whose samples hold no argmax."""

    def loss(
        student: Tensor, rows: Tensor, head: Tensor, teacher: Teacher, *rest: Any, **more: Any
    ):  # type: ignore[no-untyped-def]
        for part in teacher.last.split(256):
            (part @ full.T).argmax(-1)
        return draft_loss(student, rows, head, teacher, *rest, **more)

    return loss


@contextmanager
def giving_memory_back() -> Iterator[None]:
    """glibc's defaults."""
    option = ctypes.CDLL(None).mallopt
    for name, value in ((MMAP_THRESHOLD, 2**17), (TRIM_THRESHOLD, 2**17), (TOP_PAD, 2**17)):
        option(name, value)
    yield
    for name, value in SETTINGS:
        option(name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=int, default=2048, help="tokens per pack")
    parser.add_argument("--document", type=int, default=160, help="tokens per document")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="the step only, and its memory")
    options = parser.parse_args()
    vocabulary = DraftVocabulary(torch.arange(options.vocabulary), TARGET_VOCABULARY)
    drafter, head = build(options.vocabulary)
    compiled, _ = build(options.vocabulary)
    compiled.compile_steps()
    updates = {of: optimizers(of, TrainConfig(learning_rate=1e-6)) for of in (drafter, compiled)}
    pack = random_pack(options.pack, options.document, options.vocabulary)
    full = torch.randn(TARGET_VOCABULARY, HIDDEN).bfloat16()

    def replaced(name: str, by: Any) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: patch.object(training_step, name, by)

    def step(of: Drafter, low: bool = True) -> None:
        normaliser = learned_rows([pack], STEPS, vocabulary)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            outcome = pack_loss(of, head, vocabulary, pack, normaliser, 0.8)
        outcome.loss.backward()
        torch.nn.utils.clip_grad_norm_(of.parameters(), 1.0)
        for optimizer in updates[of]:
            optimizer.step()
            optimizer.zero_grad()

    def exact() -> None:
        drafter.embeddings = drafter.embeddings.float()
        step(drafter, low=False)
        drafter.embeddings = drafter.embeddings.bfloat16()

    ways: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], None]]] = {
        "the step": (nullcontext, lambda: step(drafter)),
        "attention under one packed mask": (
            replaced("packed_attend", packed_mask),
            lambda: step(drafter),
        ),
        "attention of short documents in bfloat16": (
            lambda: patch.object(attention, "LONG", 0),
            lambda: step(drafter),
        ),
        "every row, not those that loss rows need": (
            replaced("needed", lambda pack, _: whole(pack.lengths)),
            lambda: step(drafter),
        ),
        "teacher over the whole vocabulary": (
            replaced("draft_loss", full_teacher(full)),
            lambda: step(drafter),
        ),
        "head and teacher anew for each draft step": (
            replaced("draft_loss", step_by_step),
            lambda: step(drafter),
        ),
        "logits of all rows at once, by autograd": (
            replaced("draft_loss", all_logits),
            lambda: step(drafter),
        ),
        "freed memory given back to the kernel": (giving_memory_back, lambda: step(drafter)),
        "float32": (nullcontext, exact),
        "torch.compile, once compiled": (nullcontext, lambda: step(compiled)),
    }
    for name, value in SETTINGS:
        ctypes.CDLL(None).mallopt(name, value)
    if options.alone:
        ways = {"the step": ways["the step"]}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds + 2):
        for name, (undone, work) in ways.items():
            with undone():
                times[name].append(seconds(work))
            gc.collect()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    best = {name: min(taken[2:]) for name, taken in times.items()}
    ours, top = best["the step"], peak()
    share = operations(pack, options.vocabulary) / ours / 1e12 / top
    rows = len(pack.tokens)
    show(
        f"Optimizer step, pack of {rows:,} tokens, K = {STEPS}, best of {options.rounds}",
        ["", "ms", "tokens/s", "time"],
        [
            [name, f"{taken * 1000:,.0f}", f"{rows / taken:,.0f}", f"{taken / ours:.2f}"]
            for name, taken in best.items()
        ],
    )
    print(f"bf16 product {top:.2f} TFLOP/s; the step's own products at {share:.0%} of it")
    if options.alone:
        print(f"peak memory {memory:.2f} GB")


def operations(pack: Pack, vocabulary: int) -> float:
    """Floating-point operations of the products that the mathematics needs, attention left out:
    layer and head at the rows that count, twice more of both backward, the teacher forward only."""
    rows, queries = len(pack.tokens), len(query_rows(training_step.needed(pack, STEPS)))
    keys = 2 * KV_HEADS * HEAD_DIM * 2 * HIDDEN
    others = HEADS * HEAD_DIM * 3 * HIDDEN + 3 * HIDDEN * INTERMEDIATE
    layer = rows * keys + queries * ((STEPS - 1) * keys + STEPS * others)
    head = int(pack.counts.sum()) * vocabulary * HIDDEN
    return 2.0 * (2 * rows * 3 * HIDDEN**2 + 3 * (layer + STEPS * head) + head)


def build(vocabulary: int) -> tuple[Drafter, Tensor]:
    torch.manual_seed(0)
    shape = DrafterShape(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        draft_vocab_size=vocabulary,
        target_vocab_size=TARGET_VOCABULARY,
        norm_eps=1e-5,
        max_position_embeddings=8192,
        rope={"rope_type": "default", "rope_theta": 100_000.0},
    )
    drafter = Drafter(shape, torch.randn(TARGET_VOCABULARY, HIDDEN).bfloat16())
    # Logits as wide as a real model's: far wider ones end in denormal numbers, which are slow.
    head = 0.1 * torch.randn(vocabulary, HIDDEN)
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
