"""What a row sees in training-time test, over several documents packed end to end.

At every draft step a query sees the step-0 keys of its own row and of the rows before it in its
document (the context), and its own row's keys of the later steps. Only rows that some loss row
needs have a query. Work is the sum of the documents' squared lengths; memory only that of their
lengths, because scores exist nowhere but inside the fused kernels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from draftworks.eagle3.drafter import Attend

LONG = 384  # tokens from which on the kernels are faster in bfloat16 than in float32
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Span:
    """A document's rows in a pack: keys from `start`, queries from `first`, both before `stop`."""

    start: int
    first: int
    stop: int


def whole(lengths: Sequence[int]) -> list[Span]:
    """Every row of every document has a query."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [Span(end - n, end - n, end) for end, n in zip(ends, lengths, strict=True)]


def query_rows(spans: Sequence[Span]) -> Tensor:
    """Positions in the pack of all queries, [Q]."""
    rows = [torch.arange(span.first, span.stop) for span in spans]
    return torch.cat([torch.empty(0, dtype=torch.long), *rows])


def packed_attend(spans: Sequence[Span], device: torch.device) -> Attend:
    """Attention for the draft steps of one pack, called once for each."""
    fused = device.type == "cpu" or not spans
    return PackedAttend(spans) if fused else FlexAttend(spans, device, _compiled_flex())


class PackedAttend:
    """Document by document on torch's fused CPU kernels."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.states: list[Tensor] = []  # key and value of the context, of step 1, of step 2, ...

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dtype = query.dtype
        longest = max((span.stop - span.start for span in self.spans), default=0)
        if longest < LONG and dtype == torch.bfloat16:
            query, key, value = query.float(), key.float(), value.float()
        self.states += [key, value]
        mixed: Tensor = _Attention.apply(self.spans, query, *self.states)  # type: ignore[no-untyped-call]
        return mixed.to(dtype)


class FlexAttend:
    """All documents in one call of flex attention, which skips the blocks that no query sees."""

    def __init__(
        self, spans: Sequence[Span], device: torch.device, flex: Callable[..., Any]
    ) -> None:
        self.flex = flex
        self.visible = document_mask(spans, device)
        self.mask: Any = None
        self.states: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.states += [key, value]
        context, values, *own = self.states
        if self.mask is None:
            sizes = (query.shape[1], context.shape[1])
            self.mask = create_block_mask(self.visible, None, None, *sizes, device=query.device)
        mixed, extra = self.flex(
            query[None],
            context[None],
            values[None],
            block_mask=self.mask,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        groups = len(query) // len(context)
        own = [states.repeat_interleave(groups, 0) for states in own]
        return add_keys(mixed[0], extra.lse[0], query, own)[0]


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def document_mask(spans: Sequence[Span], device: torch.device) -> Callable[..., Tensor]:
    """Flex attention's mask function: may this query see this row of the pack?"""
    starts = [torch.full((span.stop - span.first,), span.start) for span in spans]
    first, last = torch.cat(starts).to(device), query_rows(spans).to(device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= last[query])

    return visible


def add_keys(
    mixed: Tensor, lse: Tensor, query: Tensor, own: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Let a softmax also cover one more key per query and step.

    mixed [..., Q, d] and lse [..., Q], the log of the sum of exponentials, of the context; own:
    key, value, key, value, ... that broadcast to query [..., Q, d]. Returns both for all keys.
    """
    for key, value in zip(own[::2], own[1::2], strict=True):
        score = (query * key).sum(-1).to(lse.dtype) * query.shape[-1] ** -0.5
        mixed, lse = merge(mixed, lse, value, score)
    return mixed, lse


def merge(mixed: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over two sets of keys from those over each: mixed [..., Q, d], lse [..., Q]."""
    total = torch.logaddexp(lse, other_lse)
    share = (other_lse - total).exp()[..., None].to(mixed.dtype)
    return torch.lerp(mixed, other.expand_as(mixed), share), total


class _Attention(torch.autograd.Function):
    """The kernels give mixed values and lse of the context; a row's own keys are added to both.
    Backward, a kernel needs nothing of the other keys but what they did to output and lse: given
    those of all keys, its weights exp(score - lse) are the true ones."""

    @staticmethod
    def forward(
        ctx: Any, spans: Sequence[Span], query: Tensor, key: Tensor, value: Tensor, *own: Tensor
    ) -> Tensor:
        groups = len(query) // len(key)
        query = query.unflatten(0, (-1, groups))
        key, value, *others = (states[:, None] for states in (key, value, *own))
        mixed = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_empty(query.shape[:-1], dtype=wide)
        for rows, parts in _parts(spans):
            for number, (keys, causal) in enumerate(parts):
                out = FLASH(query[..., rows, :], *_shared(groups, keys, key, value), 0.0, causal)
                mixed[..., rows, :], lse[..., rows] = (
                    merge(mixed[..., rows, :], lse[..., rows], *out) if number else out
                )
        mixed, lse = add_keys(mixed, lse, query, others)
        ctx.spans = spans
        ctx.save_for_backward(query, key, value, mixed, lse, *others)
        return mixed.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, lse, *own = ctx.saved_tensors
        gradient = gradients[0].unflatten(0, query.shape[:2])
        to_query = torch.zeros_like(query)
        to_key, to_value = torch.zeros_like(key), torch.zeros_like(value)
        for rows, parts in _parts(ctx.spans):
            for keys, causal in parts:
                slopes = FLASH_BACKWARD(
                    gradient[..., rows, :],
                    query[..., rows, :],
                    *_shared(query.shape[1], keys, key, value),
                    mixed[..., rows, :],
                    lse[..., rows],
                    0.0,
                    causal,
                )
                to_query[..., rows, :] += slopes[0]
                to_key[..., keys, :] += slopes[1].sum(1, keepdim=True)
                to_value[..., keys, :] += slopes[2].sum(1, keepdim=True)
        to_own = []
        scale = query.shape[-1] ** -0.5
        common = (gradient * mixed).sum(-1)
        for own_key, own_value in zip(own[::2], own[1::2], strict=True):
            weight = ((query * own_key).sum(-1).to(lse.dtype) * scale - lse).exp().to(query.dtype)
            slope = (weight * ((gradient * own_value).sum(-1) - common) * scale)[..., None]
            to_query += slope * own_key
            to_own += [(slope * query).sum(1), (weight[..., None] * gradient).sum(1)]
        return None, to_query.flatten(0, 1), to_key.squeeze(1), to_value.squeeze(1), *to_own


def _parts(spans: Sequence[Span]) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Per document its queries, and the keys they see: all of those before the first query, and
    causally those of their own rows."""
    done = 0
    for span in spans:
        rows = slice(done, done + span.stop - span.first)
        done = rows.stop
        before = [(slice(span.start, span.first), False)] if span.first > span.start else []
        yield rows, [(slice(span.first, span.stop), True), *before]


def _shared(groups: int, rows: slice, *states: Tensor) -> list[Tensor]:
    """Rows of keys or values [kv_heads, 1, R, d], seen by each query head without a copy."""
    return [state[..., rows, :].expand(-1, groups, -1, -1) for state in states]
