"""The chunked losses equal the plain ones, and rows that do not count never matter."""

from typing import NamedTuple, get_args

import pytest
import torch
import toys
from torch import Tensor

from draftworks.config import Loss
from draftworks.eagle3 import loss as losses
from draftworks.eagle3.loss import Teacher, draft_loss

STEPS, QUERIES, ROWS, HIDDEN, DRAFT = 3, 9, 7, 5, len(toys.USED)
PRECISION = {"rtol": 1e-12, "atol": 1e-12}
UNCOUNTED = 1, 4  # step and teacher position of a row of weight zero
LOSSES: tuple[Loss, ...] = get_args(Loss)


class Inputs(NamedTuple):
    """student [K, Q, H], rows [K, M], head [N, H], teacher, weights [K, M] with some zeros."""

    student: Tensor
    rows: Tensor
    head: Tensor
    teacher: Teacher
    weights: Tensor

    def picked(self) -> Tensor:
        """The student's row of each teacher position, [K, M, H]."""
        return self.student[torch.arange(STEPS)[:, None], self.rows]


def make(seed: int = 0) -> Inputs:
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    rows = torch.stack([torch.randperm(QUERIES, generator=random)[:ROWS] for _ in range(STEPS)])
    argmax = torch.randint(toys.TARGET_VOCAB, (ROWS,), generator=random)
    teacher = Teacher(normal(ROWS, HIDDEN), normal(DRAFT, HIDDEN), argmax, torch.tensor(toys.USED))
    weights = torch.rand(STEPS, ROWS, generator=random, dtype=torch.float64)
    weights[0, 2] = weights[2, 6] = weights[*UNCOUNTED] = 0
    student, head = normal(STEPS, QUERIES, HIDDEN), normal(DRAFT, HIDDEN)
    return Inputs(student.requires_grad_(), rows, head.requires_grad_(), teacher, weights)


def plain(inputs: Inputs, loss: Loss = "cross_entropy") -> Tensor:
    """By the definitions, with torch's own gradients."""
    p = torch.softmax(inputs.teacher.last @ inputs.teacher.head.T, -1)
    log_q = torch.log_softmax(inputs.picked() @ inputs.head.T, -1)
    entropy = -(p * log_q).sum(-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    share = torch.exp(-3 * alpha).detach()
    row = {
        "cross_entropy": entropy,
        "total_variation": 1 - alpha,
        "acceptance": -alpha.log(),
        "hybrid": share * (entropy + (p * p.log()).sum(-1)) + (1 - share) * (1 - alpha),
    }[loss]
    return (inputs.weights * row).sum()


def assert_same(found: Tensor, expected: Tensor, of: Inputs, like: Inputs | None = None) -> None:
    """Losses and their gradients to student and head are equal."""
    torch.testing.assert_close(found, expected, **PRECISION)
    like = like or of
    gradients = torch.autograd.grad(3 * found, [of.student, of.head])
    wanted = torch.autograd.grad(3 * expected, [like.student, like.head])
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want, **PRECISION)


@pytest.fixture(params=[1, 2, 3, 7, 256])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Teacher positions whose logits exist at one time."""
    monkeypatch.setitem(losses.LOGITS, "cpu", request.param * STEPS * DRAFT)
    return request.param


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("chunk")
def test_loss_and_gradients_equal_the_plain_computation(loss: Loss) -> None:
    inputs = make()
    assert_same(draft_loss(*inputs, loss).loss, plain(inputs, loss), inputs)


@pytest.mark.usefixtures("chunk")
def test_guesses_are_target_ids_of_the_largest_logit() -> None:
    inputs = make()
    with torch.no_grad():
        guesses = draft_loss(*inputs, guess=True).guesses
        largest = (inputs.picked() @ inputs.head.T).argmax(-1)
    assert guesses is not None
    counted = inputs.weights != 0
    assert guesses[counted].equal(torch.tensor(toys.USED)[largest][counted])
    assert draft_loss(*inputs).guesses is None


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_a_student_row_of_weight_zero_may_hold_anything(value: float, loss: Loss) -> None:
    inputs = make()
    step = UNCOUNTED[0]
    poisoned = inputs.student.detach().clone()
    poisoned[step, inputs.rows[UNCOUNTED]] = value
    other = inputs._replace(student=poisoned.requires_grad_())
    assert_same(draft_loss(*other, loss).loss, plain(inputs, loss), other, inputs)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_teacher_position_that_no_step_counts_may_hold_anything(loss: Loss) -> None:
    inputs = make()
    inputs.weights[:, 4] = 0
    expected = plain(inputs, loss)
    inputs.teacher.last[4] = float("nan")
    assert_same(draft_loss(*inputs, loss).loss, expected, inputs)


def test_a_teacher_that_is_sure_of_its_token_has_a_finite_hybrid_loss() -> None:
    """p log p is 0 where p is."""
    inputs = make()
    inputs.teacher.last.mul_(1e5)
    found = draft_loss(*inputs, "hybrid").loss
    assert found.isfinite()
    assert torch.autograd.grad(found, inputs.student)[0].isfinite().all()


@pytest.mark.parametrize("loss", ["total_variation", "acceptance", "hybrid"])
def test_a_draft_that_equals_its_teacher_has_loss_zero(loss: Loss) -> None:
    inputs = make()
    student = inputs.student.detach().clone()
    for step in range(STEPS):
        student[step, inputs.rows[step]] = inputs.teacher.last
    same = inputs._replace(student=student, head=inputs.teacher.head)
    assert draft_loss(*same, loss).loss.abs() < 1e-12


def test_large_logits_do_not_overflow() -> None:
    inputs = make()
    large = inputs._replace(student=inputs.student * 1e4)
    torch.testing.assert_close(draft_loss(*large).loss, plain(large), rtol=1e-9, atol=0)


def test_a_frozen_head_gets_no_gradient() -> None:
    inputs = make()
    inputs.head.requires_grad_(False)
    draft_loss(*inputs).loss.backward()
    assert inputs.head.grad is None
    expected = torch.autograd.grad(plain(inputs), inputs.student)[0]
    assert inputs.student.grad is not None
    torch.testing.assert_close(inputs.student.grad, expected, **PRECISION)


def test_no_teacher_position_gives_loss_and_gradient_zero() -> None:
    inputs = make()
    last, head, argmax, used = vars(inputs.teacher).values()
    empty = inputs._replace(
        rows=inputs.rows[:, :0],
        teacher=Teacher(last[:0], head, argmax[:0], used),
        weights=inputs.weights[:, :0],
    )
    found = draft_loss(*empty, guess=True)
    found.loss.backward()
    assert found.loss.item() == 0
    assert found.guesses is not None
    assert found.guesses.shape == (STEPS, 0)
    assert inputs.head.grad is not None
    assert inputs.head.grad.eq(0).all()
