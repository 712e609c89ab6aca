"""Speculation changes the speed, never the text; and its counts are those of a plain recount."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftworks.config import PipelineConfig
from draftworks.eagle3.acceptance import Acceptance
from draftworks.eagle3.drafter import Attend, Drafter, DrafterShape
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.engines.reference import PositionCache, ReferenceEngine
from draftworks.engines.speculation import DraftCache, Speculator
from draftworks.hidden_states.store import Convention, SampleStates, StateStore, StateWriter
from draftworks.records.samples import Sample, SampleEntry
from draftworks.stages.train import Train
from draftworks.target import Target
from draftworks.training.packing import load_pack
from draftworks.training.step import pack_loss, walk_pack
from draftworks.workspace import Workspace

NEW = 24


@pytest.fixture(scope="module")
def engine(tiny_target: Target) -> ReferenceEngine:
    return ReferenceEngine(tiny_target, (2, 4, 5), torch.float32)


@pytest.fixture(scope="module")
def prompts(tiny_target: Target, prompt_texts: list[str]) -> list[list[int]]:
    """Ragged, in no order of length."""
    texts = [*prompt_texts[:80:12], *prompt_texts[:16:3]]
    return [tiny_target.render([{"role": "user", "content": text}]) for text in texts]


@pytest.fixture(scope="module")
def plain(engine: ReferenceEngine, prompts: list[list[int]]) -> list[list[int]]:
    answers = [item.tokens for item in engine.generate(prompts, NEW)]
    stopped = [answer[-1] in engine.target.stop_ids for answer in answers]
    assert 2 < sum(stopped) < len(stopped)
    return answers


@pytest.fixture(scope="module")
def shape(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> DrafterShape:
    config = PipelineConfig.model_validate(
        {"target": {"model": str(tiny_target.folder)}, "vocab": {"size": 320}}
    )
    return Train(config, Workspace(tmp_path_factory.mktemp("unused"))).shape


# Drafters


def make(kind: type[Drafter], target: Target, shape: DrafterShape, used: Sequence[int]) -> Drafter:
    values = vars(shape) | {"draft_vocab_size": len(used)}
    drafter = kind(DrafterShape(**values), target.embeddings().float())
    drafter.initialize(target.head()[list(used)].float(), target.norm().float(), seed=1)
    for parameter in drafter.layer.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(10)  # so that what a row attends to changes what it says
    return drafter.eval().requires_grad_(False)


class Oracle(Drafter):
    """Knows the answers: what follows a token at a position. Where it is wrong, it says 0."""

    def learn(self, sequences: list[list[int]], right_at: Callable[[int], bool]) -> None:
        self.following = {
            (row, token): following if right_at(row) else 0
            for sequence in sequences
            for row, (token, following) in enumerate(pairwise(sequence[1:]))
        }
        # Random signs: far from each other, so that the head finds the one that was meant.
        self.codes = torch.randint(0, 2, self.lm_head.weight.shape).float() * 2 - 1
        self.lm_head.weight.copy_(self.codes)
        self.norm.weight.fill_(1)

    def knows(self, prompt: list[int], answer: list[int]) -> bool:
        """Whether no other answer has another word there."""
        rows = enumerate(pairwise(answer), start=len(prompt) - 1)
        return all(self.following[row, token] == following for row, (token, following) in rows)

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        pairs = zip(positions.tolist(), tokens.tolist(), strict=True)
        out = self.codes[[self.following.get(pair, 0) for pair in pairs]]
        return out if rows is None else out[rows]


@pytest.fixture(scope="module")
def drafter_named(
    tiny_target: Target, shape: DrafterShape, prompts: list[list[int]], plain: list[list[int]]
) -> Callable[[str], tuple[Drafter, DraftVocabulary]]:
    """A drafter and its vocabulary: random, blind (cannot utter what the target says), perfect,
    or one that is wrong at every third or every second position."""
    size = tiny_target.vocab_size
    said = {token for answer in plain for token in answer}

    def build(name: str) -> tuple[Drafter, DraftVocabulary]:
        torch.manual_seed(0)
        used = sorted(set(range(size)) - said) if name == "blind" else list(range(size))
        if name == "few":
            used = sorted(said)[::2]
        vocabulary = DraftVocabulary(torch.tensor(used), size)
        every = {"perfect": 10**9, "thirds": 3, "halves": 2}.get(name)
        if every is None:
            return make(Drafter, tiny_target, shape, used), vocabulary
        oracle = cast("Oracle", make(Oracle, tiny_target, shape, used))
        sequences = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
        oracle.learn(sequences, lambda row: (row + 1) % every > 0)
        return oracle, vocabulary

    return build


DRAFTERS = ["random", "few", "blind", "perfect", "thirds", "halves"]


# The recount: one prompt at a time, no cache, everything anew in every round


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def guesses_of(
    drafter: Drafter, used: Tensor, tokens: list[int], aux: Tensor, count: int
) -> list[int]:
    """Row t of the drafter sees token t+1 and the target's states of token t; every later row
    sees its own last guess and its own last output."""
    following = tokens[1:]
    hidden = drafter.features(aux.flatten(1))
    for _ in range(count):
        rows = torch.arange(len(following))
        out = drafter(torch.tensor(following), hidden, rows, causal)
        guess = used[drafter.logits(out[-1:])[0].argmax()]
        following = [*following, int(guess)]
        hidden = torch.cat([hidden, out[-1:]])
    return following[len(tokens) - 1 :]


def recount(
    engine: ReferenceEngine,
    drafter: Drafter,
    vocabulary: DraftVocabulary,
    prompt: list[int],
    new: int,
    draft_tokens: int,
) -> tuple[list[int], Acceptance]:
    tokens = [*prompt, int(engine.capture([prompt])[0].argmax[-1])]
    total = Acceptance(0, (0,) * draft_tokens)

    def open_() -> bool:
        return len(tokens) < len(prompt) + new and tokens[-1] not in engine.target.stop_ids

    while open_():
        aux = engine.capture([tokens[:-1]])[0].aux
        guesses = guesses_of(drafter, vocabulary.used, tokens, aux, draft_tokens)
        choices = engine.capture([[*tokens, *guesses]])[0].argmax[len(tokens) - 1 :].tolist()
        kept = 0
        while kept < draft_tokens and guesses[kept] == choices[kept] and open_():
            tokens.append(choices[kept])
            kept += 1
        if open_():
            tokens.append(choices[kept])
        total += Acceptance(1, tuple(int(k < kept) for k in range(draft_tokens)))
    return tokens[len(prompt) :], total


# Tests


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("draft_tokens", [1, 3, 6])
def test_the_text_is_that_of_plain_decoding(
    engine: ReferenceEngine,
    drafter_named: Callable[[str], tuple[Drafter, DraftVocabulary]],
    prompts: list[list[int]],
    plain: list[list[int]],
    name: str,
    draft_tokens: int,
) -> None:
    result = Speculator(engine, *drafter_named(name)).decode(prompts, NEW, draft_tokens)
    assert result.answers == plain


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(("new", "draft_tokens"), [(1, 3), (2, 3), (9, 1), (NEW, 4)])
def test_the_counts_are_those_of_a_plain_recount(
    engine: ReferenceEngine,
    drafter_named: Callable[[str], tuple[Drafter, DraftVocabulary]],
    prompts: list[list[int]],
    name: str,
    new: int,
    draft_tokens: int,
) -> None:
    drafter, vocabulary = drafter_named(name)
    some = prompts[1:12:2]
    result = Speculator(engine, drafter, vocabulary).decode(some, new, draft_tokens)
    expected = Acceptance(0, (0,) * draft_tokens)
    for prompt, answer in zip(some, result.answers, strict=True):
        tokens, counted = recount(engine, drafter, vocabulary, prompt, new, draft_tokens)
        assert answer == tokens
        expected += counted
    assert result.acceptance == expected


@pytest.mark.parametrize("name", ["random", "few"])
def test_every_guess_is_that_of_a_plain_recount(
    engine: ReferenceEngine,
    drafter_named: Callable[[str], tuple[Drafter, DraftVocabulary]],
    prompts: list[list[int]],
    name: str,
) -> None:
    """Also the guesses behind a wrong one, which no count shows."""
    drafter, vocabulary = drafter_named(name)
    speculator = Speculator(engine, drafter, vocabulary)
    cache, drafts = (kind(len(prompts), 200) for kind in (PositionCache, DraftCache))
    with torch.inference_mode():
        current = speculator._prefill(prompts, cache)
        first = current.last(current.tokens).tolist()
        sequences = [[*prompt, token] for prompt, token in zip(prompts, first, strict=True)]
        for _ in range(4):
            guesses = speculator._draft(current, 5, drafts)
            for sequence, row in zip(sequences, guesses.tolist(), strict=True):
                aux = engine.capture([sequence[:-1]])[0].aux
                assert row == guesses_of(drafter, vocabulary.used, sequence, aux, 5)
            current = speculator._verify(current, guesses, cache)
            confirmed = zip(current.tokens.tolist(), current.fresh.tolist(), strict=True)
            for sequence, (tokens, fresh) in zip(sequences, confirmed, strict=True):
                sequence += tokens[:fresh]


def test_random_drafters_are_sometimes_right(
    engine: ReferenceEngine,
    drafter_named: Callable[[str], tuple[Drafter, DraftVocabulary]],
    prompts: list[list[int]],
) -> None:
    """The comparisons above mean something: there is acceptance, and it is not all."""
    result = Speculator(engine, *drafter_named("random")).decode(prompts, NEW, 3)
    assert 0 < result.acceptance.accepted[0] < result.acceptance.drafts


def test_a_perfect_drafter_is_kept_to_the_end_of_every_answer(
    engine: ReferenceEngine,
    drafter_named: Callable[[str], tuple[Drafter, DraftVocabulary]],
    prompts: list[list[int]],
    plain: list[list[int]],
) -> None:
    oracle, vocabulary = drafter_named("perfect")
    known = [
        (prompt, answer)
        for prompt, answer in zip(prompts, plain, strict=True)
        if cast("Oracle", oracle).knows(prompt, answer)
    ]
    assert len(known) > 5
    result = Speculator(engine, oracle, vocabulary).decode([p for p, _ in known], NEW, 3)
    # The first token is the prefill's; each verification writes four more.
    rest = [len(answer) - 1 for _, answer in known]
    kept = [min(3, count - start) for count in rest for start in range(0, count, 4)]
    expected = Acceptance(len(kept), tuple(sum(n > k for n in kept) for k in range(3)))
    assert result.acceptance == expected


def test_a_drafter_without_the_right_words_is_never_kept(
    engine: ReferenceEngine,
    drafter_named: Callable[[str], tuple[Drafter, DraftVocabulary]],
    prompts: list[list[int]],
    plain: list[list[int]],
) -> None:
    result = Speculator(engine, *drafter_named("blind")).decode(prompts, NEW, 3)
    assert result.acceptance == Acceptance(sum(len(answer) - 1 for answer in plain), (0, 0, 0))
    assert result.acceptance.length == 1


@pytest.mark.parametrize("name", ["random", "halves"])
def test_prompts_do_not_see_each_other(
    engine: ReferenceEngine,
    drafter_named: Callable[[str], tuple[Drafter, DraftVocabulary]],
    prompts: list[list[int]],
    name: str,
) -> None:
    speculator = Speculator(engine, *drafter_named(name))
    together = speculator.decode(prompts, NEW, 3)
    alone = [speculator.decode([prompt], NEW, 3) for prompt in prompts]
    assert [result.answers[0] for result in alone] == together.answers
    assert sum((r.acceptance for r in alone), Acceptance(0, (0, 0, 0))) == together.acceptance


def test_a_draft_cache_attends_as_without_a_cache() -> None:
    """Two rows of different length, in a chunk and then token by token."""
    torch.manual_seed(0)
    lengths = (7, 4)
    query, key, value = (torch.randn(2, heads, 10, 8) for heads in (4, 2, 2))
    whole = causal(query, key, value).transpose(1, 2)
    cache = DraftCache(2, 12)

    def flat(states: Tensor, columns: Tensor) -> Tensor:
        """[B, heads, T, d] at columns [B, Q] -> [heads, B*Q, d]."""
        picked = torch.stack([row[:, at] for row, at in zip(states, columns, strict=True)], dim=1)
        return picked.flatten(1, 2)

    def attend(columns: Tensor) -> Tensor:
        cache.place(columns)
        mixed = cache(*(flat(states, columns) for states in (query, key, value)))
        return mixed.transpose(0, 1).reshape(*columns.shape, 4, 8)

    first = attend(torch.arange(7).expand(2, 7))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(first[row, :length], whole[row, :length])
    for step in range(3):
        columns = torch.tensor(lengths)[:, None] + step
        mixed = attend(columns)
        for row in range(2):
            torch.testing.assert_close(mixed[row, 0], whole[row, columns[row, 0]])


@pytest.mark.parametrize("name", ["random", "few", "halves"])
def test_the_estimate_over_stored_states_is_the_measured_acceptance(
    engine: ReferenceEngine,
    drafter_named: Callable[[str], tuple[Drafter, DraftVocabulary]],
    prompts: list[list[int]],
    plain: list[list[int]],
    tmp_path: Path,
    name: str,
) -> None:
    """Training's packed attention and shifted rows, and decoding with caches, are one drafter:
    over the same finished answers they count the same, to the last guess."""
    store = StateStore(tmp_path)
    writer = StateWriter(store, Convention(engine.layers, True, "float32", "reference", "0"))
    stop_ids = engine.target.stop_ids
    pairs = [pair for pair in zip(prompts, plain, strict=True) if pair[1][-1] in stop_ids]
    entries = []
    for number, (prompt, answer) in enumerate(pairs):
        tokens = (*prompt, *answer)
        sample = Sample(str(number), tokens, len(prompt), "stop", "")
        (states,) = engine.capture([tokens])
        ids = torch.tensor(tokens, dtype=torch.int32)
        writer.commit(sample.id, tokens, SampleStates(ids, states.aux, states.last, states.argmax))
        entries.append(SampleEntry(sample.id, str(number), len(tokens), len(prompt)))
    writer.close()
    drafter, vocabulary = drafter_named(name)
    pack = load_pack(store, entries, stop_ids)
    head = engine.target.head()[vocabulary.used].float()
    one = torch.ones(3, dtype=torch.long)
    with torch.no_grad():
        outcome = pack_loss(drafter, head, vocabulary, pack, one, 1.0, guess=True)
    estimated = walk_pack(outcome, pack.lengths, 3)
    measured = Speculator(engine, drafter, vocabulary).decode([p for p, _ in pairs], NEW, 3)
    assert estimated == measured.acceptance
    if name == "halves":
        assert 0 < estimated.accepted[0] < estimated.drafts
