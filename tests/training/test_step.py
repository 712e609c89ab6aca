"""The training step against the brute-force reference: losses, gradients, counts, acceptance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
import toys
from reference import eagle3 as truth
from torch import Tensor

from draftworks.config import Loss
from draftworks.eagle3.drafter import Drafter
from draftworks.training.packing import Pack, load_pack
from draftworks.training.step import Outcome, learned_rows, pack_loss, walk_pack

DECAY = 0.7
PRECISION = 1e-9


@dataclass(frozen=True)
class Case:
    """Documents as `toys.document` sketches them, and the number of draft steps."""

    sketches: tuple[str, ...]
    steps: int


CASES = {
    "one_document": Case(("..aaaa",), 3),
    "one_step": Case(("..aaaa", ".aa"), 1),
    "two_steps": Case(("..aaaa", ".aa"), 2),
    "several_documents": Case(("..aaaa", ".aaaaa", "...aa"), 4),
    "answer_from_the_first_token": Case(("aaaa", "aaa"), 3),
    "masks_with_gaps": Case((".aa..aa.a", "a..a.aa"), 3),
    "documents_shorter_than_the_steps": Case(("aa", "a", ".a", ".aaa"), 4),
    "masked_documents": Case(("....", "..aaa", "."), 3),
    "teachers_outside_the_vocabulary": Case(("..aoaoa", "ooa.o"), 3),
    "a_document_with_nothing_to_learn": Case(("..ooo", ".aaa"), 2),
    "stop_tokens_in_the_middle_and_at_the_end": Case(("..aasaas", ".as", "s.sa"), 3),
    "seven_steps": Case(("..aaaaaoas",), 7),
}
MIXED = Case(("..aaoas", ".", "a.aaa", "...", ".oaa"), 3)
SHAPES = {
    f"{kv_heads}_kv_heads{'_norm_before_residual' * normed}": toys.shape(
        kv_heads=kv_heads, norm_before_residual=normed
    )
    for kv_heads in (4, 2, 1)
    for normed in (False, True)
} | {
    "fc_norm": toys.shape(fc_norm=True),
    "norm_output": toys.shape(norm_output=True),
    "every_norm": toys.shape(norm_before_residual=True, fc_norm=True, norm_output=True),
}
LOSSES: tuple[Loss, ...] = get_args(Loss)


def brute_force(
    drafter: Drafter, documents: list[truth.Document], steps: int, loss: Loss
) -> tuple[truth.Result, dict[str, Tensor]]:
    """The reference's result and its gradient for every weight of the drafter."""
    shape = drafter.shape
    weights = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in drafter.named_parameters()
    }
    result = truth.reference(
        weights,
        drafter.embeddings,
        toys.TARGET_HEAD,
        documents,
        list(toys.USED),
        truth.Shape(
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.rope["rope_theta"],
            shape.norm_eps,
            shape.norm_before_residual,
            shape.fc_norm,
            shape.norm_output,
        ),
        steps,
        DECAY,
        {toys.STOP},
        loss,
    )
    result.loss.backward()
    return result, {name: weight.grad for name, weight in weights.items()}


def step(
    drafter: Drafter, packs: Sequence[Pack], steps: int, loss: Loss = "cross_entropy"
) -> tuple[list[Outcome], dict[str, Tensor]]:
    """An optimizer step's outcomes and gradients over packs, as the loop accumulates them."""
    normaliser = learned_rows(packs, steps, toys.VOCABULARY)
    outcomes = []
    for pack in packs:
        outcome = pack_loss(
            drafter,
            toys.TARGET_HEAD[list(toys.USED)],
            toys.VOCABULARY,
            pack,
            normaliser,
            DECAY,
            loss,
            guess=True,
        )
        outcome.loss.backward()
        outcomes.append(outcome)
    return outcomes, toys.gradients(drafter)


def by_teacher_position(result: truth.Result, pack: Pack, steps: int) -> tuple[Tensor, Tensor]:
    """The reference's outcome as `Outcome` holds it: correct and valid, [K, R]."""
    correct = torch.zeros(steps, len(pack.tokens), dtype=torch.bool)
    valid = torch.zeros_like(correct)
    start = 0
    for length, rows in zip(pack.lengths, result.outcome, strict=True):
        for p, row in enumerate(rows):
            for k, hit in enumerate(row):
                if hit is not None:
                    correct[k, start + p + 1 + k] = hit
                    valid[k, start + p + 1 + k] = True
        start += length
    return correct, valid


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            found[name],
            gradient,
            rtol=PRECISION,
            atol=PRECISION * scale,
            msg=lambda m, n=name: n + m,
        )


def assert_equals_brute_force(
    drafter: Drafter,
    documents: list[truth.Document],
    pack: Pack,
    steps: int,
    loss: Loss = "cross_entropy",
) -> None:
    expected, expected_gradients = brute_force(drafter, documents, steps, loss)
    [outcome], found_gradients = step(drafter, [pack], steps, loss)
    assert outcome.loss.item() == pytest.approx(expected.loss.item(), rel=PRECISION, abs=1e-12)
    assert_same_gradients(found_gradients, expected_gradients)
    correct, valid = by_teacher_position(expected, pack, steps)
    assert outcome.valid.equal(valid)
    assert outcome.correct is not None
    assert outcome.correct.equal(correct)
    assert outcome.valid.sum(1).tolist() == expected.valid_rows
    assert outcome.correct.sum(1).tolist() == expected.correct
    assert learned_rows([pack], steps, toys.VOCABULARY).tolist() == expected.loss_rows
    walked = walk_pack(outcome, pack.lengths, steps)
    walks = [truth.walk(rows, steps) for rows in expected.outcome]
    assert walked.drafts == sum(drafts for drafts, _ in walks)
    assert sum(walked.accepted) == sum(accepted for _, accepted in walks)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_loss_gradients_and_counts_equal_the_brute_force(case: Case) -> None:
    documents = toys.documents(*case.sketches)
    assert_equals_brute_force(toys.drafter(), documents, toys.pack(documents), case.steps)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_equals_the_brute_force(shape: truth.Shape) -> None:
    documents = toys.documents(*MIXED.sketches)
    assert_equals_brute_force(toys.drafter(shape), documents, toys.pack(documents), MIXED.steps)


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_and_number_of_steps_equals_the_brute_force(loss: Loss, steps: int) -> None:
    documents = toys.documents(*MIXED.sketches)
    drafter = toys.drafter(SHAPES["every_norm"] if steps % 2 else toys.SHAPE)
    assert_equals_brute_force(drafter, documents, toys.pack(documents), steps, loss)


def test_the_cases_hold_hits_misses_and_rows_that_do_not_count() -> None:
    """The comparisons above would mean little if nothing were ever accepted."""
    hits, misses, absent = 0, 0, 0
    for case in CASES.values():
        documents = toys.documents(*case.sketches)
        [outcome], _ = step(toys.drafter(), [toys.pack(documents)], case.steps)
        assert outcome.correct is not None
        hits += int(outcome.correct.sum())
        misses += int((outcome.valid & ~outcome.correct).sum())
        absent += int((~outcome.valid).sum())
    assert min(hits, misses, absent) > 10


def test_a_pack_read_from_the_store_equals_the_brute_force(tmp_path: Path) -> None:
    documents = toys.documents("..aaaas", ".oaa", "...", "aaoa")
    store, entries = toys.store(tmp_path, documents)
    pack = load_pack(store, entries, [toys.STOP])
    assert_equals_brute_force(toys.drafter(), documents, pack, 3)


def test_a_pack_without_stop_tokens_counts_the_whole_answer(tmp_path: Path) -> None:
    store, entries = toys.store(tmp_path, toys.documents("..as"))
    assert load_pack(store, entries, []).counts.tolist() == [False, False, True, True]
    assert load_pack(store, entries, [toys.STOP]).counts.tolist() == [False, False, True, False]


def test_documents_give_the_same_loss_in_any_order_of_the_pack() -> None:
    documents = toys.documents(*MIXED.sketches)
    drafter = toys.drafter()
    [forward], gradients = step(drafter, [toys.pack(documents)], MIXED.steps)
    [backward], others = step(drafter, [toys.pack(documents[::-1])], MIXED.steps)
    assert backward.loss.item() == pytest.approx(forward.loss.item(), rel=PRECISION)
    assert_same_gradients(others, gradients)


@pytest.mark.parametrize("parts", [[1, 1, 1, 1, 1], [2, 3], [4, 1]], ids=str)
def test_accumulated_packs_give_the_gradient_of_one_pack(parts: list[int]) -> None:
    """The normaliser counts rows over all packs: a mean of the packs' means is another loss."""
    documents = toys.documents(*MIXED.sketches)
    drafter = toys.drafter()
    [whole], gradients = step(drafter, [toys.pack(documents)], MIXED.steps)
    ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    packs = [toys.pack(documents[end - n : end]) for n, end in zip(parts, ends, strict=True)]
    outcomes, accumulated = step(drafter, packs, MIXED.steps)
    total = math.fsum(outcome.loss.item() for outcome in outcomes)
    assert total == pytest.approx(whole.loss.item(), rel=PRECISION)
    assert_same_gradients(accumulated, gradients)


@pytest.mark.parametrize(
    "sketches",
    [("....",), ("..ooo",), ("...s",), (".",), ("...", "oo", "s")],
    ids=["masked", "unutterable", "only_a_stop_token", "one_token", "several_documents"],
)
def test_a_pack_without_a_loss_row_touches_every_weight_with_gradient_zero(
    sketches: tuple[str, ...],
) -> None:
    pack = toys.pack(toys.documents(*sketches))
    [outcome], gradients = step(toys.drafter(), [pack], 3)
    assert outcome.loss.item() == 0.0
    for name, gradient in gradients.items():
        assert gradient.eq(0).all(), name


def test_bfloat16_computes_the_same_loss_within_its_precision() -> None:
    pack = toys.pack(toys.documents("..aaaaaaas", ".aaaaaoaaa"))
    [exact], gradients = step(toys.drafter(), [pack], 3)
    low = toys.drafter().float()
    low.embeddings = low.embeddings.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        [rounded], rounded_gradients = step(low, [pack], 3)
    assert rounded.loss.item() == pytest.approx(exact.loss.item(), rel=0.03)
    for name, gradient in gradients.items():
        similarity = torch.cosine_similarity(
            rounded_gradients[name].double().flatten(), gradient.flatten(), dim=0
        )
        assert similarity > 0.99, name


def test_a_compiled_drafter_computes_the_same() -> None:
    documents = toys.documents(*MIXED.sketches)
    drafter = toys.drafter()
    [plain], gradients = step(drafter, [toys.pack(documents)], MIXED.steps)
    drafter.compile_steps()
    [fused], others = step(drafter, [toys.pack(documents)], MIXED.steps)
    assert fused.loss.item() == pytest.approx(plain.loss.item(), rel=PRECISION)
    assert_same_gradients(others, gradients)
