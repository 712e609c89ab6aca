"""The losses of training-time test, and the draft's guesses, without big logits.

Everything is aligned by the *teacher's* position t: at step k the row p = t-1-k predicts the
token after x_t, and all K rows of one t share one teacher distribution. So the teacher is
computed once per position, only where the loss counts and only over draft-vocabulary columns.

p is the teacher's distribution renormalised over the draft vocabulary, q the draft's, alpha =
sum(min(p, q)) the share of drafts that sampled speculation keeps (arXiv 2602.23881).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from draftworks.config import Loss

# Numbers in the logits that exist at one time: enough to fill the processor, the same for every
# vocabulary.
LOGITS = {"cpu": 2**22, "cuda": 2**26}

# One chunk's draft log-probabilities and teacher probabilities, [K, m, N] and [m, N] -> the loss
# of each row [K, m] and its slope by the logits [K, m, N]. A rule may overwrite the former.
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def cross_entropy(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """-sum(p log q)."""
    return -(log_q * p).sum(-1), log_q.exp_().sub_(p)


def total_variation(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """1 - alpha: the share of drafts that is rejected."""
    alpha, slope = _overlap(log_q.exp_(), p)
    return 1 - alpha, -slope


def acceptance(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """-log(alpha): as total variation, with a gradient that does not vanish where alpha does."""
    alpha, slope = _overlap(log_q.exp_(), p)
    alpha = alpha.clamp_min(1e-5)
    return -alpha.log(), -slope / alpha[..., None]


def hybrid(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """lambda * KL(p, q) + (1 - lambda) * (1 - alpha), lambda = exp(-3 alpha) taken as constant:
    divergence while the draft is far off, acceptance itself when it is near."""
    q = log_q.exp()
    alpha, slope = _overlap(q, p)
    share = (-3 * alpha).exp()
    divergence = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    value = share * divergence + (1 - share) * (1 - alpha)
    return value, share[..., None] * (q - p) - (1 - share)[..., None] * slope


RULES: dict[Loss, Rule] = {
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "acceptance": acceptance,
    "hybrid": hybrid,
}


def _overlap(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """alpha, and its slope by the logits."""
    below = q * (q < p)
    return torch.minimum(p, q).sum(-1), below - q * below.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Teacher:
    """The target's side at M teacher positions.

    last: [M, H] normed; head: [N, H] its LM head's draft-vocabulary rows;
    argmax: [M] its greedy next token as a target id; used: [N] draft id -> target id.
    """

    last: Tensor
    head: Tensor
    argmax: Tensor
    used: Tensor


@dataclass(frozen=True)
class DraftLoss:
    """loss: weighted sum of the rows' losses; guesses: [K, M] the draft's greedy tokens as target
    ids, arbitrary where the weight is zero (None unless asked for)."""

    loss: Tensor
    guesses: Tensor | None


def draft_loss(
    student: Tensor,
    rows: Tensor,
    head: Tensor,
    teacher: Teacher,
    weights: Tensor,
    loss: Loss = "cross_entropy",
    *,
    guess: bool = False,
    compiled: bool = False,
) -> DraftLoss:
    """The draft's loss against its teacher, over the rows that count.

    student: [K, Q, H] what the head reads; rows: [K, M] which of the Q each teacher position has
    at each step; head: [N, H]; weights: [K, M], zero where a row does not count. Returns
    sum(weights * loss) with gradients to `student` and `head`.
    """
    total, guesses = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        student, rows, head, teacher, weights, loss, guess, compiled
    )
    return DraftLoss(total, guesses)


def _row_losses(rule: Rule, logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """A rule in p's precision, its slope in that of the logits."""
    value, slope = rule(logits.to(p.dtype).log_softmax(-1), p)
    return value, slope.to(logits.dtype)


@cache
def _compiled_row_losses() -> Callable[[Rule, Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(_row_losses, dynamic=True)


class _ChunkedLoss(torch.autograd.Function):
    """Linear and loss in one, the gradient made in the forward pass chunk by chunk: memory grows
    neither with rows times vocabulary nor with the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        rows: Tensor,
        head: Tensor,
        teacher: Teacher,
        weights: Tensor,
        loss: Loss,
        guess: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor | None]:
        steps, queries, size = student.shape
        rows_of = _compiled_row_losses() if compiled else _row_losses
        columns = head.to(student.dtype)
        wide = torch.promote_types(student.dtype, torch.float32)
        flat = student.reshape(-1, size)
        rows = rows + queries * torch.arange(steps, device=rows.device)[:, None]
        to_student = torch.zeros_like(flat) if ctx.needs_input_grad[0] else None
        to_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[2] else None
        guesses = torch.empty_like(rows) if guess else None
        total = student.new_zeros((), dtype=wide)
        chunk = max(1, LOGITS[student.device.type] // (steps * len(head)))
        for start in range(0, rows.shape[1], chunk):
            part = slice(start, start + chunk)
            picked, weight = rows[:, part].flatten(), weights[:, part].flatten().to(wide)
            # A row of weight zero may hold anything, so it is left out rather than multiplied.
            absent = (weight == 0)[:, None]
            unused = (weights[:, part] == 0).all(0)[:, None]
            inputs = flat[picked].masked_fill_(absent, 0)
            last = teacher.last[part].masked_fill(unused, 0)
            p = (last @ teacher.head.T).to(wide).softmax(-1)
            logits = inputs @ columns.T
            if guesses is not None:
                guesses[:, part] = teacher.used[logits.argmax(-1)].unflatten(0, (steps, -1))
            value, slope = rows_of(RULES[loss], logits.unflatten(0, (steps, -1)), p)
            total += (value.flatten() * weight).sum()
            slope = slope.flatten(0, 1)
            if to_student is not None:
                to_student.index_add_(0, picked, (slope @ columns).mul_(weight[:, None]))
            if to_head is not None:
                to_head += slope.T @ inputs.mul_(weight[:, None])
        ctx.save_for_backward(to_student, to_head)
        ctx.steps_and_rows = (steps, queries)
        return total, guesses

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        to_student, to_head = (
            None if slope is None else slope.mul_(gradients[0]) for slope in ctx.saved_tensors
        )
        if to_student is not None:
            to_student = to_student.unflatten(0, ctx.steps_and_rows)
        return to_student, None, to_head, None, None, None, None, None
