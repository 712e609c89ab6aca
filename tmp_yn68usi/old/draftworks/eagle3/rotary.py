"""Rotary position embedding, in the scalings that engines know by the same names.

Angles are made in float64 and only their cosines and sines are rounded: frequencies in bfloat16,
or far positions in float32, turn a head by the wrong angle.
"""

import math
from typing import Any

import torch
from torch import Tensor

from draftworks.errors import DraftworksError

KINDS = ("default", "linear", "llama3", "yarn")


class Rotary:
    """Tables for a rope in Hugging Face form (`rope_type`, `rope_theta`, `factor`, ...).

    No module on purpose: casting a drafter must not cast its frequencies.
    """

    def __init__(self, rope: dict[str, Any], head_dim: int) -> None:
        self.frequencies = frequencies(rope, head_dim)
        self.scale = yarn_scale(rope) if rope["rope_type"] == "yarn" else 1.0

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, d/2] of positions [R]."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None] * self.frequencies
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(states: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x_i, x_{i + d/2}) of states [heads, R, d]."""
    cos, sin = tables
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Radians per position, [d/2] float64. Raises DraftworksError for a rope_type not in KINDS."""
    kind = rope["rope_type"]
    plain: Tensor = rope["rope_theta"] ** -(
        torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    )
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / float(rope["factor"])
    if kind == "llama3":
        return _llama3(plain, rope)
    if kind == "yarn":
        return _yarn(plain, rope)
    raise DraftworksError(
        f"train.drafter.rope: rope_type {kind!r} is not one of {', '.join(KINDS)}; set one of them"
    )


def yarn_scale(rope: dict[str, Any]) -> float:
    """YaRN's factor on queries and keys, which sharpens attention over long contexts."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if given := rope.get("attention_factor"):
        return float(given)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)


def _llama3(plain: Tensor, rope: dict[str, float]) -> Tensor:
    """Slow pairs are stretched by the factor, fast ones kept, those between blended."""
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / rope["factor"])


def _yarn(plain: Tensor, rope: dict[str, Any]) -> Tensor:
    """Pairs that turn less than `beta_slow` times over the original context are stretched, those
    that turn more than `beta_fast` times kept, those between blended by their number."""
    pairs = len(plain)
    context = rope["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return pairs * math.log(context / (turns * 2 * math.pi)) / math.log(rope["rope_theta"])

    first, last = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    steps = torch.arange(pairs, dtype=plain.dtype) - first
    stretched = (steps / max(last - first, 0.001)).clamp(0, 1)
    return plain * (1 - stretched + stretched / float(rope["factor"]))
