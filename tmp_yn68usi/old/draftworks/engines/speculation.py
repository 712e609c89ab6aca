"""Greedy chain speculation with a drafter, on the reference engine.

The target verifies every draft, so the output is plain greedy decoding's; what is measured is
how many draft tokens it keeps. A batch of prompts advances together, each row at its own length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftworks.eagle3.acceptance import Acceptance
from draftworks.eagle3.drafter import Drafter
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.engines.reference import PositionCache, ReferenceEngine


@dataclass(frozen=True)
class Speculation:
    """Answers [B] of token ids, as plain greedy decoding gives them, and the pooled counts."""

    answers: list[list[int]]
    acceptance: Acceptance


class DraftCache:
    """The drafter's key-value pairs for a batch; a row's slot is its position.

    Rows of drafting steps lie in the slots that true rows overwrite after verification, and a
    query sees the slots up to its own, which is the attention of training-time test.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self.cache = PositionCache(rows, slots)
        self.mask: Tensor = torch.empty(0)
        self.batch = (0, 0)

    def place(self, positions: Tensor) -> None:
        """Announce the [B, Q] positions of the next draft step."""
        self.mask = self.cache.place(positions)
        self.batch = (positions.shape[0], positions.shape[1])

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend for B*Q flat rows: query [heads, B*Q, d], key and value [kv_heads, B*Q, d]."""
        query, key, value = (self._rows(states) for states in (query, key, value))
        keys, values = self.cache.update(key, value, 0)
        mixed = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=self.mask, enable_gqa=True
        )
        return mixed.transpose(0, 1).flatten(1, 2)

    def _rows(self, states: Tensor) -> Tensor:
        """[heads, B*Q, d] -> [B, heads, Q, d]."""
        heads, _, width = states.shape
        return states.reshape(heads, *self.batch, width).transpose(0, 1)


@dataclass(frozen=True)
class _Round:
    """What the target has just confirmed, which the drafter has not seen.

    For each of B rows the `fresh` [B] first columns count: features [B, W, 3H] of the positions
    from `start` [B] on, and tokens [B, W], the token after each of them. The last fresh token is
    the newest of the answer; the target has not run on it yet.
    """

    tokens: Tensor
    features: Tensor
    start: Tensor
    fresh: Tensor

    def keep(self, rows: Tensor) -> "_Round":
        return _Round(self.tokens[rows], self.features[rows], self.start[rows], self.fresh[rows])

    def last(self, values: Tensor) -> Tensor:
        """The entry of each row's newest column, of values [B, W, ...]."""
        return values[torch.arange(len(self.fresh)), self.fresh - 1]


class Speculator:
    """A target and its drafter, ready to decode."""

    def __init__(
        self, engine: ReferenceEngine, drafter: Drafter, vocabulary: DraftVocabulary
    ) -> None:
        self.engine = engine
        self.drafter = drafter
        self.used = vocabulary.used

    @torch.inference_mode()
    def decode(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, draft_tokens: int
    ) -> Speculation:
        """Answer a batch of prompts greedily, `draft_tokens` guesses per verification.

        Guesses that stand behind the end of an answer do not count as accepted.
        """
        longest = max(len(prompt) for prompt in prompts)
        slots = longest + max_new_tokens + draft_tokens + 1
        cache = PositionCache(len(prompts), slots)
        drafts = DraftCache(len(prompts), slots)
        current = self._prefill(prompts, cache)
        answers = [[token] for token in current.last(current.tokens).tolist()]
        active = list(range(len(prompts)))
        total = Acceptance(0, (0,) * draft_tokens)
        while True:
            running = [
                index
                for index, row in enumerate(active)
                if self._open(answers[row], max_new_tokens)
            ]
            if not running:
                return Speculation(answers, total)
            if len(running) < len(active):
                rows = torch.tensor(running)
                active = [active[index] for index in running]
                current = current.keep(rows)
                cache.keep(rows)
                drafts.cache.keep(rows)
            guesses = self._draft(current, draft_tokens, drafts)
            current = self._verify(current, guesses, cache)
            for row, tokens, fresh in zip(
                active, current.tokens.tolist(), current.fresh.tolist(), strict=True
            ):
                written = self._extend(answers[row], tokens[:fresh], max_new_tokens)
                kept = min(fresh - 1, written)
                total += Acceptance(1, tuple(int(k < kept) for k in range(draft_tokens)))

    def _prefill(self, prompts: Sequence[Sequence[int]], cache: PositionCache) -> _Round:
        """Run the prompts; every position of theirs is fresh to the drafter."""
        out = self.engine.prefill(prompts, cache, capture=True)
        assert out.aux is not None
        fresh = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(out.last.shape[:2], dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt) - 1] = torch.tensor(prompt[1:])
        rows = torch.arange(len(prompts))
        tokens[rows, fresh - 1] = self.engine.next_tokens(out.last[rows, fresh - 1]).long()
        return _Round(tokens, out.aux.flatten(2), torch.zeros_like(fresh), fresh)

    def _draft(self, current: _Round, draft_tokens: int, drafts: DraftCache) -> Tensor:
        """Guess [B, K] target ids: take in what is fresh, then run on the drafter's own output."""
        batch, width = current.tokens.shape
        positions = current.start[:, None] + torch.arange(width)
        drafts.place(positions)
        features = current.features.flatten(0, 1).to(self.drafter.fc.weight.dtype)
        hidden = self.drafter.features(features)
        out = self.drafter(current.tokens.flatten(), hidden, positions.flatten(), drafts)
        hidden = current.last(out.unflatten(0, (batch, width)))
        position = current.start + current.fresh - 1
        guesses = [self._guess(hidden)]
        for step in range(1, draft_tokens):
            drafts.place((position + step)[:, None])
            hidden = self.drafter(guesses[-1], hidden, position + step, drafts)
            guesses.append(self._guess(hidden))
        return torch.stack(guesses, dim=1)

    def _guess(self, hidden: Tensor) -> Tensor:
        return self.used[self.drafter.logits(hidden).argmax(-1)]

    def _verify(self, current: _Round, guesses: Tensor, cache: PositionCache) -> _Round:
        """Run the target on the newest token and the guesses; keep guesses up to the first that
        is not its own choice. Its choice there comes on top."""
        window = torch.cat([current.last(current.tokens)[:, None], guesses], dim=1)
        start = current.start + current.fresh
        positions = start[:, None] + torch.arange(window.shape[1])
        out = self.engine.forward(window, positions, cache, capture=True)
        assert out.aux is not None
        choices = self.engine.next_tokens(out.last).long()
        kept = (guesses == choices[:, :-1]).long().cumprod(1).sum(1)
        return _Round(choices, out.aux.flatten(2), start, kept + 1)

    def _open(self, answer: list[int], max_new_tokens: int) -> bool:
        return len(answer) < max_new_tokens and answer[-1] not in self.engine.target.stop_ids

    def _extend(self, answer: list[int], tokens: Sequence[int], max_new_tokens: int) -> int:
        """Append until the answer ends. Returns how many tokens were written."""
        for written, token in enumerate(tokens):
            if not self._open(answer, max_new_tokens):
                return written
            answer.append(token)
        return len(tokens)
