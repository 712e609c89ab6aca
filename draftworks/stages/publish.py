"""Publish: the drafter in the forms that engines load, reloaded and compared before it counts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftworks import __version__
from draftworks.eagle3.drafter import Drafter
from draftworks.eagle3.formats import Format, TargetFacts, read_checkpoint, write_checkpoint
from draftworks.errors import DraftworksError
from draftworks.progress import Progress
from draftworks.records.inspection import Findings, Inspection
from draftworks.stages.base import Check, Plan, Stage, Verdict, check
from draftworks.stages.evaluate import Evaluate
from draftworks.stages.extract import Extract
from draftworks.stages.train import Train
from draftworks.stages.vocab import Vocab
from draftworks.training.packing import load_pack
from draftworks.training.step import unroll
from draftworks.workspace import commit_directory, commit_json, file_digest, remove_partial


class Publish(Stage):
    name = "publish"
    title = "published drafter"
    unit = "formats"
    inputs = (Train, Evaluate)
    record_name = "published.json"

    def folder(self, form: Format) -> Path:
        return self.directory / form

    def settings(self) -> Mapping[str, Any]:
        return {"publish": self.config.publish.identity()}

    def plan(self) -> Plan:
        count = len(self.config.publish.formats)
        size = 2 * sum(self.of(Train).weights())
        return Plan(self.name, count, self.unit, count * size, ("bfloat16 weights",), 0.0)

    def prepare(self) -> list[Check]:
        return [check("formats", lambda: ", ".join(self.config.publish.formats))]

    def run(self, progress: Progress) -> None:
        inputs = self.require_inputs()
        if self.already_complete(progress):
            return
        remove_partial(self.directory)
        progress.begin(len(self.config.publish.formats), self.unit)
        drafter = self.of(Train).drafter()
        vocabulary = self.of(Vocab).vocabulary()
        files: dict[str, str] = {}
        for form in self.config.publish.formats:
            progress.check_stop()
            progress.phase(f"writing {form}")
            with commit_directory(self.folder(form)) as folder:
                write_checkpoint(folder, form, drafter, vocabulary, self.facts, self._notes())
                (folder / "README.md").write_text(self._card(form), encoding="utf-8")
                self.require_same_logits(folder, drafter)
            for path in sorted(self.folder(form).iterdir()):
                files[f"{form}/{path.name}"] = file_digest(path)
            progress.advance()
        commit_json(self.record_file, {"files": files, "inputs": inputs})

    def inspect(self, inspection: Inspection) -> Verdict:
        record = self.record()
        formats = self.config.publish.formats
        files = {self.directory / name: sha256 for name, sha256 in record.get("files", {}).items()}
        damaged = self.damaged_files(inspection, files)
        spoilt = {name.split("/")[0] for name in damaged}
        there = {path for form in formats for path in self.folder(form).rglob("*")}
        foreign = sorted(str(path.relative_to(self.directory)) for path in there - files.keys())
        return self.verdict(
            inspection,
            expected=len(formats),
            done=len(set(formats) - spoilt) if record else 0,
            findings=Findings(foreign=tuple(foreign) if record else (), damaged=damaged),
            problems=self.changed_inputs(record),
        )

    def content(self) -> str:
        return file_digest(self.record_file) if self.record() else ""

    def require_same_logits(self, folder: Path, drafter: Drafter) -> None:
        """Reload an export and hold its logits on a held-out sample against the trained ones.

        Exactly equal: both sides use the weights rounded to bfloat16, as the engines do.
        """
        checkpoint = read_checkpoint(folder)
        reloaded = Drafter(checkpoint.shape, drafter.embeddings)
        reloaded.load_state_dict(checkpoint.weights)
        rounded = Drafter(drafter.shape, drafter.embeddings)
        rounded.load_state_dict(
            {name: tensor.bfloat16() for name, tensor in drafter.state_dict().items()}
        )
        entry = self.of(Train).split()[1][0]
        pack = load_pack(self.of(Extract).store, [entry], self.target.stop_ids)
        steps = self.config.evaluate.draft_tokens
        with torch.no_grad():
            ours = rounded.logits(unroll(rounded, pack, steps))
            theirs = reloaded.logits(unroll(reloaded, pack, steps))
        if not torch.equal(ours, theirs):
            raise DraftworksError(
                f"export {folder.name}: the reloaded drafter gives other logits "
                f"(largest difference {float((ours - theirs).abs().max()):.3g})"
            )
        if checkpoint.layers != self.of(Extract).layers:
            raise DraftworksError(
                f"export {folder.name}: names layers {checkpoint.layers}, trained on "
                f"{self.of(Extract).layers}"
            )

    @property
    def facts(self) -> TargetFacts:
        return TargetFacts(
            self.config.target.model,
            self.target.architectures,
            self.of(Extract).layers,
            self.config.evaluate.draft_tokens,
        )

    def _notes(self) -> dict[str, Any]:
        """Provenance: enough to find everything that made this drafter."""
        evaluation = self.of(Evaluate).record()
        return {
            "draftworks": __version__,
            "target": self.config.target.model,
            "identity": self.of(Train).identity,
            **({"part": self.workspace.part} if self.workspace.part else {}),
            "coverage": self.of(Vocab).record()["coverage"],
            "acceptance_length": {
                "measured": evaluation["measured"]["length"],
                "estimated": evaluation["estimated"]["length"],
            },
            "config": self.config.model_dump(mode="json"),
        }

    def _card(self, form: Format) -> str:
        """README.md of the published folder."""
        settings = self.config.evaluate
        evaluation = self.of(Evaluate).record()
        command = (
            "vllm serve TARGET --speculative-config '"
            f'{{"method": "eagle3", "model": "THIS_FOLDER", '
            f'"num_speculative_tokens": {settings.draft_tokens}}}\''
            if form == "speculators"
            else "python -m sglang.launch_server --model-path TARGET "
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path THIS_FOLDER "
            f"--speculative-num-steps {settings.draft_tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {settings.draft_tokens + 1}"
        )
        return (
            f"# EAGLE-3 drafter for {self.config.target.model}\n\n"
            f"Acceptance length {evaluation['measured']['length']:.2f} with "
            f"{settings.draft_tokens} draft tokens, measured by greedy speculation on "
            f"{evaluation['prompts']} held-out prompts "
            f"(estimated {evaluation['estimated']['length']:.2f}).\n\n"
            f"{self._part_notice()}"
            f"    {command}\n\n"
            f"Made by Draftworks {__version__}; draftworks.json says how.\n"
        )

    def _part_notice(self) -> str:
        part = self.workspace.part
        return f"**An experiment, trained on a part of the data: {part}.**\n\n" if part else ""
