"""Extract: every sample once through the target, its hidden states to disk."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from draftworks.errors import DraftworksError
from draftworks.hidden_states.store import Convention, SampleStates, StateStore, StateWriter
from draftworks.hidden_states.verification import faults
from draftworks.progress import Progress
from draftworks.records.inspection import Findings, Inspection
from draftworks.records.samples import Sample
from draftworks.stages.base import NO_RATE, Check, Plan, Stage, Verdict, check, size
from draftworks.stages.generate import Generate


class Extract(Stage):
    name = "extract"
    title = "hidden states"
    unit = "samples"
    inputs = (Generate,)

    @property
    def store(self) -> StateStore:
        return StateStore(self.directory)

    @property
    def layers(self) -> tuple[int, int, int]:
        return self.target.auxiliary_layers(self.config.extract.layers)

    @property
    def convention(self) -> Convention:
        return Convention(
            layers=self.layers,
            norm_applied=True,
            dtype=self.config.extract.dtype,
            engine=self.config.extract.engine,
            engine_version=version("transformers"),
        )

    def settings(self) -> Mapping[str, Any]:
        return {"extract": self.config.extract.identity(), "layers": self.layers}

    def plan(self) -> Plan:
        sizes = self.of(Generate).sizes
        per_token = 4 * sizes.hidden_size * 2 + 8
        # One byte a value, and a float32 scale for each token and layer.
        small = sizes.tokens * (4 * sizes.hidden_size + 4 * 4 + 8)
        rate = self.rate(self.config.plan.extract_rate)
        served = self.config.extract.engine != "reference"
        gpus = self.config.extract.server.tensor_parallel if served else 0
        return Plan(
            self.name,
            sizes.samples,
            self.unit,
            sizes.tokens * per_token,
            (
                f"{sizes.tokens:,} tokens of {per_token:,} bytes in {self.config.extract.dtype} "
                f"(in float8 it would be {size(small)})",
                sizes.source,
                rate.source if rate else NO_RATE,
                *self.loading(),
            ),
            sizes.tokens / rate.tokens / 3600 if rate else None,
            gpus,
            round((self.config.plan.target_gb or 0) * 1e9 / gpus) if gpus else 0,
        )

    def prepare(self) -> list[Check]:
        return [check("engine", self._engine_available), check("layers", self._layers_valid)]

    def run(self, progress: Progress) -> None:
        from draftworks.engines.reference import ReferenceEngine

        self.require_inputs()
        self.store.recover()
        self.store.quarantine(self._faults(Inspection(progress=progress)))
        samples = list(self.of(Generate).store.samples())
        done = self.store.ids()
        progress.begin(len(samples), self.unit, len(done))
        if done.issuperset(sample.id for sample in samples):
            return
        progress.phase("loading target")
        engine = ReferenceEngine(self.target, self.layers)
        writer = StateWriter(self.store, self.convention)
        progress.phase("extracting")
        try:
            for batch in _batches(samples, self.config.extract.batch_tokens):
                missing = [sample for sample in batch if sample.id not in done]
                if not missing:
                    continue
                progress.check_stop()
                # The whole batch runs even if a part of it is missing: the same shapes give
                # the same bits as an uninterrupted run.
                captured = engine.capture([sample.token_ids for sample in batch])
                for sample, states in zip(batch, captured, strict=True):
                    if sample.id in done:
                        continue
                    ids = torch.tensor(sample.token_ids, dtype=torch.int32)
                    writer.commit(
                        sample.id,
                        sample.token_ids,
                        SampleStates(ids, states.aux, states.last, states.argmax),
                    )
                progress.advance(len(missing))
        finally:
            writer.close()

    def inspect(self, inspection: Inspection) -> Verdict:
        findings = self._faults(inspection)
        expected = self.of(Generate).store.sample_ids()
        done = (self.store.ids() & expected) - findings.damaged.keys()
        return self.verdict(inspection, len(expected), len(done), findings)

    def content(self) -> str:
        return self.store.digest()

    def _faults(self, inspection: Inspection) -> Findings:
        return faults(
            self.store,
            self.of(Generate).store.sample_ids(),
            self.convention,
            self.target.hidden_size,
            inspection,
        )

    def _engine_available(self) -> str:
        engine = self.config.extract.engine
        if engine != "reference":
            raise DraftworksError(
                f"extract.engine {engine!r}: this version extracts with the built-in engine only; "
                "set extract.engine to reference"
            )
        return "reference engine (transformers)"

    def _layers_valid(self) -> str:
        return f"auxiliary states after layers {', '.join(map(str, self.layers))}"


def _batches(samples: Sequence[Sample], budget: int) -> Iterator[list[Sample]]:
    """Samples of like length together, longest first, at most `budget` padded tokens a batch."""
    ordered = sorted(samples, key=lambda sample: (-len(sample.token_ids), sample.id))
    start = 0
    while start < len(ordered):
        rows = max(1, budget // len(ordered[start].token_ids))
        yield ordered[start : start + rows]
        start += rows
