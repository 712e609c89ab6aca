"""One training step: unroll the drafter over a pack, line its rows up with the teacher's."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftworks.config import Loss
from draftworks.eagle3.acceptance import Acceptance, walk
from draftworks.eagle3.attention import Span, packed_attend, query_rows, whole
from draftworks.eagle3.drafter import Drafter
from draftworks.eagle3.loss import Teacher, draft_loss
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.training.packing import Pack


@dataclass(frozen=True)
class Alignment:
    """The M teacher positions of a pack and which of the K steps reach them.

    rows: [M] positions in the pack; valid: [K, M] the step's row lies in the same sample;
    learned: [K, M] valid, and the teacher's choice is in the draft vocabulary. A row whose
    teacher the drafter cannot utter is left out of the loss and counts as wrong.
    """

    rows: Tensor
    valid: Tensor
    learned: Tensor


@dataclass(frozen=True)
class Outcome:
    """loss: the pack's share of the step's loss; correct, valid: [K, R] by teacher position."""

    loss: Tensor
    correct: Tensor | None
    valid: Tensor


def align(pack: Pack, steps: int, vocabulary: DraftVocabulary) -> Alignment:
    rows = pack.counts.nonzero().squeeze(1)
    first = torch.arange(1, steps + 1, device=rows.device)[:, None]
    valid = pack.offsets[rows] >= first
    return Alignment(rows, valid, valid & vocabulary.t2d[pack.argmax[rows]])


def learned_rows(packs: Sequence[Pack], steps: int, vocabulary: DraftVocabulary) -> Tensor:
    """Rows in the loss per step over all packs of an optimizer step, [K]: the normaliser."""
    return torch.stack([align(pack, steps, vocabulary).learned.sum(1) for pack in packs]).sum(0)


def needed(pack: Pack, steps: int) -> list[Span]:
    """Per document the rows that its teacher positions reach back to, from the first to the last.
    Those before are only seen, those behind not even that."""
    spans = []
    start = 0
    for length, counts in zip(pack.lengths, pack.counts.split(list(pack.lengths)), strict=True):
        if positions := counts[1:].nonzero().squeeze(1).tolist():
            first = max(0, positions[0] + 1 - steps)
            spans.append(Span(start, start + first, start + positions[-1] + 1))
        start += length
    return spans


def unroll(drafter: Drafter, pack: Pack, steps: int, spans: Sequence[Span] | None = None) -> Tensor:
    """Outputs [K, Q, H] of the training-time test for the rows with a query (all by default).

    Step k feeds each row its own output of step k-1 and the true token k+1 further on. Rows
    past their sample's end are computed on a repeated last token; nothing looks at them.
    """
    every = torch.arange(len(pack.tokens), device=pack.tokens.device)
    spans = whole(pack.lengths) if spans is None else spans
    rows = query_rows(spans).to(every.device)
    attend = packed_attend(spans, every.device)
    following = torch.minimum(every + 1, pack.ends)
    hidden = drafter.features(pack.aux.to(drafter.embeddings.dtype))
    hidden = drafter(pack.tokens[following], hidden, pack.offsets, attend, rows)
    outputs = [hidden]
    for step in range(1, steps):
        following = torch.minimum(rows + 1 + step, pack.ends[rows])
        hidden = drafter(pack.tokens[following], hidden, pack.offsets[rows] + step, attend)
        outputs.append(hidden)
    return torch.stack(outputs)


def pack_loss(
    drafter: Drafter,
    teacher_head: Tensor,
    vocabulary: DraftVocabulary,
    pack: Pack,
    normaliser: Tensor,
    step_decay: float,
    loss: Loss = "cross_entropy",
    *,
    guess: bool = False,
) -> Outcome:
    """The pack's part of sum_k decay^k * mean over rows of the loss.

    teacher_head: [N, H], the draft-vocabulary rows of the target's LM head. normaliser: [K] from
    `learned_rows` over *all* packs of the optimizer step, so that parts add up to the whole. A
    pack without a row still touches every parameter, with gradient zero.
    """
    steps = len(normaliser)
    alignment = align(pack, steps, vocabulary)
    spans = needed(pack, steps)
    student = drafter.normed(unroll(drafter, pack, steps, spans))
    device = student.device
    place = torch.zeros(len(pack.tokens), dtype=torch.long, device=device)
    place[query_rows(spans).to(device)] = torch.arange(student.shape[1], device=device)
    back = torch.arange(1, steps + 1, device=device)[:, None]
    weight = step_decay ** (back - 1).double() / normaliser.clamp_min(1)[:, None]
    teacher = Teacher(
        pack.last[alignment.rows].to(student.dtype),
        teacher_head.to(student.dtype),
        pack.argmax[alignment.rows],
        vocabulary.used,
    )
    result = draft_loss(
        student,
        place[(alignment.rows - back).clamp_min(0)],
        drafter.lm_head.weight,
        teacher,
        alignment.learned * weight,
        loss,
        guess=guess,
        compiled=drafter.compiled,
    )
    valid = torch.zeros(steps, len(pack.tokens), dtype=torch.bool, device=device)
    valid[:, alignment.rows] = alignment.valid
    correct = None
    if result.guesses is not None:
        correct = torch.zeros_like(valid)
        correct[:, alignment.rows] = (result.guesses == teacher.argmax) & alignment.learned
    return Outcome(result.loss, correct, valid)


def walk_pack(outcome: Outcome, lengths: Sequence[int], draft_tokens: int) -> Acceptance:
    """Estimated acceptance over the samples of a pack."""
    assert outcome.correct is not None
    total = Acceptance(0, (0,) * draft_tokens)
    samples = zip(
        outcome.correct.split(list(lengths), 1), outcome.valid.split(list(lengths), 1), strict=True
    )
    for correct, valid in samples:
        total += walk(correct, valid, draft_tokens)
    return total
