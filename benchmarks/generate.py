"""Batched decoding: the reference engine against transformers' own `generate`.

The same prompts, the same number of new tokens, greedy, bfloat16, one batch.
"""

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks import show
from draftworks import bundled
from draftworks.config import PromptsConfig, TargetConfig
from draftworks.engines.reference import ReferenceEngine
from draftworks.records.prompts import read_prompts
from draftworks.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    target = Target.resolve(TargetConfig(model=bundled.NAME))
    engine = ReferenceEngine(target, target.auxiliary_layers(None))
    prompts = [
        target.render(prompt.messages)
        for prompt in read_prompts(PromptsConfig(limit=options.prompts))
    ]
    count = options.new_tokens

    def ours() -> int:
        return sum(len(item.tokens) for item in engine.generate(prompts, count))

    def theirs() -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = engine.model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return int((out[:, longest:] != 0).sum())

    # Alternating, so that a slow moment of the machine falls on both.
    speeds: dict[str, list[float]] = {"draftworks": [], "transformers": []}
    for _ in range(options.rounds):
        for name, way in (("draftworks", ours), ("transformers", theirs)):
            speeds[name].append(tokens_per_second(way))
    best = {name: max(values) for name, values in speeds.items()}
    show(
        f"Greedy decoding, {len(prompts)} prompts x {count} new tokens, best of {options.rounds}",
        ["", "tokens/s", "ratio"],
        [
            [name, f"{value:,.0f}", f"{value / best['transformers']:.2f}"]
            for name, value in best.items()
        ],
    )


def tokens_per_second(way: Callable[[], int]) -> float:
    started = time.perf_counter()
    return way() / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
