"""A dozen samples with their states, as the tests of the store commit them."""

import torch

from draftworks.hidden_states.store import Convention, SampleStates, StateStore, StateWriter
from draftworks.workspace import digest

CONVENTION = Convention((2, 4, 5), True, "bfloat16", "reference", "5.24.0")
HIDDEN = 8
TOKENS = {
    digest(tokens): tokens
    for tokens in ([number, *range(7, 9 + number % 3), 99 - number] for number in range(12))
}
"""Token ids by the sample's id; 4, 5 and 6 of them in turn."""
NAMES = list(TOKENS)


def states(tokens: list[int]) -> SampleStates:
    torch.manual_seed(tokens[0])
    length = len(tokens)
    return SampleStates(
        torch.tensor(tokens, dtype=torch.int32),
        torch.randn(length, 3, HIDDEN).bfloat16(),
        torch.randn(length, HIDDEN).bfloat16(),
        torch.randint(0, 99, (length,), dtype=torch.int32),
    )


def commit(store: StateStore, *names: str, convention: Convention = CONVENTION) -> None:
    writer = StateWriter(store, convention)
    for name in names:
        writer.commit(name, TOKENS[name], states(TOKENS[name]))
    writer.close()
