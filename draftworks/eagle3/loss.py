"""The loss of training-time test, and the draft's guesses, without big logits.

Everything is aligned by the *teacher's* position t: at step k the row p = t-1-k predicts the
token after x_t, and all K rows of one t share one teacher distribution. So the teacher is
computed once per position, only where the loss counts and only over draft-vocabulary columns.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # teacher positions whose logits exist at one time


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
    """loss: weighted sum of the rows' cross-entropies; guesses: [K, M] the draft's greedy
    tokens as target ids (None unless asked for)."""

    loss: Tensor
    guesses: Tensor | None


def draft_loss(
    student: Tensor, head: Tensor, teacher: Teacher, weights: Tensor, *, guess: bool = False
) -> DraftLoss:
    """Cross-entropy of the draft against the teacher renormalised over the draft vocabulary.

    student: [K, M, H] normed outputs; head: [N, H]; weights: [K, M], zero where a row does not
    count. Returns sum(weights * CE) with gradients to `student` and `head`.
    """
    loss, guesses = _ChunkedCrossEntropy.apply(student, head, teacher, weights, guess)  # type: ignore[no-untyped-call]
    return DraftLoss(loss, guesses)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Linear and cross-entropy in one, the gradient made in the forward pass chunk by chunk:
    memory does not grow with rows times vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, head: Tensor, teacher: Teacher, weights: Tensor, guess: bool
    ) -> tuple[Tensor, Tensor | None]:
        steps, rows, _ = student.shape
        columns = head.to(student.dtype)
        wide = torch.promote_types(student.dtype, torch.float32)
        with_gradient = any(ctx.needs_input_grad[:2])
        grad_student = torch.zeros_like(student) if with_gradient else None
        grad_head = torch.zeros_like(head) if with_gradient else None
        guesses = student.new_empty(steps, rows, dtype=torch.long) if guess else None
        total = student.new_zeros((), dtype=wide)
        for start in range(0, rows, CHUNK):
            part = slice(start, start + CHUNK)
            target = (teacher.last[part] @ teacher.head.T).to(wide).softmax(-1)
            inputs = student[:, part].reshape(-1, student.shape[-1])
            logits = (inputs @ columns.T).to(wide).unflatten(0, (steps, -1))
            weight = weights[:, part]
            # A row of weight zero may hold anything, so it is left out rather than multiplied.
            absent = (weight == 0)[..., None]
            partition = logits.logsumexp(-1)
            expected = (logits * target).sum(-1)
            total += ((partition - expected) * weight).masked_fill(absent[..., 0], 0).sum()
            if guesses is not None:
                guesses[:, part] = teacher.used[logits.argmax(-1)]
            if grad_student is not None and grad_head is not None:
                slope = (logits - partition[..., None]).exp_().sub_(target).mul_(weight[..., None])
                slope = slope.masked_fill_(absent, 0).to(student.dtype).flatten(0, 1)
                grad_student[:, part] = (slope @ columns).unflatten(0, (steps, -1))
                grad_head += slope.T @ inputs.masked_fill(absent.flatten(0, 1), 0)
        ctx.save_for_backward(grad_student, grad_head)
        return total, guesses

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        grad_student, grad_head = ctx.saved_tensors
        return grad_student * gradients[0], grad_head * gradients[0], None, None, None
