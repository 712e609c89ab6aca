"""The stages one after the other: what they leave, what they find again, what they refuse."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftworks.config import PipelineConfig
from draftworks.eagle3.formats import read_checkpoint
from draftworks.eagle3.vocabulary import DraftVocabulary
from draftworks.errors import DraftworksError
from draftworks.progress import Progress
from draftworks.records.inspection import Findings
from draftworks.records.manifest import ManifestWriter, read_manifest, rewrite_manifest
from draftworks.records.samples import SampleWriter
from draftworks.stages import STAGES, Stage, check_all, plan_all, stage_named
from draftworks.stages.evaluate import Evaluate
from draftworks.stages.extract import Extract
from draftworks.stages.generate import Generate
from draftworks.stages.publish import Publish
from draftworks.stages.train import Train
from draftworks.stages.vocab import Vocab
from draftworks.workspace import Workspace, file_digest


def stages(config: PipelineConfig) -> list[Stage]:
    return [stage(config, Workspace(Path(config.workspace))) for stage in STAGES.values()]


def stage(cls: type[Stage], config: PipelineConfig) -> Any:
    return cls(config, Workspace(Path(config.workspace)))


def run(config: PipelineConfig, *classes: type[Stage]) -> Progress:
    progress = Progress()
    for cls in classes or STAGES.values():
        stage(cls, config).run(progress)
    return progress


def incomplete(config: PipelineConfig) -> list[str]:
    return [item.name for item in stages(config) if not item.verify().complete]


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file with its time of change and its content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, file_digest(path))
        for path in folder.rglob("*")
        if path.is_file()
    }


# A whole run


def test_every_stage_of_a_finished_pipeline_is_complete(finished_once: PipelineConfig) -> None:
    counts = {
        verdict.stage: (verdict.done, verdict.expected, verdict.unit, verdict.problems)
        for verdict in (item.verify() for item in stages(finished_once))
    }
    steps = stage(Train, finished_once).record()["steps"]
    assert counts == {
        "generate": (24, 24, "prompts", ()),
        "vocab": (1, 1, "map", ()),
        "extract": (24, 24, "samples", ()),
        "train": (steps, steps, "steps", ()),
        "evaluate": (6, 6, "prompts", ()),
        "publish": (2, 2, "formats", ()),
    }


def test_a_verdict_is_a_sentence(finished_once: PipelineConfig) -> None:
    verdict = stage(Extract, finished_once).verify()
    assert verdict.sentence == "hidden states: 24 of 24 samples (100.0%)"


def test_a_second_run_does_nothing_again(finished: PipelineConfig) -> None:
    folder = Path(finished.workspace)
    before = snapshot(folder)
    for name in STAGES:
        progress = run(finished, stage_named(name))
        assert progress.done == progress.total > 0
        changed = {file for file, state in snapshot(folder).items() if before.get(file) != state}
        assert (name, changed) == (name, set())
    assert snapshot(folder).keys() == before.keys()


def test_a_workspace_can_be_moved(finished: PipelineConfig) -> None:
    """`finished` is a copy in another place, with its prompts in another file."""
    assert incomplete(finished) == []


def test_nothing_is_left_half_written(finished_once: PipelineConfig) -> None:
    assert list(Path(finished_once.workspace).rglob("*.partial")) == []


def test_samples_are_the_answers_of_the_target(finished_once: PipelineConfig) -> None:
    generate = stage(Generate, finished_once)
    target = generate.target
    rendered = {prompt.id: target.render(prompt.messages) for prompt in generate.prompts}
    samples = list(generate.store.samples())
    assert {item.conversation_id for item in samples} == set(rendered)
    for sample in samples:
        answer = sample.token_ids[sample.prompt_tokens :]
        assert list(sample.token_ids[: sample.prompt_tokens]) == rendered[sample.conversation_id]
        assert sample.text == target.text(answer)
        assert sample.finish_reason == ("stop" if answer[-1] in target.stop_ids else "length")
    assert {item.finish_reason for item in samples} == {"stop", "length"}


def test_the_draft_vocabulary_is_the_most_frequent_tokens(finished_once: PipelineConfig) -> None:
    vocab = stage(Vocab, finished_once)
    counts = torch.zeros(320, dtype=torch.long)
    for sample in stage(Generate, finished_once).store.samples():
        for token in sample.token_ids[sample.prompt_tokens :]:
            counts[token] += 1
    used = set(vocab.vocabulary().used.tolist())
    assert len(used) == 128
    assert vocab.target.stop_ids <= used
    rarest = min(counts[token] for token in used - vocab.target.stop_ids)
    assert all(counts[token] <= rarest for token in set(range(320)) - used)
    record = vocab.record()
    assert record["loss_tokens"] == counts.sum()
    assert record["coverage"] == counts[list(used)].sum() / counts.sum()


def test_training_and_validation_share_no_conversation(finished_once: PipelineConfig) -> None:
    training, validation = stage(Train, finished_once).split()
    names = [{entry.conversation_id for entry in part} for part in (training, validation)]
    assert not names[0] & names[1]
    assert (len(training), len(validation)) == (18, 6)


def test_the_evaluation_pools_its_counts(finished_once: PipelineConfig) -> None:
    evaluate = stage(Evaluate, finished_once)
    record = evaluate.record()
    rows = read_manifest(evaluate.manifest)
    assert record["measured"]["drafts"] == sum(row["drafts"] for row in rows)
    accepted = [sum(row["accepted"][k] for row in rows) for k in range(3)]
    assert record["measured"]["accepted"] == accepted
    assert record["measured"]["length"] == 1 + sum(accepted) / record["measured"]["drafts"]
    assert record["differing"] == record["ties"] == 0


@pytest.mark.parametrize("form", ["eagle", "speculators"])
def test_the_published_drafter_is_the_trained_one(finished_once: PipelineConfig, form: Any) -> None:
    train, publish = stage(Train, finished_once), stage(Publish, finished_once)
    checkpoint = read_checkpoint(publish.folder(form))
    trained = load_file(train.weights_file)
    assert checkpoint.weights.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(checkpoint.weights[name], tensor.bfloat16())
    assert checkpoint.layers == (2, 4, 5)
    notes = json.loads((publish.folder(form) / "draftworks.json").read_text())
    assert notes["config"] == finished_once.model_dump(mode="json")


def test_plans_are_made_before_anything_exists(tiny_config: PipelineConfig) -> None:
    plans = plan_all(tiny_config, Workspace(Path(tiny_config.workspace)))
    assert [plan.stage for plan in plans] == list(STAGES)
    assert all(plan.bytes > 0 and plan.units > 0 for plan in plans)
    assert not Path(tiny_config.workspace).exists()


def test_the_plan_of_extraction_counts_real_samples_once_there_are_some(
    finished_once: PipelineConfig,
) -> None:
    extract = stage(Extract, finished_once)
    tokens = sum(len(item.token_ids) for item in stage(Generate, finished_once).store.samples())
    assert extract.plan().bytes == tokens * (4 * 64 * 2 + 8)
    stored = sum(path.stat().st_size for path in extract.directory.rglob("*.safetensors"))
    assert extract.plan().bytes == pytest.approx(stored, rel=0.1)


def test_an_unknown_stage_lists_those_there_are() -> None:
    with pytest.raises(DraftworksError, match="no stage 'polish'; there are generate, vocab"):
        stage_named("polish")


# Identity


def directories(config: PipelineConfig) -> dict[str, Path]:
    return {item.name: item.directory for item in stages(config)}


@pytest.mark.parametrize(
    ("section", "setting", "first"),
    [
        ("generate", {"max_new_tokens": 23}, "generate"),
        ("generate", {"seed": 1}, "generate"),
        ("prompts", {"limit": 23}, "generate"),
        ("vocab", {"size": 127}, "vocab"),
        ("extract", {"layers": (2, 4, 6)}, "extract"),
        ("train", {"epochs": 3}, "train"),
        ("train", {"drafter": {"heads": 2}}, "train"),
        ("evaluate", {"draft_tokens": 2}, "evaluate"),
        ("publish", {"formats": ["eagle"]}, "publish"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_a_changed_setting_changes_its_stage_and_those_that_follow(
    tmp_path: Path,
    make_config: Callable[..., PipelineConfig],
    section: str,
    setting: dict[str, Any],
    first: str,
) -> None:
    before = directories(make_config(tmp_path))
    after = directories(make_config(tmp_path, **{section: setting}))
    follow = {
        "generate": set(STAGES),
        "vocab": {"vocab", "train", "evaluate", "publish"},
        "extract": {"extract", "train", "evaluate", "publish"},
        "train": {"train", "evaluate", "publish"},
        "evaluate": {"evaluate", "publish"},
        "publish": {"publish"},
    }
    assert {name for name in STAGES if before[name] != after[name]} == follow[first]


def test_other_prompts_are_other_work(tiny_config: PipelineConfig) -> None:
    before = directories(tiny_config)
    path = Path(tiny_config.prompts.path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("\n" + "".join(lines))  # the same prompts
    assert directories(tiny_config) == before
    path.write_text("".join([*lines[1:], lines[0]]))  # another order: other batches
    after = directories(tiny_config)
    assert all(before[name] != after[name] for name in STAGES)


def test_how_fast_and_where_keeps_the_place(
    tmp_path: Path, make_config: Callable[..., PipelineConfig]
) -> None:
    before = directories(make_config(tmp_path))
    after = make_config(
        tmp_path,
        name="other",
        extract={"batch_tokens": 1},
        train={"checkpoint_every": 1, "validate_every": 1, "keep_checkpoints": 9},
        evaluate={"batch": 1},
    )
    assert directories(after) == before


# Gates


def forget(manifest: Path, *names: str) -> None:
    """Take samples out of a manifest, as if they had never been committed."""
    rewrite_manifest(manifest, lambda row: row["id"] not in names)


def discard_states(config: PipelineConfig, count: int) -> list[str]:
    store = stage(Extract, config).store
    names = sorted(store.ids())[:count]
    for name in names:
        store.path(name).unlink()
    return names


def test_training_refuses_an_incomplete_extraction_with_the_true_numbers(
    finished: PipelineConfig,
) -> None:
    store = stage(Extract, finished).store
    forget(store.manifest, *sorted(store.ids())[:5])
    with pytest.raises(DraftworksError) as caught:
        run(finished, Train)
    assert str(caught.value) == ("train cannot start. hidden states: 19 of 24 samples (79.2%)")


def test_training_refuses_states_whose_files_are_gone(finished: PipelineConfig) -> None:
    (name,) = discard_states(finished, 1)
    with pytest.raises(DraftworksError, match=rf"train cannot start.*1 damaged: {name} is missing"):
        run(finished, Train)


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Vocab, "vocab cannot start. samples: 0 of 24 prompts"),
        (Extract, "extract cannot start. samples: 0 of 24 prompts"),
        (Train, "train cannot start. samples: 0 of 24 prompts"),
        (Evaluate, "evaluate cannot start. training: 0 of 0 steps"),
        (Publish, "publish cannot start. training: 0 of 0 steps"),
    ],
)
def test_no_stage_starts_before_its_inputs_are_there(
    tiny_config: PipelineConfig, cls: type[Stage], sentence: str
) -> None:
    with pytest.raises(DraftworksError) as caught:
        run(tiny_config, cls)
    assert str(caught.value).startswith(sentence)
    assert not stage(cls, tiny_config).directory.exists()


def edit_evaluation(config: PipelineConfig, **values: Any) -> None:
    path = stage(Evaluate, config).record_file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("factor", [0.05, 20])
def test_measured_and_estimated_acceptance_that_disagree_shut_the_gate(
    finished: PipelineConfig, factor: float
) -> None:
    measured = stage(Evaluate, finished).record()["measured"]
    edit_evaluation(finished, measured=measured | {"length": measured["length"] * factor})
    verdict = stage(Evaluate, finished).verify()
    assert not verdict.complete
    assert "Trainer and engine disagree about the hidden states" in verdict.sentence
    with pytest.raises(DraftworksError, match=r"publish cannot start\. evaluation: .*disagree"):
        run(finished, Publish)


def test_the_tolerance_is_a_share_of_the_estimate(finished: PipelineConfig) -> None:
    evaluate = stage(Evaluate, finished)
    for measured, estimated, fits in [(1.9, 1.0, True), (1.91, 1.0, False), (0.11, 1.0, True)]:
        record = {"measured": {"length": measured}, "estimated": {"length": estimated}}
        assert evaluate.agree(record) is fits


def test_output_that_differs_from_plain_decoding_shuts_the_gate(finished: PipelineConfig) -> None:
    edit_evaluation(finished, differing=3, ties=3)
    assert stage(Evaluate, finished).verify().complete
    edit_evaluation(finished, differing=3, ties=1)
    verdict = stage(Evaluate, finished).verify()
    assert "2 of 6 speculative outputs differ from plain greedy decoding" in verdict.sentence


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "draftworks.json"])
@pytest.mark.parametrize("form", ["eagle", "speculators"])
def test_an_altered_file_of_a_published_drafter_is_found_and_made_again(
    finished: PipelineConfig, form: Any, name: str
) -> None:
    path = stage(Publish, finished).folder(form) / name
    for spoil in (damage, Path.unlink):
        before = file_digest(path)
        spoil(path)
        verdict = stage(Publish, finished).verify()
        fault = "is missing" if spoil is Path.unlink else "differs from its checksum"
        assert verdict.damaged == {f"{form}/{name}": fault}
        run(finished, Publish)
        assert stage(Publish, finished).verify().complete
        # Only the first copy names the folder of the original in its provenance.
        assert file_digest(path) == before or name == "draftworks.json"


def test_a_stale_vocabulary_map_is_found(finished: PipelineConfig) -> None:
    """Another map in its place, and a map with its record from other samples."""
    vocab = stage(Vocab, finished)
    stale = shutil.copytree(vocab.directory, vocab.directory.with_name("stale"))
    mapped = vocab.map_file.read_bytes()
    DraftVocabulary(torch.arange(128), 320).save(vocab.map_file)
    verdict = vocab.verify()
    assert verdict.damaged == {"vocabulary.safetensors": "differs from its checksum"}
    assert verdict.problems == ()
    vocab.map_file.write_bytes(mapped)
    assert vocab.verify().complete
    answer_otherwise(finished)
    run(finished, Vocab)
    assert vocab.verify().complete
    shutil.copytree(stale, vocab.directory, dirs_exist_ok=True)
    verdict = vocab.verify()
    assert verdict.problems == ("made from other samples than lie on disk now; run vocab again",)
    assert verdict.damaged == {}


def test_a_torn_record_is_named_and_made_again(finished: PipelineConfig) -> None:
    vocab = stage(Vocab, finished)
    whole = vocab.record_file.read_bytes()
    vocab.record_file.write_bytes(whole[:-20])
    assert vocab.verify().problems == ("coverage.json cannot be read; run vocab again",)
    run(finished, Vocab)
    assert vocab.record_file.read_bytes() == whole


def test_an_extra_file_of_a_published_drafter_is_foreign(finished: PipelineConfig) -> None:
    publish = stage(Publish, finished)
    extra = publish.folder("eagle") / "model-00002.safetensors"
    extra.write_bytes(b"old")
    assert publish.verify(share=0).foreign == ("eagle/model-00002.safetensors",)
    run(finished, Publish)
    assert publish.verify().complete


def test_doubled_and_foreign_measurements_are_named_and_dropped(finished: PipelineConfig) -> None:
    evaluate = stage(Evaluate, finished)
    whole = evaluate.record()
    rows = read_manifest(evaluate.manifest)
    writer = ManifestWriter(evaluate.manifest)
    writer.append(rows[0])
    writer.append(rows[1] | {"sample_ids": ["stranger"]})
    writer.close()
    verdict = evaluate.verify()
    assert verdict.duplicate == tuple(rows[0]["sample_ids"])
    assert verdict.foreign == ("stranger",)
    run(finished, Evaluate)
    assert evaluate.verify().complete
    assert evaluate.record() == whole


def test_a_stage_whose_input_cannot_be_read_says_so(finished: PipelineConfig) -> None:
    damage(stage(Generate, finished).directory / "part-000001.parquet")
    (stage(Generate, finished).directory / "part-000000.parquet").unlink()
    (problem,) = stage(Train, finished).verify().problems
    assert "part-000000.parquet cannot be read" in problem


def test_a_stage_starts_on_what_its_gate_saw_and_on_nothing_else(finished: PipelineConfig) -> None:
    train = stage(Train, finished)
    seen = train.require_inputs()
    assert seen.keys() == {"generate", "vocab", "extract"}
    assert train.require_inputs(seen) == train.require_inputs({"extract": seen["extract"]}) == seen
    answer_otherwise(finished)
    run(finished, Vocab, Extract)
    now = stage(Extract, finished).verify().digest
    with pytest.raises(DraftworksError) as caught:
        train.require_inputs({"extract": seen["extract"]})
    assert str(caught.value) == (
        f"hidden states changed since the gate opened: gate saw {seen['extract']}, disk holds "
        f"{now}; let the gate look again"
    )


def test_a_long_verdict_names_the_first_of_each_kind(finished_once: PipelineConfig) -> None:
    sound = stage(Extract, finished_once).verify()
    ids = tuple("abcde")
    verdict = replace(
        sound, done=17, missing=ids[:2], foreign=ids, damaged=dict.fromkeys(ids[:1], "is missing")
    )
    assert not verdict.sound
    assert not verdict.complete
    assert verdict.sentence == (
        "hidden states: 17 of 24 samples (70.8%); 2 missing: a, b; 5 foreign: a, b, c and 2 more; "
        "1 damaged: a is missing"
    )
    assert [row["found"] for row in verdict.rows()] == ["missing", "foreign", "damaged"]
    some = replace(sound, done=19, missing=ids)
    assert some.sound
    assert not some.complete
    assert some.sentence == "hidden states: 19 of 24 samples (79.2%)"
    assert some.rows() == [{"found": "missing", "count": "5", "which": "a, b, c and 2 more"}]


@pytest.mark.parametrize(
    ("cls", "attribute", "fault"),
    [
        (Vocab, "map_file", "vocabulary.safetensors"),
        (Train, "weights_file", "drafter.safetensors"),
    ],
)
def test_a_damaged_output_is_found_and_made_again(
    finished: PipelineConfig, cls: type[Stage], attribute: str, fault: str
) -> None:
    path = getattr(stage(cls, finished), attribute)
    before = file_digest(path)
    for spoil, text in ((damage, "differs from its checksum"), (Path.unlink, "is missing")):
        spoil(path)
        assert stage(cls, finished).verify().damaged == {fault: text}
        run(finished, cls)
        assert incomplete(finished) == []
        assert file_digest(path) == before


def test_damaged_states_are_made_again_and_only_those(finished: PipelineConfig) -> None:
    extract = stage(Extract, finished)
    before = snapshot(extract.directory)
    digest = extract.verify().digest
    names = discard_states(finished, 2)
    extra = sorted(extract.store.ids())[5]
    damage(extract.store.path(extra))
    verdict = extract.verify()
    assert (verdict.done, set(verdict.damaged)) == (21, {*names, extra})
    progress = run(finished, Extract)
    assert (progress.done, progress.total) == (24, 24)
    assert extract.verify().complete
    assert extract.verify().digest == digest
    after = {
        file: state
        for file, state in snapshot(extract.directory).items()
        if not file.startswith("quarantine")
    }
    changed = {Path(file).stem for file in after if before[file] != after[file]}
    assert changed == {*names, extra, "manifest"}
    assert {file: content for file, (_, content) in after.items() if "manifest" not in file} == {
        file: content for file, (_, content) in before.items() if "manifest" not in file
    }
    assert incomplete(finished) == []


def test_a_damaged_part_of_samples_is_made_again_and_only_that(finished: PipelineConfig) -> None:
    generate = stage(Generate, finished)
    before = snapshot(generate.directory)
    damage(generate.directory / "part-000001.parquet")
    verdict = generate.verify()
    assert verdict.damaged == {"part-000001.parquet": "differs from its checksum"}
    assert verdict.done == 16
    run(finished, Generate)
    assert generate.verify().complete
    after = snapshot(generate.directory)
    kept = {"part-000000.parquet", "part-000002.parquet"}
    assert {file for file in before if before[file] == after.get(file)} == kept
    assert incomplete(finished) == []


def test_a_prompt_that_is_not_ours_is_a_problem(finished: PipelineConfig) -> None:
    store = stage(Generate, finished).store
    sample = next(store.samples())
    writer = SampleWriter(store)
    foreign = type(sample)("stranger", (*sample.token_ids, 5), 3, "stop", "x")
    writer.commit([foreign], [])
    writer.close()
    verdict = stage(Generate, finished).verify()
    assert verdict.foreign == ("stranger",)
    assert verdict.damaged == {
        "part-000003.parquet": "holds conversation stranger, not one of the prompts"
    }
    run(finished, Generate)
    assert incomplete(finished) == []


def answer_otherwise(config: PipelineConfig) -> None:
    """Make a part of the samples anew, as a server that samples would: with other tokens."""
    store = stage(Generate, config).store
    samples = list(store.samples())
    part = store.rows()[1]
    store.quarantine(Findings(damaged={part["file"]: "to be made anew"}))
    writer = SampleWriter(store)
    writer.commit(
        [
            type(sample)(
                sample.conversation_id,
                (*sample.token_ids[:-1], 7),
                sample.prompt_tokens,
                sample.finish_reason,
                sample.text,
            )
            for sample in samples
            if sample.conversation_id in part["conversation_ids"]
        ],
        [],
    )
    writer.close()


def test_other_samples_under_the_same_name_reach_every_stage(finished: PipelineConfig) -> None:
    """What was made from the old samples does not count as made from the new ones."""
    train = stage(Train, finished)
    before = {cls.name: stage(cls, finished).verify().digest for cls in STAGES.values()}
    answer_otherwise(finished)
    assert incomplete(finished) == ["vocab", "extract", "train", "evaluate"]
    run(finished, Vocab, Extract)
    assert incomplete(finished) == ["train", "evaluate"]
    assert train.verify().problems == (
        "made from other samples than lie on disk now; run train again",
        "made from other hidden states than lie on disk now; run train again",
    )
    run(finished, Train)
    assert incomplete(finished) == ["evaluate", "publish"]
    run(finished, Evaluate)
    assert incomplete(finished) == ["publish"]
    run(finished, Publish)
    assert incomplete(finished) == []
    after = {cls.name: stage(cls, finished).verify().digest for cls in STAGES.values()}
    # The most frequent tokens may be the same ones.
    assert {name for name in STAGES if after[name] == before[name]} <= {"vocab"}
    steps = [row["step"] for row in read_manifest(train.metrics_file) if "loss" in row]
    assert steps == list(range(1, train.record()["steps"] + 1))


def test_training_that_is_stopped_does_not_go_on_with_other_samples(
    finished_once: PipelineConfig, finished: PipelineConfig
) -> None:
    """Checkpoints of the old samples are no start for the new ones."""
    stage(Train, finished).record_file.unlink()
    answer_otherwise(finished)
    run(finished, Vocab, Extract, Train)
    resumed = file_digest(stage(Train, finished).weights_file)
    shutil.rmtree(stage(Train, finished).directory)
    run(finished, Train)
    assert file_digest(stage(Train, finished).weights_file) == resumed
    assert resumed != file_digest(stage(Train, finished_once).weights_file)


def test_an_evaluation_goes_on_with_another_batch(
    finished: PipelineConfig, tmp_path: Path, make_config: Callable[..., PipelineConfig]
) -> None:
    """How many prompts are decoded at once may change between two runs of one evaluation."""
    evaluate = stage(Evaluate, finished)
    whole = evaluate.record()
    evaluate.record_file.unlink()
    rows = evaluate.manifest.read_bytes().splitlines(keepends=True)
    evaluate.manifest.write_bytes(rows[0])
    run(make_config(tmp_path, evaluate={"batch": 5}), Evaluate)
    assert evaluate.record()["prompts"] == 6
    assert evaluate.record()["measured"] == whole["measured"]
    assert incomplete(finished) == []


def test_training_stops_on_a_corrupt_warm_start(
    tmp_path: Path, make_config: Callable[..., PipelineConfig], finished_once: PipelineConfig
) -> None:
    source = stage(Publish, finished_once).folder("eagle")
    weights = load_file(source / "model.safetensors")
    start = tmp_path / "start"
    start.mkdir()
    (start / "config.json").write_bytes((source / "config.json").read_bytes())
    del weights["fc.weight"]
    save_file(weights, start / "model.safetensors")
    config = make_config(tmp_path, train={"warm_start": str(start)})
    found = check_all(config, Workspace(Path(config.workspace)))
    failed = {item.name: item.detail for _, item in found if not item.passed}
    assert failed
    assert all("fc.weight" in detail for detail in failed.values())
