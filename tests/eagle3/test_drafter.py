"""The drafter: what training attends to is what decoding attends to, in every precision."""

import pytest
import torch
import toys
from torch import Tensor

from draftworks.eagle3.drafter import Drafter, DrafterShape
from draftworks.engines.speculation import DraftCache
from draftworks.training.packing import Pack
from draftworks.training.step import unroll

STEPS = 3


def decode(drafter: Drafter, pack: Pack, prefix: int) -> list[Tensor]:
    """Raw outputs [K, H] of a draft made after `prefix` rows of the only document, as an engine
    makes it: the rows so far at once, then its own outputs one by one."""
    cache = DraftCache(1, prefix + STEPS)
    positions = torch.arange(prefix)
    cache.place(positions[None])
    hidden = drafter.features(pack.aux[:prefix])
    hidden = drafter(pack.tokens[1 : prefix + 1], hidden, positions, cache)[-1:]
    outputs = [hidden]
    for step in range(1, min(STEPS, len(pack.tokens) - prefix)):
        position = torch.tensor([prefix - 1 + step])
        cache.place(position[None])
        hidden = drafter(pack.tokens[position + 1], hidden, position, cache)
        outputs.append(hidden)
    return outputs


@pytest.mark.parametrize(
    "shape",
    [
        toys.SHAPE,
        toys.shape(kv_heads=1),
        toys.shape(kv_heads=4, norm_before_residual=True),
        toys.shape(fc_norm=True, norm_output=True),
    ],
    ids=["gqa", "mqa", "mha_norm_before_residual", "eagle_3.1"],
)
@torch.no_grad()
def test_training_time_test_equals_cached_decoding(shape: DrafterShape) -> None:
    drafter = toys.drafter(shape)
    pack = toys.pack(toys.documents("..aaaaaa"))
    trained = unroll(drafter, pack, STEPS)
    for prefix in range(1, len(pack.tokens)):
        for step, output in enumerate(decode(drafter, pack, prefix)):
            torch.testing.assert_close(
                trained[step, prefix - 1],
                output[0],
                rtol=1e-9,
                atol=1e-9,
                msg=f"{prefix}, {step}",
            )


@torch.no_grad()
def test_decoding_takes_back_rejected_rows() -> None:
    """A second draft overwrites the slots of the first: it equals one with a fresh cache."""
    drafter = toys.drafter()
    pack = toys.pack(toys.documents("..aaaaaa"))
    cache = DraftCache(1, 16)

    def rows(start: int, end: int, hidden: Tensor) -> Tensor:
        positions = torch.arange(start, end)
        cache.place(positions[None])
        return drafter(pack.tokens[start + 1 : end + 1], hidden, positions, cache)

    features = drafter.features(pack.aux)
    out = rows(0, 3, features[:3])[-1:]
    for position in (3, 4):
        out = rows(position, position + 1, out)
    out = rows(3, 5, features[3:5])[-1:]
    out = rows(5, 6, out)
    torch.testing.assert_close(out, decode(drafter, pack, 5)[1], rtol=1e-9, atol=1e-9)


def test_fresh_weights_are_a_function_of_the_seed_and_start_from_the_target() -> None:
    def fresh(seed: int) -> dict[str, Tensor]:
        made = Drafter(toys.SHAPE, torch.zeros(toys.TARGET_VOCAB, 8))
        made.initialize(toys.TARGET_HEAD[list(toys.USED)].float(), torch.full((8,), 2.0), seed)
        return made.state_dict()

    first, again, other = fresh(1), fresh(1), fresh(2)
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["fc.weight"].equal(other["fc.weight"])
    assert first["lm_head.weight"].equal(toys.TARGET_HEAD[list(toys.USED)].float())
    assert first["norm.weight"].eq(2).all()
    assert "embeddings" not in first
