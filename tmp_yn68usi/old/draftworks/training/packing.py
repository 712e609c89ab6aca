"""Which samples a step sees: the split by conversation, the packs, and their tensors.

The plan is made from sample lengths alone; states are read pack by pack on a thread ahead of
the consumer, so the first step does not wait for the data and memory does not grow with it.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftworks.hidden_states.store import StateStore
from draftworks.records.samples import SampleEntry
from draftworks.workspace import digest

READ_AHEAD = 4  # packs held ready


@dataclass(frozen=True)
class Pack:
    """Several whole samples laid end to end, R rows.

    tokens [R], aux [R, 3H], last [R, H], argmax [R]; offsets [R]: position within the sample;
    ends [R]: last row of the sample; counts [R]: the row is a teacher position (written by the
    assistant, and not a stop token, after which nothing is drafted).
    """

    lengths: tuple[int, ...]
    tokens: Tensor
    aux: Tensor
    last: Tensor
    argmax: Tensor
    offsets: Tensor
    ends: Tensor
    counts: Tensor


def split(
    entries: Sequence[SampleEntry], validation_share: float, seed: int
) -> tuple[list[SampleEntry], list[SampleEntry]]:
    """(training, validation): by conversation, so that none is in both; at least one each."""
    names = sorted({entry.conversation_id for entry in entries}, key=lambda c: digest([seed, c]))
    size = min(max(1, round(len(names) * validation_share)), len(names) - 1)
    held_out = set(names[:size])
    return (
        [entry for entry in entries if entry.conversation_id not in held_out],
        [entry for entry in entries if entry.conversation_id in held_out],
    )


def plan_packs(
    entries: Sequence[SampleEntry], budget: int, order: Sequence[int]
) -> list[list[SampleEntry]]:
    """Fill packs of `budget` tokens, first fit over a few open packs, in the given order.

    A sample longer than the budget gets a pack of its own.
    """
    packs: list[list[SampleEntry]] = []
    open_packs: list[tuple[list[SampleEntry], int]] = []
    for index in order:
        entry = entries[index]
        for slot, (pack, room) in enumerate(open_packs):
            if entry.tokens <= room:
                pack.append(entry)
                open_packs[slot] = (pack, room - entry.tokens)
                break
        else:
            pack = [entry]
            packs.append(pack)
            open_packs.append((pack, budget - entry.tokens))
            if len(open_packs) > 16:
                open_packs.remove(min(open_packs, key=lambda item: item[1]))
    return packs


def epoch_packs(
    entries: Sequence[SampleEntry], budget: int, seed: int, epoch: int
) -> list[list[SampleEntry]]:
    """The packs of one epoch: a function of seed and epoch, so a resumed run sees the same."""
    random = np.random.default_rng([seed, epoch])
    packs = plan_packs(entries, budget, random.permutation(len(entries)).tolist())
    # First fit closes small packs late; without this the epoch would end on its short samples.
    return [packs[index] for index in random.permutation(len(packs))]


def load_pack(store: StateStore, entries: Sequence[SampleEntry], stop_ids: Iterable[int]) -> Pack:
    """Read one pack. Raises DraftworksError naming the sample that cannot be read."""
    samples = [store.read(entry.sample_id) for entry in entries]
    lengths = tuple(len(sample.token_ids) for sample in samples)
    tokens = torch.cat([sample.token_ids for sample in samples]).long()
    offsets = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.arange(len(tokens)) - offsets
    sizes = torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths))
    prompts = torch.tensor([entry.prompt_tokens for entry in entries])
    written = offsets >= torch.repeat_interleave(prompts, torch.tensor(lengths))
    stops = torch.isin(tokens, torch.tensor(sorted(stop_ids)))
    return Pack(
        lengths,
        tokens,
        torch.cat([sample.aux.flatten(1) for sample in samples]),
        torch.cat([sample.last for sample in samples]),
        torch.cat([sample.argmax for sample in samples]).long(),
        offsets,
        starts + sizes - 1,
        written & ~stops,
    )


def read_ahead(
    store: StateStore, packs: Iterable[Sequence[SampleEntry]], stop_ids: Iterable[int]
) -> Iterator[Pack]:
    """Load packs in order on one thread, a few ahead of the consumer."""
    stops = frozenset(stop_ids)
    with ThreadPoolExecutor(1, "read-ahead") as reader:
        pending = []
        for entries in packs:
            pending.append(reader.submit(load_pack, store, entries, stops))
            if len(pending) > READ_AHEAD:
                yield pending.pop(0).result()
        for future in pending:
            yield future.result()
