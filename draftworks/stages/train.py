"""Train: the drafter, by EAGLE-3's training-time test."""

import json
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftworks.eagle3.drafter import Drafter, DrafterShape
from draftworks.eagle3.formats import read_checkpoint, rope_of
from draftworks.errors import DraftworksError
from draftworks.estimates.scaling import Scaled, Work, scale
from draftworks.progress import Progress
from draftworks.records.inspection import Findings, Inspection
from draftworks.records.samples import SampleEntry
from draftworks.stages.base import NO_RATE, Check, Plan, Stage, Verdict, check
from draftworks.stages.extract import Extract
from draftworks.stages.generate import Generate
from draftworks.stages.vocab import Vocab
from draftworks.training.loop import Data, Trainer, plan_steps
from draftworks.training.memory import keep_freed_memory
from draftworks.training.packing import split
from draftworks.workspace import commit_file, commit_json, file_digest, remove_partial


class Train(Stage):
    name = "train"
    title = "training"
    unit = "steps"
    inputs = (Generate, Vocab, Extract)
    record_name = "training.json"

    @property
    def weights_file(self) -> Path:
        return self.directory / "drafter.safetensors"

    @property
    def metrics_file(self) -> Path:
        return self.directory / "metrics.jsonl"

    @cached_property
    def shape(self) -> DrafterShape:
        """The drafter's sizes: those configured, else the target's."""
        chosen = self.config.train.drafter
        text = self.target.text_config
        heads = chosen.heads or int(text["num_attention_heads"])
        return DrafterShape(
            hidden_size=self.target.hidden_size,
            intermediate_size=chosen.intermediate_size or int(text["intermediate_size"]),
            heads=heads,
            kv_heads=chosen.kv_heads or chosen.heads or int(text["num_key_value_heads"]),
            head_dim=chosen.head_dim
            or int(text.get("head_dim") or self.target.hidden_size // heads),
            draft_vocab_size=self.config.vocab.size,
            target_vocab_size=self.target.vocab_size,
            norm_eps=self.target.norm_eps,
            max_position_embeddings=chosen.max_position_embeddings or self.target.context,
            rope=chosen.rope or rope_of(text),
            norm_before_residual=chosen.norm_before_residual,
            fc_norm=chosen.fc_norm,
            norm_output=chosen.norm_output,
        )

    def settings(self) -> Mapping[str, Any]:
        return {"train": self.config.train.identity()}

    @property
    def work(self) -> Work:
        """What the run has to do, by the sizes of the drafter's matrices. Of every token: fc once,
        layer and head at each draft step; three products a weight, forward and backward."""
        settings, sizes = self.config.train, self.of(Generate).sizes
        fc, layer, head = self.weights()
        share = 1 - settings.validation_share
        return Work(
            trainable=fc + layer + (head if settings.train_head else 0),
            flops=6 * (fc + settings.ttt_steps * (layer + head)),
            batch=settings.pack_tokens * settings.accumulate,
            tokens=round(sizes.tokens * share) * settings.epochs,
        )

    def weights(self) -> tuple[int, int, int]:
        """Weights of fc, layer and head; norms are too small to count."""
        chosen, size = self.config.train.drafter, self.of(Generate).sizes.hidden_size
        heads = chosen.heads or int(self.target.text_config["num_attention_heads"])
        shared = (
            chosen.kv_heads or chosen.heads or int(self.target.text_config["num_key_value_heads"])
        )
        width = chosen.head_dim or self.shape.head_dim
        inner = chosen.intermediate_size or int(self.target.text_config["intermediate_size"])
        attention = 2 * size * width * (heads + 2 * shared) + heads * width * size
        return 3 * size * size, attention + 3 * size * inner, self.config.vocab.size * size

    @property
    def scaling(self) -> list[Scaled]:
        """The run on the numbers of GPUs that the config knows the exchange of; else empty."""
        known = self.config.plan
        if not known.train_tflops or not known.bus_gbps:
            return []
        bus = {gpus: rate * 1e9 for gpus, rate in known.bus_gbps.items()}
        return scale(self.work, known.train_tflops * 1e12, bus)

    def plan(self) -> Plan:
        work, copies = self.work, self.config.train.keep_checkpoints + 1
        rate = self.rate(None)
        scaled = {item.gpus: item for item in self.scaling}.get(self.config.train.gpus)
        hours, speed = None, NO_RATE
        if rate:
            hours, speed = work.tokens / rate.tokens / 3600, rate.source
        elif scaled:
            hours = scaled.hours
            speed = f"{scaled.step * 1000:,.0f} ms a step of {work.batch:,} tokens, by its FLOPs"
        return Plan(
            self.name,
            self.config.train.epochs,
            "epochs",
            work.trainable * 4 * (3 * copies + 1),
            (
                f"{work.trainable / 1e6:,.1f} M weights; with two moments in float32, "
                f"{copies} copies",
                speed,
                *self._reading(hours),
            ),
            hours,
            self.config.train.gpus,
            work.trainable * 4 * 4,  # float32 weights, gradients and two moments
        )

    def _reading(self, hours: float | None) -> tuple[str, ...]:
        """Whether the disk can keep up, where the config states its speed."""
        disk = self.config.plan.disk_gbps
        if not hours or not disk:
            return ()
        needed = self.of(Extract).plan().bytes * self.config.train.epochs / hours / 3600 / 1e9
        verdict = "is no limit" if needed < disk else "IS THE LIMIT"
        return (f"reads {needed:.2g} GB/s of states; a disk of {disk:g} GB/s {verdict}",)

    def prepare(self) -> list[Check]:
        return [
            check("device", self._device_available),
            check("drafter shape", self._shape_consistent),
            check("warm start", self._warm_start_fits),
        ]

    def run(self, progress: Progress) -> None:
        inputs = self.require_inputs()
        if self.already_complete(progress):
            return
        remove_partial(self.directory)
        self._forget_other_inputs(inputs)
        keep_freed_memory()
        progress.phase("loading")
        training, validation = self.split()
        vocabulary = self.of(Vocab).vocabulary()
        drafter = self._fresh_drafter()
        head = self.target.head()[vocabulary.used].to(drafter.embeddings.dtype)
        data = Data(self.of(Extract).store, training, validation, self.target.stop_ids)
        trainer = Trainer(self.config.train, drafter, head, vocabulary, data, self.directory)
        progress.phase("training")
        final = trainer.run(progress)
        weights = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
        commit_file(self.weights_file, lambda temporary: save_file(weights, temporary))
        commit_json(
            self.record_file,
            {
                "steps": len(plan_steps(training, self.config.train)),
                "parameters": sum(tensor.numel() for tensor in weights.values()),
                "training_samples": len(training),
                "validation_samples": len(validation),
                "accuracy_per_position": final.accuracy,
                "acceptance_length": final.acceptance.length,
                "inputs": inputs,
                "sha256": file_digest(self.weights_file),
            },
        )

    def inspect(self, inspection: Inspection) -> Verdict:
        record = self.record()
        damaged = self.damaged_files(inspection, {self.weights_file: record.get("sha256")})
        return self.verdict(
            inspection,
            expected=len(plan_steps(self.split()[0], self.config.train)),
            done=record.get("steps", 0),
            findings=Findings(damaged=damaged),
            problems=self.changed_inputs(record),
        )

    def content(self) -> str:
        return str(self.record().get("sha256", ""))

    def split(self) -> tuple[list[SampleEntry], list[SampleEntry]]:
        """(training, validation) samples, by conversation."""
        entries = self.of(Generate).store.index()
        if not entries:
            return [], []
        return split(entries, self.config.train.validation_share, self.config.train.seed)

    def drafter(self, dtype: torch.dtype = torch.float32) -> Drafter:
        """The trained drafter. Raises DraftworksError when it is missing or damaged."""
        try:
            weights = load_file(self.weights_file)
        except Exception as error:
            raise DraftworksError(f"drafter {self.weights_file} cannot be read: {error}") from None
        drafter = Drafter(self.shape, self.target.embeddings().to(dtype))
        drafter.load_state_dict(weights)
        return drafter.to(dtype).eval().requires_grad_(False)

    def _fresh_drafter(self) -> Drafter:
        """New weights, or the warm start's. Embeddings in the compute precision."""
        embeddings = self.target.embeddings().to(getattr(torch, self.config.train.compute_dtype))
        drafter = Drafter(self.shape, embeddings)
        if self.config.train.warm_start:
            checkpoint = read_checkpoint(Path(self.config.train.warm_start).expanduser())
            drafter.load_state_dict(checkpoint.weights)
        else:
            used = self.of(Vocab).vocabulary().used
            drafter.initialize(self.target.head()[used], self.target.norm(), self.config.train.seed)
        return drafter

    def _forget_other_inputs(self, inputs: dict[str, str]) -> None:
        """Drop checkpoints that began on other inputs: going on from them would be training on
        both."""
        begun = self.directory / "inputs.json"
        if begun.is_file() and json.loads(begun.read_text()) != inputs:
            shutil.rmtree(self.directory / "checkpoints", ignore_errors=True)
            self.metrics_file.unlink(missing_ok=True)
        commit_json(begun, inputs)

    def _device_available(self) -> str:
        if self.config.train.gpus:
            raise DraftworksError(
                f"train.gpus {self.config.train.gpus}: this version trains on the CPU; set it to 0"
            )
        return f"CPU, {torch.get_num_threads()} threads, {self.config.train.compute_dtype}"

    def _shape_consistent(self) -> str:
        shape = self.shape
        if shape.heads % shape.kv_heads:
            raise DraftworksError(
                f"train.drafter: {shape.heads} heads cannot share {shape.kv_heads} key-value heads"
            )
        if shape.hidden_size % shape.heads:
            raise DraftworksError(
                f"train.drafter: {shape.heads} heads do not divide the target's hidden size "
                f"{shape.hidden_size}; engines refuse such a drafter"
            )
        if shape.hidden_size % shape.heads:
            raise DraftworksError(
                f"train.drafter: {shape.heads} heads do not divide the hidden size "
                f"{shape.hidden_size}, which transformers asks for"
            )
        return f"hidden {shape.hidden_size}, {shape.heads} heads of {shape.head_dim}"

    def _warm_start_fits(self) -> str:
        if not self.config.train.warm_start:
            return "none: fresh weights"
        checkpoint = read_checkpoint(Path(self.config.train.warm_start).expanduser())
        ours, theirs = vars(self.shape), vars(checkpoint.shape)
        if differing := [name for name in ours if ours[name] != theirs[name]]:
            raise DraftworksError(
                "train.warm_start has another shape: "
                + "; ".join(f"{name} {theirs[name]}, config {ours[name]}" for name in differing)
            )
        if checkpoint.layers and checkpoint.layers != self.of(Extract).layers:
            raise DraftworksError(
                f"train.warm_start was trained on layers {checkpoint.layers}, the config says "
                f"{self.of(Extract).layers}. Set extract.layers to the former."
            )
        return f"{self.config.train.warm_start}, its draft vocabulary is inherited"
