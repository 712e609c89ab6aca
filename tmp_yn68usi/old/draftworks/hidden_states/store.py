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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftworks.errors import DraftworksError
from draftworks.records.inspection import Findings
from draftworks.records.manifest import ManifestWriter, iterate_manifest
from draftworks.records.quarantine import Quarantine
from draftworks.workspace import commit_file, digest, file_digest, remove_partial

KEPT = 100  # damaged files in quarantine
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
        return digest(sorted({(row["id"], row["sha256"]) for row in self.rows()}))

    def quarantine(self, findings: Findings) -> None:
        """Move the samples found damaged and what is foreign aside, and drop doubled rows. What
        is expected among them is extracted again.

        Of the damaged files no more than KEPT lie in quarantine, so that a store that is damaged
        as a whole does not fill the disk: the others are logged and overwritten.
        """
        kept = KEPT - sum(1 for _ in self._quarantine.folder.glob("*"))
        foreign = dict.fromkeys(findings.foreign, "foreign")
        moved = [*list(findings.damaged)[: max(0, kept)], *foreign]
        files = {name: self._file(name) for name in moved}
        self._quarantine.drop_duplicates()
        self._quarantine.put({**findings.damaged, **foreign}, files)

    def recover(self) -> None:
        """Carry to its end, or clear, what a killed run has begun. Call under the job's lock."""
        remove_partial(self.root)
        self._quarantine.finish()

    @property
    def _quarantine(self) -> Quarantine:
        return Quarantine(self.root, self.manifest, "id")

    def _file(self, name: str) -> Path:
        """Of a sample, or a foreign file that was found inside the store."""
        return self.path(name) if SAMPLE_ID.fullmatch(name) else self.root / name


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
