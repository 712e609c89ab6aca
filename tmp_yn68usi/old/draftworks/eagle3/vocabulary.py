"""The draft vocabulary: which of the target's tokens the drafter can propose.

Formats as engines read them: `t2d` bool [V] with exactly N true; `d2t` int64 [N] of *offsets*,
target id = draft id + d2t[draft id].
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftworks.errors import DraftworksError
from draftworks.workspace import commit_file


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """`used`: the target ids of the draft tokens, strictly rising, int64 [N]."""

    used: Tensor
    target_size: int

    def __post_init__(self) -> None:
        rising = bool((self.used[1:] > self.used[:-1]).all())
        if not rising or int(self.used[0]) < 0 or int(self.used[-1]) >= self.target_size:
            raise DraftworksError(
                f"draft vocabulary: ids must rise strictly within 0..{self.target_size - 1}; "
                "d2t holds offsets, not ids"
            )

    def __len__(self) -> int:
        return len(self.used)

    @cached_property
    def d2t(self) -> Tensor:
        """Offsets [N] int64."""
        return self.used - torch.arange(len(self.used), device=self.used.device)

    @cached_property
    def t2d(self) -> Tensor:
        """Membership [V] bool."""
        member = torch.zeros(self.target_size, dtype=torch.bool, device=self.used.device)
        member[self.used] = True
        return member

    @classmethod
    def from_offsets(cls, d2t: Tensor, t2d: Tensor) -> "DraftVocabulary":
        """From the two tensors of a checkpoint. Raises DraftworksError when they disagree."""
        vocabulary = cls(d2t.long() + torch.arange(len(d2t)), len(t2d))
        if not torch.equal(vocabulary.t2d, t2d.bool()):
            raise DraftworksError("draft vocabulary: d2t and t2d name different tokens")
        return vocabulary

    @classmethod
    def by_frequency(
        cls, counts: NDArray[np.int64], size: int, always: Iterable[int] = ()
    ) -> "DraftVocabulary":
        """The `size` most frequent ids, those in `always` first, ties by the lower id.

        counts: occurrences of every target id among the loss tokens, [V]. Where fewer ids occur
        than there are places, the lowest unused ids fill up.
        """
        if size > len(counts):
            raise DraftworksError(
                f"vocab.size {size} is larger than the target's vocabulary of {len(counts)}"
            )
        if size < len(inside := set(always)):
            raise DraftworksError(
                f"vocab.size {size} has no room for the {len(inside)} tokens that must be in it"
            )
        rank = counts.astype(np.int64).copy()
        rank[list(inside)] = np.iinfo(np.int64).max
        chosen = np.argsort(-rank, kind="stable")[:size]
        return cls(torch.from_numpy(np.sort(chosen)), len(counts))

    def coverage(self, counts: NDArray[np.int64]) -> float:
        """Share of the counted tokens that the drafter can propose."""
        total = int(counts.sum())
        return float(counts[self.used.numpy()].sum() / total) if total else 0.0

    def save(self, path: Path) -> None:
        tensors = {"d2t": self.d2t, "t2d": self.t2d}
        commit_file(path, lambda temporary: save_file(tensors, temporary))

    @classmethod
    def load(cls, path: Path) -> "DraftVocabulary":
        """Raises DraftworksError when the file is missing, damaged or inconsistent."""
        try:
            tensors = load_file(path)
            return cls.from_offsets(tensors["d2t"], tensors["t2d"])
        except (OSError, SafetensorError, KeyError, DraftworksError) as error:
            raise DraftworksError(f"draft vocabulary {path} cannot be read: {error}") from None


def count_tokens(tokens: Iterable[NDArray[np.int64]], target_size: int) -> NDArray[np.int64]:
    """Occurrences of every target id over batches of token ids, [V].

    Raises DraftworksError for an id that the target does not have.
    """
    counts = np.zeros(target_size, dtype=np.int64)
    for batch in tokens:
        if len(batch) and int(batch.max()) >= target_size:
            raise DraftworksError(
                f"token id {batch.max()} is outside the target's vocabulary of {target_size:,}: "
                "the samples come from another target"
            )
        counts += np.bincount(batch, minlength=target_size)
    return counts
