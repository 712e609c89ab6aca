"""Rotary frequencies are those of transformers, whose names they carry."""

from typing import Any

import pytest
import torch
import toys
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftworks.eagle3.rotary import Rotary, rotate
from draftworks.errors import DraftworksError

HEAD_DIM, CONTEXT = 32, 4096
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 256,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_kimi": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn_deepseek": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False},
    "yarn_given_factor": YARN | {"attention_factor": 1.25},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_tables_and_rotation_equal_those_of_transformers(rope: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters=dict(rope),
    )
    positions = torch.tensor([0, 1, 7, 300, CONTEXT - 1])
    states = torch.randn(4, len(positions), HEAD_DIM, generator=torch.Generator().manual_seed(0))
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = (table[0] for table in theirs(states, positions[None]))
    expected, _ = apply_rotary_pos_emb(states, states, cos, sin, unsqueeze_dim=0)
    ours = Rotary(rope, HEAD_DIM)
    torch.testing.assert_close(ours.frequencies.float(), theirs.inv_freq, rtol=1e-6, atol=0)
    found = rotate(states, ours(positions, torch.float32))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@torch.no_grad()
def test_angles_stay_exact_in_a_drafter_cast_to_bfloat16() -> None:
    """Frequencies rounded to bfloat16 turn far positions by whole radians."""
    positions = torch.tensor([0, 7, 1999])
    exact = toys.drafter().rotary(positions, torch.float64)
    cast = toys.drafter().bfloat16().rotary(positions, torch.bfloat16)
    for table, expected in zip(cast, exact, strict=True):
        torch.testing.assert_close(table.double(), expected, rtol=0, atol=0.005)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(DraftworksError, match="'longrope' is not one of default, linear"):
        Rotary({"rope_type": "longrope", "rope_theta": 10_000.0}, HEAD_DIM)
