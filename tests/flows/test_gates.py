"""Gates open on what lies on disk, and on nothing else."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError, StopRequested
from draftworks.progress import Progress
from draftworks.stages.generate import Generate
from draftworks.supervision.job import Job
from tasks.gates import NotYetError, found, gate
from tasks.places import workspace_of


@pytest.fixture
def samples(tiny_config: PipelineConfig) -> Generate:
    return Generate(tiny_config, workspace_of(tiny_config))


def test_the_gate_of_a_stage_that_never_ran_is_shut(samples: Generate) -> None:
    with pytest.raises(
        DraftworksError, match=r"^not yet\. samples: 0 of 24 prompts \(0\.0%\); no job"
    ):
        gate("generate", samples.config)
    assert not found("generate", samples.config)


def test_an_incomplete_stage_is_refused_with_its_true_count(
    samples: Generate, interrupted: Callable[[int], Progress], shown: Callable[[str], Any]
) -> None:
    with pytest.raises(StopRequested):
        samples.run(interrupted(8))
    with pytest.raises(
        DraftworksError, match=r"^not yet\. samples: 8 of 24 prompts \(33\.3%\); no job"
    ):
        gate("generate", samples.config)
    rows = shown("gate-generate")
    assert rows[0]["which"] == "checked: presence and sizes"  # missing ones show without reading
    found = {row["found"]: row["count"] for row in rows}
    assert found == {"gate": "shut", "prompts": "8 of 24", "missing": "16"}


def test_a_complete_stage_opens_it_with_its_digest(
    samples: Generate, shown: Callable[[str], Any]
) -> None:
    samples.run(Progress())
    assert found("generate", samples.config)
    assert gate("generate", samples.config) == samples.store.digest() != ""
    opened, counted = shown("gate-generate")
    assert (opened["count"], opened["which"]) == ("open", "checked: every byte")
    assert counted["count"] == "24 of 24"
    assert counted["which"] == f"digest {samples.store.digest()}"


def test_an_open_gate_is_never_remembered(samples: Generate) -> None:
    samples.run(Progress())
    gate("generate", samples.config)
    lost = samples.directory / samples.store.rows()[1]["file"]
    lost.unlink()
    with pytest.raises(DraftworksError, match=f"16 of 24 .*1 damaged: {lost.name} is missing"):
        gate("generate", samples.config)


def test_damaged_files_are_named(samples: Generate, shown: Callable[[str], Any]) -> None:
    samples.run(Progress())
    first, second, _ = (samples.directory / row["file"] for row in samples.store.rows())
    flipped = bytearray(first.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    first.write_bytes(flipped)
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(DraftworksError) as refusal:
        gate("generate", samples.config)
    assert f"{first.name} differs from its checksum" in str(refusal.value)
    assert f"{second.name} has {second.stat().st_size} of {second.stat().st_size + 1} bytes" in str(
        refusal.value
    )
    damaged = next(row for row in shown("gate-generate") if row["found"] == "damaged")
    assert damaged["count"] == "2"
    assert first.name in damaged["which"]
    assert second.name in damaged["which"]


def test_a_sampled_look_says_so(samples: Generate, shown: Callable[[str], Any]) -> None:
    samples.run(Progress())
    gates = samples.config.gates.model_copy(update={"share": 0.01})
    gate("generate", samples.config.model_copy(update={"gates": gates}))
    assert shown("gate-generate")[0]["which"].endswith(
        "a sample of 1 of 3 files (1 %), chosen anew"
    )


def test_a_waiting_gate_opens_when_the_last_unit_is_there(
    samples: Generate, interrupted: Callable[[int], Progress], ear: Any
) -> None:
    with pytest.raises(StopRequested):
        samples.run(interrupted(8))

    def finish() -> None:
        ear.wait_for("waiting for samples: 8 of 24 prompts")
        Generate(samples.config, samples.workspace).run(Progress())

    thread = threading.Thread(target=finish)
    thread.start()
    assert gate("generate", samples.config, wait=True) == samples.store.digest()
    thread.join()


def test_a_waiting_gate_does_not_wait_for_a_job_that_failed(
    samples: Generate, job_of: Callable[[str, PipelineConfig], Job]
) -> None:
    directory = job_of("generate", samples.config).directory
    directory.mkdir(parents=True)
    (directory / "lock").touch()
    (directory / "exit.json").write_text('{"outcome": "failed", "error": "out of paper"}')
    with pytest.raises(NotYetError, match="its job failed: out of paper"):
        gate("generate", samples.config, wait=True)
