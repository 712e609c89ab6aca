"""Samples: token ids and loss mask of one answered conversation, in Parquet parts.

A part is written once and listed in `manifest.jsonl` with the ids it holds; a conversation
whose answer cannot be used is in its part's `rejected` with the reason, so that none is lost
without a trace.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftworks.errors import DraftworksError
from draftworks.records.inspection import NO_ROW, Committed, Findings, Inspection
from draftworks.records.manifest import ManifestWriter, read_manifest
from draftworks.records.quarantine import FOLDER, LOG, Quarantine
from draftworks.workspace import TEMPORARY, commit_file, digest, file_digest, remove_partial

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
    ]
)
SAMPLE_COLUMNS = ("prompt_tokens", "finish_reason", "text")


@dataclass(frozen=True)
class Sample:
    """One conversation with the target's answer.

    token_ids: prompt and answer as the engine saw and wrote them, the stop token included.
    prompt_tokens: how many of them are the prompt; the rest are the loss tokens.
    finish_reason: "stop" or "length".
    """

    conversation_id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    text: str

    @property
    def id(self) -> str:
        """Digest of the token ids: other tokens are another sample."""
        return digest(list(self.token_ids))

    @property
    def loss_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens


@dataclass(frozen=True)
class SampleEntry:
    """What planning needs of a sample: its ids and lengths in tokens, without the tokens."""

    sample_id: str
    conversation_id: str
    tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Rejected:
    """An answer that was not kept, and why (empty, truncated, content_filter, repetition)."""

    conversation_id: str
    reason: str


class SampleStore:
    """The parts of one generation. Reading needs no lock; writing happens under the job's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = root / "manifest.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        return read_manifest(self.manifest)

    def conversations(self, without: Collection[str] = ()) -> set[str]:
        """Ids of the conversations that are committed, kept or rejected; without: parts that are
        left out."""
        rows = [row for row in self.rows() if row["file"] not in without]
        kept = {name for row in rows for name in row["conversation_ids"]}
        return kept | {name for row in rows for name in row["rejected"]}

    def sample_ids(self) -> set[str]:
        return {name for row in self.rows() for name in row["sample_ids"]}

    def rejected(self) -> Counter[str]:
        """Reason -> count."""
        return Counter(reason for row in self.rows() for reason in row["rejected"].values())

    def samples(self, of: Collection[str] | None = None) -> Iterator[Sample]:
        """All samples, part by part; `of` some ids, only the parts that hold them are read.
        Raises DraftworksError on a missing or damaged part."""
        for row in self.rows():
            if of is not None and not any(name in of for name in row["sample_ids"]):
                continue
            for values in self._read(row, ["conversation_id", "token_ids", *SAMPLE_COLUMNS]):
                tokens = tuple(values.pop("token_ids"))
                yield Sample(token_ids=tokens, **values)

    def index(self) -> list[SampleEntry]:
        """Ids and lengths of all samples; reads no tokens. Raises as `samples` does."""
        columns = ["sample_id", "conversation_id", "tokens", "prompt_tokens"]
        return [SampleEntry(**values) for row in self.rows() for values in self._read(row, columns)]

    def digest(self) -> str:
        """Digest of what the parts hold, whatever the order of their commitment."""
        return digest(sorted(row["sha256"] for row in self.rows()))

    def faults(self, wanted: Collection[str], inspection: Inspection) -> Findings:
        """What is wrong with the parts, read as closely as `inspection` says.

        missing: of the `wanted` conversations. foreign: other conversations, and files that no row
        names. duplicate and damaged: parts; a part is damaged too when it holds a conversation
        that an earlier one holds, or one that nobody wants.
        """
        rows = {row["file"]: row for row in self.rows()}
        damaged = inspection.damaged(
            [
                Committed(name, self.root / name, row["sha256"], row["bytes"])
                for name, row in rows.items()
            ]
        )
        held: set[str] = set()
        for file, row in rows.items():
            names = {*row["conversation_ids"], *row["rejected"]}
            if doubled := names & held:
                damaged.setdefault(file, f"holds conversation {min(doubled)} of another part")
            if strange := names.difference(wanted):
                damaged.setdefault(
                    file, f"holds conversation {min(strange)}, not one of the prompts"
                )
            held |= names
        counts = Counter(row["file"] for row in self.rows())
        return Findings(
            missing=tuple(name for name in wanted if name not in held),
            duplicate=tuple(file for file, count in counts.items() if count > 1),
            foreign=(*sorted(held.difference(wanted)), *self._strange_files(set(rows))),
            damaged=damaged,
        )

    def quarantine(self, findings: Findings) -> None:
        """Move the parts found damaged and the foreign files aside, and finish what a killed run
        has begun. Their conversations are generated again."""
        files = {name: self.root / name for name in (*findings.damaged, *findings.foreign)}
        foreign = {name: NO_ROW for name in findings.foreign if files[name].exists()}
        self._quarantine.drop_duplicates()
        self._quarantine.put({**findings.damaged, **foreign}, files)

    def recover(self) -> None:
        """Carry to its end, or clear, what a killed run has begun. Call under the job's lock."""
        remove_partial(self.root)
        self._quarantine.finish()

    @property
    def _quarantine(self) -> Quarantine:
        return Quarantine(self.root, self.manifest, "file")

    def _strange_files(self, listed: set[str]) -> list[str]:
        """Files that no row names. The next part may lie there before its row does."""
        ours = {*listed, part_name(next_part(listed)), self.manifest.name, FOLDER, LOG}
        names = {path.name for path in self.root.glob("*")} - ours
        return sorted(name for name in names if not name.endswith(TEMPORARY))

    def _read(self, row: dict[str, Any], columns: list[str]) -> list[dict[str, Any]]:
        path = self.root / row["file"]
        try:
            values: list[dict[str, Any]] = pq.read_table(path, columns=columns).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise DraftworksError(
                f"samples {path} cannot be read: {error}. Run the generate stage again: it makes "
                "that part anew."
            ) from None
        return values


class SampleWriter:
    """Commits parts of samples, numbered on from the last one in the manifest."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store
        self._manifest = ManifestWriter(store.manifest)
        self._number = next_part(row["file"] for row in store.rows())

    def commit(self, samples: Sequence[Sample], rejected: Sequence[Rejected]) -> None:
        """Write one part, then its manifest row."""
        name = part_name(self._number)
        path = self._store.root / name
        table = pa.Table.from_pylist(
            [
                {
                    "sample_id": sample.id,
                    "conversation_id": sample.conversation_id,
                    "token_ids": sample.token_ids,
                    "tokens": len(sample.token_ids),
                    "prompt_tokens": sample.prompt_tokens,
                    "finish_reason": sample.finish_reason,
                    "text": sample.text,
                }
                for sample in samples
            ],
            schema=SCHEMA,
        )
        commit_file(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
        self._manifest.append(
            {
                "file": name,
                "sha256": file_digest(path),
                "bytes": path.stat().st_size,
                "conversation_ids": [sample.conversation_id for sample in samples],
                "sample_ids": [sample.id for sample in samples],
                "tokens": sum(len(sample.token_ids) for sample in samples),
                "loss_tokens": sum(sample.loss_tokens for sample in samples),
                "truncated": sum(sample.finish_reason == "length" for sample in samples),
                "rejected": {item.conversation_id: item.reason for item in rejected},
            }
        )
        self._number += 1

    def close(self) -> None:
        self._manifest.close()


def part_name(number: int) -> str:
    return f"part-{number:06d}.parquet"


def next_part(files: Iterable[str]) -> int:
    """The number after the last of the committed parts."""
    return 1 + max((int(file[5:11]) for file in files), default=-1)
