"""The reference engine against transformers itself: what it says, and what it captures."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftworks import bundled
from draftworks.config import TargetConfig
from draftworks.engines.reference import Completion, PositionCache, ReferenceEngine
from draftworks.errors import DraftworksError
from draftworks.target import Target

LAYERS = (2, 4, 5)


@pytest.fixture(scope="module")
def engine(tiny_target: Target) -> ReferenceEngine:
    return ReferenceEngine(tiny_target, LAYERS, torch.float32)


@pytest.fixture(scope="module")
def model(tiny_target: Target) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_target.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tiny_target: Target, prompt_texts: list[str]) -> list[list[int]]:
    """Ragged, in no order of length, down to a single token."""
    texts = prompt_texts[:80:8]
    ids = [tiny_target.render([{"role": "user", "content": text}]) for text in texts]
    return [ids[0], ids[9], ids[3][:1], *ids[4:8], ids[2][:2], ids[8]]


def theirs(model: Any, target: Target, prompt: Sequence[int], new: int) -> Completion:
    """Greedy decoding of one prompt by transformers, which knows nothing of batches."""
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=sorted(target.stop_ids),
        pad_token_id=0,
    )[0].tolist()[len(prompt) :]
    return Completion(ids, "stop" if ids[-1] in target.stop_ids else "length")


# Decoding


def test_a_ragged_batch_is_decoded_as_transformers_decodes_each_prompt(
    engine: ReferenceEngine, model: Any, prompts: list[list[int]]
) -> None:
    found = engine.generate(prompts, 40)
    assert found == [theirs(model, engine.target, prompt, 40) for prompt in prompts]
    # Rows leave the batch at different times, and some never.
    assert {item.finish_reason for item in found} == {"stop", "length"}
    assert len({len(item.tokens) for item in found}) >= 3


def test_the_real_target_is_decoded_as_transformers_decodes_it() -> None:
    try:
        target = Target.resolve(TargetConfig(model=bundled.NAME))
    except DraftworksError as error:
        pytest.skip(str(error))
    engine = ReferenceEngine(target, target.auxiliary_layers(None), torch.float32)
    questions = [
        "What is 2 + 2? Say the number.",
        "Name a river.",
        "Write a haiku about rain on a tin roof, then explain it at length.",
        "Hi",
    ]
    prompts = [target.render([{"role": "user", "content": text}]) for text in questions]
    found = engine.generate(prompts, 16)
    assert found == [theirs(engine.model, target, prompt, 16) for prompt in prompts]
    assert "river" in target.text(found[1].tokens).lower()


def test_a_limit_of_one_token_is_one_token(
    engine: ReferenceEngine, prompts: list[list[int]]
) -> None:
    one, many = engine.generate(prompts, 1), engine.generate(prompts, 5)
    assert [item.tokens for item in one] == [item.tokens[:1] for item in many]


def test_the_stop_token_ends_and_stays_in_the_answer(
    engine: ReferenceEngine, prompts: list[list[int]]
) -> None:
    for item in engine.generate(prompts, 60):
        stops = [token in engine.target.stop_ids for token in item.tokens]
        assert not any(stops[:-1])
        assert stops[-1] == (item.finish_reason == "stop")
        assert len(item.tokens) == 60 or item.finish_reason == "stop"


def test_rows_of_a_batch_do_not_see_each_other(
    engine: ReferenceEngine, prompts: list[list[int]]
) -> None:
    together = engine.generate(prompts, 30)
    assert [engine.generate([prompt], 30)[0] for prompt in prompts] == together
    assert engine.generate(prompts[::-1], 30) == together[::-1]


# Sampling


def sample(
    engine: ReferenceEngine, prompts: list[list[int]], seeds: list[int], **settings: float
) -> list[list[int]]:
    values = {"temperature": 1.0, "top_p": 0.95} | settings
    found = engine.generate(prompts, 12, seeds=seeds, **values)
    return [item.tokens for item in found]


def test_a_sampled_row_depends_on_its_own_seed_alone(
    engine: ReferenceEngine, prompts: list[list[int]]
) -> None:
    seeds = list(range(len(prompts)))
    together = sample(engine, prompts, seeds)
    assert sample(engine, prompts, seeds) == together
    assert sample(engine, prompts[::-1], seeds[::-1]) == together[::-1]
    alone = [
        sample(engine, [prompt], [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert alone == together
    assert sample(engine, prompts, [seed + 100 for seed in seeds]) != together


def test_equal_prompts_with_other_seeds_part(
    engine: ReferenceEngine, prompts: list[list[int]]
) -> None:
    found = sample(engine, [prompts[0]] * 8, list(range(8)))
    assert len({tuple(tokens) for tokens in found}) > 4


def test_the_smallest_nucleus_is_greedy(engine: ReferenceEngine, prompts: list[list[int]]) -> None:
    greedy = [item.tokens for item in engine.generate(prompts, 12)]
    assert sample(engine, prompts, [1] * len(prompts), top_p=1e-6) == greedy
    assert sample(engine, prompts, [1] * len(prompts), temperature=1e-4) == greedy


def test_samples_follow_the_nucleus_and_its_probabilities(
    engine: ReferenceEngine, model: Any, prompts: list[list[int]]
) -> None:
    """First tokens of many draws against the distribution that transformers gives."""
    draws, temperature, top_p = 1500, 0.8, 0.6
    logits = model(torch.tensor(prompts[:1])).logits[0, -1]
    values, ids = torch.softmax(logits / temperature, -1).sort(descending=True)
    inside = values.cumsum(-1) - values < top_p
    expected = torch.zeros_like(values).scatter(0, ids, values * inside / (values * inside).sum())
    found = engine.generate(
        [prompts[0]] * draws, 1, temperature=temperature, top_p=top_p, seeds=range(draws)
    )
    counts = torch.bincount(torch.tensor([item.tokens[0] for item in found]), minlength=len(values))
    assert counts[expected == 0].sum() == 0
    spread = (draws * expected * (1 - expected)).sqrt()
    assert ((counts - draws * expected).abs() <= 5 * spread + 1).all()


# Capture


def expected_states(model: Any, tokens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """aux, last and logits by transformers' own hidden states: id k is the state after k layers,
    and the last one has the final norm in it."""
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    aux = torch.stack([out.hidden_states[layer][0] for layer in LAYERS], dim=1)
    return aux, out.hidden_states[-1][0], out.logits[0]


def test_captured_states_are_those_of_transformers_for_every_row_of_a_padded_batch(
    engine: ReferenceEngine, model: Any, prompts: list[list[int]]
) -> None:
    for tokens, states in zip(prompts, engine.capture(prompts), strict=True):
        aux, last, logits = expected_states(model, tokens)
        torch.testing.assert_close(states.aux, aux, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states.last, last, rtol=1e-4, atol=1e-5)
        assert torch.equal(states.argmax, logits.argmax(-1).to(torch.int32))


def test_neighbouring_layers_are_told_apart(
    engine: ReferenceEngine, model: Any, prompts: list[list[int]]
) -> None:
    """The comparison above means something: one layer off is far off."""
    (states,) = engine.capture(prompts[:1])
    hidden = model(torch.tensor(prompts[:1]), output_hidden_states=True).hidden_states
    for position, layer in enumerate(LAYERS):
        for wrong in (layer - 1, layer + 1):
            assert not torch.allclose(states.aux[:, position], hidden[wrong][0], atol=0.01)
    before_norm = hidden[-2][0]
    assert not torch.allclose(states.last, before_norm, atol=0.01)


def test_the_teacher_is_the_best_of_the_whole_vocabulary(
    engine: ReferenceEngine, prompts: list[list[int]]
) -> None:
    for states in engine.capture(prompts):
        logits = states.last @ engine.target.head().float().T
        assert logits.shape[-1] == engine.target.vocab_size
        assert torch.equal(states.argmax.long(), logits.argmax(-1))


def test_captured_states_continue_into_what_is_generated(
    engine: ReferenceEngine, prompts: list[list[int]]
) -> None:
    """Teacher of the answer's positions and greedy answer are one and the same."""
    answers = [item.tokens for item in engine.generate(prompts, 20)]
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    for prompt, answer, states in zip(prompts, answers, engine.capture(sequences), strict=True):
        assert states.argmax[len(prompt) - 1 : -1].tolist() == answer


def test_a_forward_in_pieces_captures_what_one_forward_captures(
    engine: ReferenceEngine, prompts: list[list[int]]
) -> None:
    """Verification runs in windows over the cache; its states are those of the whole."""
    tokens = torch.tensor([prompts[1], prompts[1][::-1]])
    length = tokens.shape[1]
    (whole, reverse) = engine.capture(tokens.tolist())
    cache = PositionCache(2, length)
    parts = [
        engine.forward(
            tokens[:, start:end], torch.arange(start, end).expand(2, -1), cache, capture=True
        )
        for start, end in ((0, 11), (11, 12), (12, length))
    ]
    for row, states in enumerate((whole, reverse)):
        aux = torch.cat([part.aux[row] for part in parts if part.aux is not None])
        last = torch.cat([part.last[row] for part in parts])
        torch.testing.assert_close(aux, states.aux, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last, states.last, rtol=1e-4, atol=1e-5)


def test_a_refused_token_is_overwritten_in_the_cache(
    engine: ReferenceEngine, prompts: list[list[int]]
) -> None:
    right = prompts[1]
    (whole,) = engine.capture([right])
    cache = PositionCache(1, len(right))
    wrong = [*right[:10], *(token + 1 for token in right[10:20])]
    engine.forward(torch.tensor([wrong]), torch.arange(20)[None], cache)
    again = engine.forward(torch.tensor([right[10:]]), torch.arange(10, len(right))[None], cache)
    torch.testing.assert_close(again.last[0], whole.last[10:], rtol=1e-4, atol=1e-5)


def test_hooks_do_not_stay_behind(engine: ReferenceEngine, prompts: list[list[int]]) -> None:
    engine.capture(prompts)
    assert not any(layer._forward_hooks for layer in engine.decoder.layers)


def test_bfloat16_stays_bfloat16(tiny_target: Target, prompts: list[list[int]]) -> None:
    (states,) = ReferenceEngine(tiny_target, LAYERS).capture(prompts[:1])
    assert (states.aux.dtype, states.last.dtype) == (torch.bfloat16, torch.bfloat16)
    assert states.argmax.dtype == torch.int32


def test_sliding_window_attention_is_refused(tiny_target: Target) -> None:
    target = Target("windowed", tiny_target.folder)
    target.text_config["sliding_window"] = 64
    with pytest.raises(DraftworksError, match=r"no sliding-window attention \(window 64\)"):
        ReferenceEngine(target, LAYERS)


def test_a_cache_can_drop_rows_before_its_first_token() -> None:
    """An answer that ends at its first token leaves the batch before the drafter has run."""
    cache = PositionCache(rows=3, slots=4)
    cache.keep(torch.tensor([0, 2]))
    cache.place(torch.zeros(2, 1, dtype=torch.long))
    keys, values = cache.update(torch.ones(2, 1, 1, 5), torch.ones(2, 1, 1, 5), 0)
    assert keys.shape == values.shape == (2, 1, 1, 5)
