"""Collects the final report from what lies on disk: artifacts and job histories."""

from pathlib import Path
from typing import Any, cast

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.records.manifest import read_manifest
from draftworks.report.model import (
    AcceptanceLength,
    PerPosition,
    Report,
    Span,
    StepRow,
    Training,
    ValidationRow,
)
from draftworks.report.page import render
from draftworks.stages import all_stages
from draftworks.stages.evaluate import Evaluate
from draftworks.stages.extract import Extract
from draftworks.stages.generate import Generate
from draftworks.stages.publish import Publish
from draftworks.stages.train import Train
from draftworks.stages.vocab import Vocab
from draftworks.supervision.job import Job, iso
from draftworks.workspace import Workspace, commit_file


def write_report(config: PipelineConfig, workspace: Workspace) -> Path:
    """Write report.json and report.html. Returns the path of report.json.

    Raises DraftworksError when a stage is not complete: there is no report on half of the work.
    """
    report = build_report(config, workspace)
    folder = workspace.report(Publish(config, workspace).identity)
    data, page = report.model_dump_json(indent=2) + "\n", render(report)
    commit_file(folder / "report.json", lambda path: path.write_text(data, encoding="utf-8"))
    commit_file(folder / "report.html", lambda path: path.write_text(page, encoding="utf-8"))
    return folder / "report.json"


def build_report(config: PipelineConfig, workspace: Workspace) -> Report:
    stages = all_stages(config, workspace)
    for stage in stages.values():
        if not stage.accepts(verdict := stage.verify(share=0)):
            raise DraftworksError(f"no report yet. {verdict.sentence}")
    publish = cast("Publish", stages["publish"])
    generate, vocab, extract = publish.of(Generate), publish.of(Vocab), publish.of(Extract)
    train, evaluate = publish.of(Train), publish.of(Evaluate)
    parts = generate.store.rows()
    evaluation = evaluate.record()
    spans = [
        Span(stage=name, start=iso(run["started"]), end=iso(run["ended"]))
        for name, stage in stages.items()
        for run in Job(stage.job_directory).history()
    ]
    seconds = dict.fromkeys(stages, 0.0)
    for span in spans:
        start, end = span.interval()
        seconds[span.stage] += end - start
    return Report(
        name=config.name,
        created=max(span.end for span in spans),
        target=config.target.model,
        target_layers=generate.target.layers,
        config=config.model_dump(mode="json"),
        samples=sum(len(row["sample_ids"]) for row in parts),
        conversations=len(generate.prompts),
        tokens=sum(row["tokens"] for row in parts),
        loss_tokens=sum(row["loss_tokens"] for row in parts),
        truncated=sum(row["truncated"] for row in parts),
        rejected=dict(generate.store.rejected()),
        coverage=vocab.record()["coverage"],
        draft_vocabulary=vocab.record()["draft_tokens"],
        target_vocabulary=vocab.record()["target_tokens"],
        hidden_state_bytes=sum(row["bytes"] for row in extract.store.rows()),
        training=_training(train),
        accuracy_per_position=train.record()["accuracy_per_position"],
        acceptance_length=AcceptanceLength(
            measured=evaluation["measured"]["length"],
            estimated=evaluation["estimated"]["length"],
            tolerance=config.evaluate.tolerance,
            agree=evaluate.agree(evaluation),
        ),
        acceptance_per_position=PerPosition(
            measured=evaluation["measured"]["rates"], estimated=evaluation["estimated"]["rates"]
        ),
        draft_tokens=config.evaluate.draft_tokens,
        evaluated_prompts=evaluation["prompts"],
        outputs_identical=evaluation["differing"] == evaluation["ties"],
        ties=evaluation["ties"],
        seconds=seconds,
        timeline=spans,
        published={form: str(publish.folder(form)) for form in config.publish.formats},
        warnings=_warnings(config, workspace, parts),
    )


def _training(train: Train) -> Training:
    rows = read_manifest(train.metrics_file)
    record = train.record()
    return Training(
        steps=record["steps"],
        parameters=record["parameters"],
        train_samples=record["training_samples"],
        validation_samples=record["validation_samples"],
        history=[
            StepRow(**{name: row[name] for name in StepRow.model_fields})
            for row in rows
            if "validation" not in row
        ],
        validation=[
            ValidationRow(
                step=row["step"],
                **{
                    name: row["validation"][name]
                    for name in ValidationRow.model_fields
                    if name != "step"
                },
            )
            for row in rows
            if "validation" in row
        ],
    )


def _warnings(
    config: PipelineConfig, workspace: Workspace, parts: list[dict[str, Any]]
) -> list[str]:
    """What a reader of the figures should know."""
    samples = sum(len(row["sample_ids"]) for row in parts)
    truncated = sum(row["truncated"] for row in parts)
    warnings = []
    if workspace.part:
        warnings.append(
            f"An experiment on a part of the data: {workspace.part} (allow_partial "
            f"{config.allow_partial})."
        )
    if truncated > samples / 2:
        warnings.append(
            f"{truncated / samples:.0%} of the answers ended by length "
            f"({config.generate.max_new_tokens} tokens): the drafter has seen few endings."
        )
    return warnings
