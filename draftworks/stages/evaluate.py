"""Evaluate: acceptance by real speculation on held-out prompts, beside the offline estimate.

The two must agree. When they do not, a convention is wrong somewhere between hidden states,
trainer and engine, and the gate behind this stage stays shut.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftworks.eagle3.acceptance import Acceptance
from draftworks.errors import DraftworksError
from draftworks.progress import Progress
from draftworks.records.inspection import Findings, Inspection
from draftworks.records.manifest import ManifestWriter, read_manifest, rewrite_manifest
from draftworks.records.samples import Sample
from draftworks.stages.base import NO_RATE, Check, Plan, Stage, Verdict, check
from draftworks.stages.extract import Extract
from draftworks.stages.generate import Generate
from draftworks.stages.train import Train
from draftworks.stages.vocab import Vocab
from draftworks.training.packing import plan_packs, read_ahead
from draftworks.training.step import pack_loss, walk_pack
from draftworks.workspace import commit_json, file_digest

if TYPE_CHECKING:
    from draftworks.engines.reference import ReferenceEngine
    from draftworks.engines.speculation import Speculator

TIE = 1e-3  # logits this close are one value in float32 arithmetic of another order


class Evaluate(Stage):
    name = "evaluate"
    title = "evaluation"
    unit = "prompts"
    inputs = (Train,)
    record_name = "evaluation.json"

    @property
    def manifest(self) -> Path:
        return self.directory / "manifest.jsonl"

    def settings(self) -> Mapping[str, Any]:
        return {"evaluate": self.config.evaluate.identity()}

    def plan(self) -> Plan:
        count = self.config.evaluate.prompts
        return Plan(self.name, count, self.unit, count * 1000, ("held-out conversations", NO_RATE))

    def prepare(self) -> list[Check]:
        return [check("held-out prompts", self._enough_prompts)]

    def run(self, progress: Progress) -> None:
        # The engines bring transformers: seconds that only the job itself should spend.
        from draftworks.engines.reference import ReferenceEngine
        from draftworks.engines.speculation import Speculator

        inputs = self.require_inputs()
        if self.already_complete(progress):
            return
        settings = self.config.evaluate
        samples = self._held_out()
        done = self._keep_ours({sample.id for sample in samples})
        progress.begin(len(samples), self.unit, len(done))
        progress.phase("loading target and drafter")
        dtype = getattr(torch, settings.dtype)
        engine = ReferenceEngine(self.target, self.of(Extract).layers, dtype)
        speculator = Speculator(engine, self.of(Train).drafter(dtype), self.of(Vocab).vocabulary())
        progress.phase("speculating")
        writer = ManifestWriter(self.manifest)
        missing = [sample for sample in samples if sample.id not in done]
        for start in range(0, len(missing), settings.batch):
            batch = missing[start : start + settings.batch]
            progress.check_stop()
            writer.append(self._measure(engine, speculator, batch))
            progress.advance(len(batch))
        writer.close()
        progress.phase("estimating")
        commit_json(self.record_file, {"inputs": inputs, **self._measured(self._estimate(samples))})

    def inspect(self, inspection: Inspection) -> Verdict:
        record = self.record()
        held_out = {sample.id for sample in self._held_out()}
        drafter = self.of(Train).content()
        rows = [row for row in read_manifest(self.manifest) if row["drafter"] == drafter]
        measured = Counter(name for row in rows for name in row["sample_ids"])
        return self.verdict(
            inspection,
            expected=len(held_out),
            done=record.get("prompts", 0),
            findings=Findings(
                missing=tuple(sorted(held_out - measured.keys())),
                duplicate=tuple(name for name, count in measured.items() if count > 1),
                foreign=tuple(name for name in measured if name not in held_out),
            ),
            problems=self._problems(record),
        )

    def content(self) -> str:
        return file_digest(self.record_file) if self.record() else ""

    def _enough_prompts(self) -> str:
        prompts = len(self.of(Generate).prompts)
        if prompts < 2:
            raise DraftworksError("one prompt cannot be split into training and validation")
        held_out = max(1, round(prompts * self.config.train.validation_share))
        return f"{min(held_out, self.config.evaluate.prompts)} of {held_out} held-out prompts"

    def _held_out(self) -> list[Sample]:
        """The evaluated samples: whole conversations that training never saw."""
        chosen = {
            entry.sample_id for entry in self.of(Train).split()[1][: self.config.evaluate.prompts]
        }
        return [sample for sample in self.of(Generate).store.samples() if sample.id in chosen]

    def _keep_ours(self, held_out: set[str]) -> set[str]:
        """Drop the rows of another drafter, of other prompts, and what is there twice. Returns
        the ids that are measured."""
        done: set[str] = set()

        def keep(row: dict[str, Any]) -> bool:
            names = set(row["sample_ids"])
            ours = row["drafter"] == self.of(Train).content()
            if fits := ours and names <= held_out and done.isdisjoint(names):
                done.update(names)
            return fits

        rewrite_manifest(self.manifest, keep)
        return done

    def _measure(
        self, engine: "ReferenceEngine", speculator: "Speculator", batch: list[Sample]
    ) -> dict[str, Any]:
        """Decode a batch with and without the drafter. Returns its manifest row."""
        settings = self.config.evaluate
        prompts = [sample.token_ids[: sample.prompt_tokens] for sample in batch]
        result = speculator.decode(prompts, settings.max_new_tokens, settings.draft_tokens)
        plain = engine.generate(prompts, settings.max_new_tokens)
        pairs = list(zip(prompts, result.answers, (item.tokens for item in plain), strict=True))
        differing = [pair for pair in pairs if pair[1] != pair[2]]
        ties = sum(_parted_at_a_tie(engine, *pair) for pair in differing)
        return {
            "drafter": self.of(Train).content(),
            "sample_ids": [sample.id for sample in batch],
            "drafts": result.acceptance.drafts,
            "accepted": result.acceptance.accepted,
            "tokens": sum(map(len, result.answers)),
            "differing": len(differing),
            "ties": ties,
        }

    def _estimate(self, samples: list[Sample]) -> Acceptance:
        """Walk the same conversations' recorded answers over their stored states."""
        train = self.of(Train)
        vocabulary = self.of(Vocab).vocabulary()
        drafter = train.drafter()
        head = self.target.head()[vocabulary.used].float()
        names = {sample.id for sample in samples}
        entries = [entry for entry in train.split()[1] if entry.sample_id in names]
        budget = self.config.train.pack_tokens
        packs = plan_packs(entries, budget, range(len(entries)))
        steps = self.config.evaluate.draft_tokens
        one = torch.ones(steps, dtype=torch.long)
        total = Acceptance(0, (0,) * steps)
        store = self.of(Extract).store
        with torch.no_grad():
            for pack in read_ahead(store, packs, self.target.stop_ids):
                outcome = pack_loss(drafter, head, vocabulary, pack, one, 1.0, guess=True)
                total += walk_pack(outcome, pack.lengths, steps)
        return total

    def _measured(self, estimated: Acceptance) -> dict[str, Any]:
        rows = read_manifest(self.manifest)
        measured = Acceptance(0, (0,) * self.config.evaluate.draft_tokens)
        for row in rows:
            measured += Acceptance(row["drafts"], tuple(row["accepted"]))
        return {
            "prompts": sum(len(row["sample_ids"]) for row in rows),
            "tokens": sum(row["tokens"] for row in rows),
            "measured": _summary(measured),
            "estimated": _summary(estimated),
            "differing": sum(row["differing"] for row in rows),
            "ties": sum(row["ties"] for row in rows),
        }

    def _problems(self, record: Mapping[str, Any]) -> list[str]:
        if not record:
            return []
        problems = self.changed_inputs(record)
        real = record["differing"] - record["ties"]
        if real and self.config.evaluate.dtype == "float32":
            problems.append(
                f"{real} of {record['prompts']} speculative outputs differ from plain greedy "
                "decoding: verification is broken"
            )
        if not self.agree(record):
            problems.append(
                f"acceptance length {record['measured']['length']:.2f} measured, "
                f"{record['estimated']['length']:.2f} estimated, tolerance "
                f"{self.config.evaluate.tolerance:.0%}. Trainer and engine disagree about the "
                "hidden states; compare layer ids and final norm"
            )
        return problems

    def agree(self, record: Mapping[str, Any]) -> bool:
        """Whether measured and estimated acceptance length lie within the tolerance."""
        measured, estimated = record["measured"]["length"], record["estimated"]["length"]
        return bool(abs(measured - estimated) <= self.config.evaluate.tolerance * estimated)


def _summary(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "length": acceptance.length,
        "rates": acceptance.rates,
        "drafts": acceptance.drafts,
        "accepted": acceptance.accepted,
    }


def _parted_at_a_tie(
    engine: "ReferenceEngine", prompt: tuple[int, ...], answer: list[int], other: list[int]
) -> bool:
    """Whether two answers part where the target's two best tokens are numerically equal, so
    that the order of additions decides."""
    common = 0
    while common < min(len(answer), len(other)) and answer[common] == other[common]:
        common += 1
    (states,) = engine.capture([[*prompt, *answer[:common]]])
    best = (states.last[-1] @ engine.head.T).topk(2).values
    return bool(best[0] - best[1] < TIE)
