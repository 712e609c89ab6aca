"""Acceptance: how many draft tokens the target keeps. Counts are pooled, never ratios averaged."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """Pooled counts of speculation with K draft tokens.

    drafts: times the drafter was asked; accepted[k]: times at least k+1 tokens were kept.
    """

    drafts: int
    accepted: tuple[int, ...]

    @property
    def length(self) -> float:
        """Mean tokens per verification, the target's own token included (engines' definition)."""
        return 1.0 + (sum(self.accepted) / self.drafts if self.drafts else 0.0)

    @property
    def rates(self) -> list[float]:
        """Acceptance at each position, given that all before it were accepted."""
        asked = (self.drafts, *self.accepted[:-1])
        return [kept / n if n else 0.0 for kept, n in zip(self.accepted, asked, strict=True)]

    def __add__(self, other: "Acceptance") -> "Acceptance":
        accepted = zip(self.accepted, other.accepted, strict=True)
        return Acceptance(self.drafts + other.drafts, tuple(a + b for a, b in accepted))


def walk(correct: Tensor, valid: Tensor, draft_tokens: int) -> Acceptance:
    """Greedy speculation over one recorded answer, without running the target.

    correct, valid: [K, T] by teacher position t: whether the step-k guess for the token after
    x_t is the target's own, and whether that row exists and counts. Starting where the target
    has just written x_t, guesses count until the first miss; the next draft starts after them.
    This visits the positions that an engine visits, so its length is comparable to a measured
    one, which an average over all positions is not.
    """
    hits: Sequence[Sequence[bool]] = (correct & valid).tolist()
    counts: Sequence[Sequence[bool]] = valid.tolist()
    length = correct.shape[1]
    drafts = 0
    accepted = [0] * draft_tokens
    t = 0
    while t < length:
        if not counts[0][t]:
            t += 1
            continue
        drafts += 1
        kept = 0
        while kept < draft_tokens and t + kept < length and hits[kept][t + kept]:
            accepted[kept] += 1
            kept += 1
        t += kept + 1
    return Acceptance(drafts, tuple(accepted))
