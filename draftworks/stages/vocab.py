"""Vocab: which target tokens the drafter can propose, by their frequency in the answers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftworks.eagle3.formats import read_checkpoint
from draftworks.eagle3.vocabulary import DraftVocabulary, count_tokens
from draftworks.errors import DraftworksError
from draftworks.progress import Progress
from draftworks.records.inspection import Findings, Inspection
from draftworks.stages.base import Check, Plan, Stage, Verdict, check
from draftworks.stages.generate import Generate
from draftworks.workspace import commit_json, file_digest

TARGET_TOKENS = 300_000  # more than the vocabularies of today; the map has a byte for each


class Vocab(Stage):
    name = "vocab"
    title = "draft vocabulary"
    unit = "map"
    inputs = (Generate,)
    record_name = "coverage.json"

    @property
    def map_file(self) -> Path:
        return self.directory / "vocabulary.safetensors"

    def vocabulary(self) -> DraftVocabulary:
        """The map. Raises DraftworksError when it is missing or damaged."""
        return DraftVocabulary.load(self.map_file)

    def settings(self) -> Mapping[str, Any]:
        return {"vocab": self.config.vocab.identity(), "inherited": self._inherited_digest()}

    def plan(self) -> Plan:
        size = self.config.vocab.size
        return Plan(self.name, 1, self.unit, size * 8 + TARGET_TOKENS, ("counting tokens",), 0.0)

    def prepare(self) -> list[Check]:
        return [check("vocabulary size", self._size_fits), check("tokens", self._tokens_known)]

    def run(self, progress: Progress) -> None:
        inputs = self.require_inputs()
        if self.already_complete(progress):
            return
        progress.begin(1, self.unit)
        progress.phase("counting tokens", total=len(self.of(Generate).store.index()))
        counts = count_tokens(self._loss_tokens(progress), self.target.vocab_size)
        inherited = self._inherited()
        vocabulary = inherited or DraftVocabulary.by_frequency(
            counts, self.config.vocab.size, self._always()
        )
        vocabulary.save(self.map_file)
        commit_json(
            self.record_file,
            {
                "coverage": vocabulary.coverage(counts),
                "draft_tokens": len(vocabulary),
                "target_tokens": self.target.vocab_size,
                "loss_tokens": int(counts.sum()),
                "distinct_tokens": int((counts > 0).sum()),
                "inherited": inherited is not None,
                "inputs": inputs,
                "sha256": file_digest(self.map_file),
            },
        )
        progress.advance()

    def inspect(self, inspection: Inspection) -> Verdict:
        record = self.record()
        damaged = self.damaged_files(inspection, {self.map_file: record.get("sha256")})
        return self.verdict(
            inspection,
            expected=1,
            done=int(bool(record) and not damaged),
            findings=Findings(damaged=damaged),
            problems=self.changed_inputs(record),
        )

    def content(self) -> str:
        return str(self.record().get("sha256", ""))

    def _loss_tokens(self, progress: Progress) -> Iterator[NDArray[np.int64]]:
        for sample in self.of(Generate).store.samples():
            yield np.array(sample.token_ids[sample.prompt_tokens :], dtype=np.int64)
            progress.step()

    def _always(self) -> list[int]:
        """Stop tokens and the configured ones, as ids. Raises DraftworksError for an unknown."""
        tokenizer = self.target.tokenizer
        known = tokenizer.get_vocab()
        if unknown := [token for token in self.config.vocab.always if token not in known]:
            raise DraftworksError(
                f"vocab.always: {', '.join(map(repr, unknown))} not in the target's vocabulary"
            )
        return sorted(self.target.stop_ids | {known[token] for token in self.config.vocab.always})

    def _inherited(self) -> DraftVocabulary | None:
        """The map of the drafter that training starts from: with another map its head's rows
        would mean other tokens."""
        start = self.config.train.warm_start
        return read_checkpoint(Path(start).expanduser()).vocabulary if start else None

    def _inherited_digest(self) -> str | None:
        start = self.config.train.warm_start
        if not start:
            return None
        weights = Path(start).expanduser() / "model.safetensors"
        if not weights.is_file():
            raise DraftworksError(f"train.warm_start {start}: no model.safetensors in that folder")
        return file_digest(weights)

    def _size_fits(self) -> str:
        size, available = self.config.vocab.size, self.target.vocab_size
        inherited = self._inherited()
        if inherited is not None and len(inherited) != size:
            raise DraftworksError(
                f"vocab.size is {size:,}, but the drafter in train.warm_start has "
                f"{len(inherited):,} draft tokens, and its map is inherited. Set vocab.size to it."
            )
        if size > available:
            raise DraftworksError(
                f"vocab.size {size:,} is larger than the target's vocabulary of {available:,}. "
                "Choose a smaller draft vocabulary; 32,000 is usual for large targets."
            )
        return f"{size:,} of {available:,} tokens"

    def _tokens_known(self) -> str:
        return f"{len(self._always())} tokens always in"
