"""The store of hidden states.

One safetensors file per sample, fanned out over 256 directories by its id:

    token_ids [T] int32, aux [T, 3, H], last [T, H] (states as stored dtype),
    argmax [T] int32 (the target's own next token over its full vocabulary)

with the convention in its metadata: canonical layer ids, whether the final norm was applied,
engine, version, dtype. A manifest row follows the file. This module runs inside engine
processes too: torch, safetensors and the standard library only.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftworks.errors import DraftworksError
from draftworks.records.manifest import ManifestWriter, iterate_manifest, rewrite_manifest
from draftworks.workspace import commit_file, digest, file_digest

SAMPLE_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Convention:
    """What the states of a store are. Recorded in every file, never guessed.

    layers: canonical ids of the auxiliary states (k = the state after k layers).
    norm_applied: whether `last` already went through the target's final norm.
    """

    layers: tuple[int, int, int]
    norm_applied: bool
    dtype: str
    engine: str
    engine_version: str

    def metadata(self, sample_id: str) -> dict[str, str]:
        """As one JSON text: safetensors writes several entries in an order of chance, and equal
        states would have different checksums."""
        return {"states": json.dumps({"id": sample_id, **asdict(self)}, sort_keys=True)}


@dataclass(frozen=True)
class SampleStates:
    """One sample as it lies on disk: token_ids [T], aux [T, 3, H], last [T, H], argmax [T]."""

    token_ids: Tensor
    aux: Tensor
    last: Tensor
    argmax: Tensor


class StateStore:
    """Reads a store. Opening reads the manifest only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = root / "manifest.jsonl"

    def rows(self) -> Iterator[dict[str, Any]]:
        return iterate_manifest(self.manifest)

    def ids(self) -> set[str]:
        """Ids of the committed samples."""
        return {row["id"] for row in self.rows()}

    def path(self, sample_id: str) -> Path:
        """Where a sample lies. Raises DraftworksError for an id that is no digest, so that no
        id from outside can name a path."""
        if not SAMPLE_ID.fullmatch(sample_id):
            raise DraftworksError(f"sample id {sample_id!r}: expected 16 hexadecimal digits")
        return self.root / sample_id[:2] / f"{sample_id}.safetensors"

    def read(self, sample_id: str) -> SampleStates:
        """Raises DraftworksError naming file and sample when it is missing or damaged."""
        path = self.path(sample_id)
        try:
            with safe_open(path, framework="pt") as file:
                return SampleStates(
                    file.get_tensor("token_ids"),
                    file.get_tensor("aux"),
                    file.get_tensor("last"),
                    file.get_tensor("argmax"),
                )
        except (OSError, SafetensorError) as error:
            raise DraftworksError(
                f"hidden states of sample {sample_id}: {path} cannot be read ({error}). "
                "Run the extract stage again: it makes the missing samples anew."
            ) from None

    def digest(self) -> str:
        """Digest of what the store holds, whatever the order of commitment."""
        return digest(sorted((row["id"], row["sha256"]) for row in self.rows()))

    def faults(
        self, expected: dict[str, int], convention: Convention, hidden_size: int, *, deep: bool
    ) -> dict[str, str]:
        """Sample id -> what is wrong with it; empty when the store is sound.

        expected: sample id -> T. Holds the manifest against the files' sizes; with `deep` also
        against their headers and checksums, which reads every byte.
        """
        found: dict[str, str] = {}
        seen: set[str] = set()
        for row in self.rows():
            name = row["id"]
            if name in seen:
                found[name] = "twice in the manifest"
            elif name not in expected:
                found[name] = "not one of the generated samples"
            elif fault := self._fault(row, expected[name], convention, hidden_size, deep):
                found[name] = fault
            seen.add(name)
        return found

    def discard(self, names: Collection[str]) -> None:
        """Take samples out of the manifest, so that they are extracted again."""
        if names:
            rewrite_manifest(self.manifest, lambda row: row["id"] not in names)

    def _fault(
        self,
        row: dict[str, Any],
        tokens: int,
        convention: Convention,
        hidden_size: int,
        deep: bool,
    ) -> str | None:
        path = self.path(row["id"])
        if not path.is_file():
            return f"{path.name} is missing"
        if path.stat().st_size != row["bytes"]:
            return f"{path.name} has {path.stat().st_size} bytes, expected {row['bytes']}"
        if not deep:
            return None
        if file_digest(path) != row["sha256"]:
            return f"{path.name} differs from its checksum"
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        wanted = {
            "token_ids": (tokens,),
            "aux": (tokens, 3, hidden_size),
            "last": (tokens, hidden_size),
            "argmax": (tokens,),
        }
        if shapes != wanted:
            return f"shapes {shapes}, expected {wanted}"
        if metadata != (expected := convention.metadata(row["id"])):
            return f"recorded as {metadata}, expected {expected}"
        return None


class StateWriter:
    """Commits samples to a store: the file first, then its row."""

    def __init__(self, store: StateStore, convention: Convention) -> None:
        self._store = store
        self._convention = convention
        self._manifest = ManifestWriter(store.manifest)

    def commit(self, sample_id: str, token_ids: Sequence[int], states: SampleStates) -> None:
        """Write one sample. Raises DraftworksError unless rows, ids and values are right."""
        self._check(sample_id, token_ids, states)
        path = self._store.path(sample_id)
        tensors = {name: tensor.contiguous() for name, tensor in vars(states).items()}
        metadata = self._convention.metadata(sample_id)
        commit_file(path, lambda temporary: save_file(tensors, temporary, metadata))
        self._manifest.append(
            {
                "id": sample_id,
                "rows": len(token_ids),
                "bytes": path.stat().st_size,
                "sha256": file_digest(path),
                **asdict(self._convention),
            }
        )

    def _check(self, sample_id: str, token_ids: Sequence[int], states: SampleStates) -> None:
        expected = len(token_ids)
        rows = {name: len(tensor) for name, tensor in vars(states).items()}
        if set(rows.values()) != {expected}:
            raise DraftworksError(f"sample {sample_id}: {expected} tokens were sent, got {rows}")
        if states.token_ids.tolist() != list(token_ids):
            raise DraftworksError(f"sample {sample_id}: the states belong to other tokens")
        for name in ("aux", "last"):
            if not torch.isfinite(getattr(states, name)).all():
                raise DraftworksError(
                    f"sample {sample_id}: {name} holds values that are not finite"
                )

    def close(self) -> None:
        self._manifest.close()
