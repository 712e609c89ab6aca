"""The chunked cross-entropy equals the plain one, and rows that do not count never matter."""

import pytest
import torch
import toys
from torch import Tensor

from draftworks.eagle3 import loss
from draftworks.eagle3.loss import Teacher, draft_loss

STEPS, ROWS, HIDDEN, DRAFT = 3, 7, 5, len(toys.USED)
PRECISION = {"rtol": 1e-12, "atol": 1e-12}
UNCOUNTED = 1, 4  # step and teacher position of a row of weight zero


def make(seed: int = 0) -> tuple[Tensor, Tensor, Teacher, Tensor]:
    """student [K, M, H], head [N, H], teacher, weights [K, M] with zeros among them."""
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    student = normal(STEPS, ROWS, HIDDEN).requires_grad_()
    head = normal(DRAFT, HIDDEN).requires_grad_()
    argmax = torch.randint(toys.TARGET_VOCAB, (ROWS,), generator=random)
    teacher = Teacher(normal(ROWS, HIDDEN), normal(DRAFT, HIDDEN), argmax, torch.tensor(toys.USED))
    weights = torch.rand(STEPS, ROWS, generator=random, dtype=torch.float64)
    weights[0, 2] = weights[2, 6] = weights[*UNCOUNTED] = 0
    return student, head, teacher, weights


def plain(student: Tensor, head: Tensor, teacher: Teacher, weights: Tensor) -> Tensor:
    target = torch.softmax(teacher.last @ teacher.head.T, -1)
    logits = student @ head.T
    return -(weights * (target * torch.log_softmax(logits, -1)).sum(-1)).sum()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 256])
def test_loss_and_gradients_equal_the_plain_computation(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK", chunk)
    student, head, teacher, weights = make()
    found = draft_loss(student, head, teacher, weights).loss
    expected = plain(student, head, teacher, weights)
    torch.testing.assert_close(found, expected, **PRECISION)
    gradients = torch.autograd.grad(3 * found, [student, head])
    for got, want in zip(
        gradients, torch.autograd.grad(3 * expected, [student, head]), strict=True
    ):
        torch.testing.assert_close(got, want, **PRECISION)


@pytest.mark.parametrize("chunk", [2, 256])
def test_guesses_are_target_ids_of_the_largest_logit(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK", chunk)
    student, head, teacher, weights = make()
    with torch.no_grad():
        guesses = draft_loss(student, head, teacher, weights, guess=True).guesses
    assert guesses is not None
    assert guesses.tolist() == [
        [toys.USED[int((head @ student[k, m]).argmax())] for m in range(ROWS)] for k in range(STEPS)
    ]
    assert draft_loss(student, head, teacher, weights).guesses is None


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_a_student_row_of_weight_zero_may_hold_anything(value: float) -> None:
    student, head, teacher, weights = make()
    expected = torch.autograd.grad(plain(student, head, teacher, weights), [student, head])
    poisoned = student.detach().clone()
    poisoned[*UNCOUNTED] = value
    poisoned.requires_grad_()
    found = draft_loss(poisoned, head, teacher, weights).loss
    torch.testing.assert_close(found, plain(student, head, teacher, weights), **PRECISION)
    for got, want in zip(torch.autograd.grad(found, [poisoned, head]), expected, strict=True):
        torch.testing.assert_close(got, want, **PRECISION)


def test_a_teacher_position_that_no_step_counts_may_hold_anything() -> None:
    student, head, teacher, weights = make()
    weights[:, 4] = 0
    expected = torch.autograd.grad(plain(student, head, teacher, weights), [student, head])
    teacher.last[4] = float("nan")
    found = draft_loss(student, head, teacher, weights).loss
    for got, want in zip(torch.autograd.grad(found, [student, head]), expected, strict=True):
        torch.testing.assert_close(got, want, **PRECISION)


def test_large_logits_do_not_overflow() -> None:
    student, head, teacher, weights = make()
    found = draft_loss(student * 1e4, head, teacher, weights).loss
    torch.testing.assert_close(
        found, plain(student * 1e4, head, teacher, weights), rtol=1e-9, atol=0
    )


def test_no_teacher_position_gives_loss_and_gradient_zero() -> None:
    student, head, teacher, weights = make()
    empty = Teacher(teacher.last[:0], teacher.head, teacher.argmax[:0], teacher.used)
    found = draft_loss(student[:, :0], head, empty, weights[:, :0], guess=True)
    found.loss.backward()
    assert found.loss.item() == 0
    assert found.guesses is not None
    assert found.guesses.shape == (STEPS, 0)
    assert head.grad is not None
    assert head.grad.eq(0).all()
