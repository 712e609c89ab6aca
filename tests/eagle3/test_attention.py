"""Attention over packed documents: two ways against the plain one, and what long documents cost."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from draftworks.eagle3.attention import (
    FlexAttend,
    PackedAttend,
    Span,
    add_keys,
    document_mask,
    packed_attend,
    query_rows,
    whole,
)

HEADS, KV_HEADS, HEAD_DIM, STEPS = 4, 2, 16, 3
PACKS = {
    "whole_documents": whole([5, 1, 7]),
    "prompts_without_queries": [Span(0, 3, 9), Span(9, 9, 12)],
    "rows_behind_and_documents_left_out": [Span(2, 4, 6), Span(13, 17, 18)],
}


def plain(spans: Sequence[Span], steps: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """One dense score matrix per step over context and own keys, masked."""
    documents = [(span, row) for span in spans for row in range(span.first, span.stop)]
    _, context, values = steps[0]
    rows = torch.arange(context.shape[1])
    hidden = torch.stack([(rows < span.start) | (rows > row) for span, row in documents])
    groups = HEADS // KV_HEADS
    outputs = []
    for number, (query, *_) in enumerate(steps):
        keys, mixed = [context], [values]
        masks = [hidden]
        for _, key, value in steps[1 : number + 1]:
            keys.append(key)
            mixed.append(value)
            masks.append(~torch.eye(len(documents), dtype=torch.bool))
        scores = query @ torch.cat(keys, 1).repeat_interleave(groups, 0).mT * HEAD_DIM**-0.5
        weights = scores.masked_fill(torch.cat(masks, 1), -torch.inf).softmax(-1)
        outputs.append(weights @ torch.cat(mixed, 1).repeat_interleave(groups, 0))
    return outputs


def make(spans: Sequence[Span]) -> list[tuple[Tensor, ...]]:
    """Query, key and value of every step; at step 0 the whole pack has keys."""
    random = torch.Generator().manual_seed(0)
    queries, rows = len(query_rows(spans)), spans[-1].stop + 2
    sizes = [(queries, rows, rows), *[(queries,) * 3] * (STEPS - 1)]
    heads = HEADS, KV_HEADS, KV_HEADS
    return [
        tuple(
            torch.randn(n, size, HEAD_DIM, generator=random, dtype=torch.float64).requires_grad_()
            for n, size in zip(heads, step, strict=True)
        )
        for step in sizes
    ]


@pytest.mark.parametrize("spans", PACKS.values(), ids=PACKS.keys())
def test_outputs_and_gradients_equal_the_dense_computation(spans: list[Span]) -> None:
    steps = make(spans)
    leaves = [tensor for step in steps for tensor in step]
    attend = PackedAttend(spans)
    found, expected = [attend(*step) for step in steps], plain(spans, steps)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    seed = [torch.randn_like(output) for output in expected]
    gradients = torch.autograd.grad(found, leaves, seed)
    for got, want in zip(gradients, torch.autograd.grad(expected, leaves, seed), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("spans", PACKS.values(), ids=PACKS.keys())
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_same_outputs(spans: list[Span]) -> None:
    """Its backward pass exists on GPUs only."""
    steps = make(spans)
    attend = FlexAttend(spans, torch.device("cpu"), flex_attention)
    for step, want in zip(steps, plain(spans, steps), strict=True):
        found = attend(*(states.detach() for states in step))
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


def test_own_keys_are_differentiable_through_the_merge() -> None:
    """What flex attention leaves to autograd: output and lse of the context, and own keys."""
    random = torch.Generator().manual_seed(0)
    query, *own, context, values = (
        torch.randn(2, 5, 4, generator=random, dtype=torch.float64).requires_grad_()
        for _ in range(7)
    )

    def merged(*leaves: Tensor) -> Tensor:
        query, *own, context, values = leaves
        scores = query @ context.mT * 0.5
        return add_keys(scores.softmax(-1) @ values, scores.logsumexp(-1), query, own)[0]

    assert torch.autograd.gradcheck(merged, (query, *own, context, values))


@pytest.mark.parametrize("spans", PACKS.values(), ids=PACKS.keys())
def test_the_mask_function_of_flex_attention_is_the_dense_mask(spans: list[Span]) -> None:
    visible = document_mask(spans, torch.device("cpu"))
    queries, keys = torch.arange(len(query_rows(spans)))[:, None], torch.arange(20)[None]
    none = torch.tensor(0)
    seen = visible(none, none, queries, keys)
    expected = [
        [span.start <= key <= row for key in range(20)]
        for span in spans
        for row in range(span.first, span.stop)
    ]
    assert seen.tolist() == expected


def test_a_cpu_uses_the_kernels() -> None:
    assert isinstance(packed_attend(whole([3]), torch.device("cpu")), PackedAttend)


LONG = """
import resource, sys, torch
from draftworks.eagle3.attention import PackedAttend, whole
torch.set_num_threads(1)
size = int(sys.argv[1])
attend = PackedAttend(whole([size]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for step in range(3):
    states = [torch.randn(1, size, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    attend(*states).sum().backward(retain_graph=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_document_of_16k_tokens_needs_no_square_of_memory() -> None:
    """Its scores alone would be 512 MB per head in bfloat16."""
    run = subprocess.run(
        [sys.executable, "-c", LONG, "16384"], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 100_000, f"{int(run.stdout) / 1000:.0f} MB"
