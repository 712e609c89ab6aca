"""The reference engine: the target in this process, by transformers.

Slow beside a real engine and right by construction, so the others are compared with it. It is
also fast enough on two CPU cores to run the whole pipeline for a small model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache
from transformers.utils import logging

from draftworks.errors import DraftworksError
from draftworks.target import Target


@dataclass(frozen=True)
class Completion:
    """What the target wrote after one prompt. `tokens` include the stop token if it came."""

    tokens: list[int]
    finish_reason: str  # "stop" or "length", as in the OpenAI API


@dataclass(frozen=True)
class States:
    """The hidden states of one sequence of T tokens.

    aux: [T, 3, H], canonical layer ids; last: [T, H], after the final norm;
    argmax: [T] int32, the target's own next token over its full vocabulary.
    """

    aux: Tensor
    last: Tensor
    argmax: Tensor


@dataclass(frozen=True)
class Forward:
    """One forward pass over [B, Q] tokens. last: [B, Q, H] normed; aux: [B, Q, 3, H] or None."""

    last: Tensor
    aux: Tensor | None


class PositionCache(Cache):
    """A key-value cache in which a token's slot is its position.

    Rows of a batch may stand at different lengths: a query sees the slots up to its own
    position, so padding and rejected draft tokens are simply overwritten by what comes next.
    """

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.slots = slots
        self.positions: Tensor = torch.empty(0)
        self.used = 0
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def place(self, positions: Tensor) -> Tensor:
        """Announce the [B, Q] positions of the next forward. Returns its mask [B, 1, Q, S]."""
        self.positions = positions
        self.used = int(positions.max()) + 1
        slots = torch.arange(self.used, device=positions.device)
        return (slots <= positions[..., None])[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [B, heads, Q, d] at the announced positions; return all of [B, heads, S, d]."""
        if layer_idx not in self.buffers:
            self.buffers[layer_idx] = (self._buffer(key_states), self._buffer(value_states))
        rows = torch.arange(len(key_states), device=key_states.device)[:, None]
        keys, values = self.buffers[layer_idx]
        keys[rows, self.positions] = key_states.transpose(1, 2)
        values[rows, self.positions] = value_states.transpose(1, 2)
        return keys[:, : self.used].transpose(1, 2), values[:, : self.used].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used

    def keep(self, rows: Tensor) -> None:
        """Drop every row of the batch but these."""
        for layer, (keys, values) in self.buffers.items():
            self.buffers[layer] = (keys[rows], values[rows])
        self.rows = len(rows)  # of buffers that are still to come

    def _buffer(self, like: Tensor) -> Tensor:
        _, heads, _, width = like.shape
        return like.new_zeros(self.rows, self.slots, heads, width)


class ReferenceEngine:
    """A target loaded for inference. `layers` are canonical ids of the auxiliary states."""

    name = "reference"

    def __init__(
        self,
        target: Target,
        layers: tuple[int, int, int],
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> None:
        logging.disable_progress_bar()  # nobody watches a job's terminal
        model: Any = AutoModelForCausalLM.from_pretrained(
            target.folder, dtype=dtype, trust_remote_code=target.trust_remote_code
        )
        self.model = model.to(device).eval().requires_grad_(False)
        self.decoder = self.model.get_decoder()
        self.head: Tensor = self.model.get_output_embeddings().weight
        self.target = target
        self.layers = layers
        self.device = device
        window = target.text_config.get("sliding_window")
        if window and target.text_config.get("use_sliding_window", True):
            raise DraftworksError(
                f"target {target.name}: the reference engine has no sliding-window attention "
                f"(window {window}); serve this target with vLLM or SGLang"
            )

    @contextmanager
    def _capturing(self) -> Iterator[dict[int, Tensor]]:
        """Collect the outputs of the auxiliary layers: canonical k is the output of layer k-1."""
        captured: dict[int, Tensor] = {}

        def hook(layer: int) -> Any:
            def keep(_module: Any, _inputs: Any, output: Any) -> None:
                captured[layer] = output[0] if isinstance(output, tuple) else output

            return keep

        handles = [self.decoder.layers[k - 1].register_forward_hook(hook(k)) for k in self.layers]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, cache: PositionCache, *, capture: bool = False
    ) -> Forward:
        """Advance a batch by [B, Q] tokens at [B, Q] positions (slots of the cache)."""
        mask = cache.place(positions)
        with self._capturing() if capture else _nothing() as captured:
            last = self.decoder(
                input_ids=tokens, attention_mask=mask, position_ids=positions, cache=cache
            ).last_hidden_state
        aux = torch.stack([captured[k] for k in self.layers], dim=2) if capture else None
        return Forward(last, aux)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seeds: Sequence[int] = (),
    ) -> list[Completion]:
        """Complete a batch of prompts. Each row draws from its own seed when sampling."""
        longest = max(len(prompt) for prompt in prompts)
        cache = PositionCache(len(prompts), longest + max_new_tokens)
        last = self.prefill(prompts, cache).last
        ends = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        rows = torch.arange(len(prompts), device=self.device)
        hidden = last[rows, ends - 1]
        choose = _Sampler(temperature, top_p, seeds)
        answers: list[list[int]] = [[] for _ in prompts]
        finished = [False] * len(prompts)
        active = list(range(len(prompts)))
        for _ in range(max_new_tokens):
            tokens = choose(hidden @ self.head.T, active)
            for row, token in zip(active, tokens.tolist(), strict=True):
                if not finished[row]:
                    answers[row].append(token)
                    finished[row] = token in self.target.stop_ids
            running = [i for i, row in enumerate(active) if not finished[row]]
            if not running:
                break
            # Compacting copies the cache, so it waits until it pays: a quarter of the rows idle.
            if len(running) <= 0.75 * len(active):
                index = torch.tensor(running, device=self.device)
                cache.keep(index)
                tokens, ends = tokens[index], ends[index]
                active = [active[i] for i in running]
            hidden = self.forward(tokens[:, None], ends[:, None], cache).last[:, -1]
            ends = ends + 1
        return [
            Completion(answer, "stop" if done else "length")
            for answer, done in zip(answers, finished, strict=True)
        ]

    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: PositionCache, *, capture: bool = False
    ) -> Forward:
        """Run prompts of different lengths at once, padded to the right."""
        longest = max(len(prompt) for prompt in prompts)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long, device=self.device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        positions = torch.arange(longest, device=self.device).expand(len(prompts), longest)
        return self.forward(tokens, positions, cache, capture=capture)

    @torch.inference_mode()
    def capture(self, sequences: Sequence[Sequence[int]]) -> list[States]:
        """The hidden states of whole sequences, in one padded batch."""
        longest = max(len(sequence) for sequence in sequences)
        tokens = torch.zeros(len(sequences), longest, dtype=torch.long, device=self.device)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
        with self._capturing() as captured:
            # Padding stands to the right of every real token: causal attention never sees it.
            last = self.decoder(input_ids=tokens, use_cache=False).last_hidden_state
        aux = torch.stack([captured[k] for k in self.layers], dim=2)
        return [
            States(
                aux[row, : len(sequence)].clone(),
                last[row, : len(sequence)].clone(),
                self.next_tokens(last[row, : len(sequence)]),
            )
            for row, sequence in enumerate(sequences)
        ]

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Log-probability [T-1] of each token after the first, by the model's own forward."""
        ids = torch.tensor([tokens], device=self.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    def next_tokens(self, last: Tensor) -> Tensor:
        """The target's greedy choice [T] int32 for normed states [T, H]."""
        return (last @ self.head.T).argmax(-1).to(torch.int32)


class _Sampler:
    """Greedy or nucleus sampling, one random stream per row: a row's answer does not depend on
    which other rows share its batch."""

    def __init__(self, temperature: float, top_p: float, seeds: Sequence[int]) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = torch.softmax(logits.float() / self.temperature, -1)
        values, ids = probabilities.sort(-1, descending=True)
        values[values.cumsum(-1) - values >= self.top_p] = 0
        picks = [
            torch.multinomial(weights.cpu(), 1, generator=self.generators[row])
            for weights, row in zip(values, rows, strict=True)
        ]
        return ids.gather(-1, torch.stack(picks).to(ids.device)).squeeze(-1)


@contextmanager
def _nothing() -> Iterator[dict[int, Tensor]]:
    yield {}
