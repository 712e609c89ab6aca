"""Gates open on what lies on disk, and on nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError, StopRequested
from draftworks.progress import Progress
from draftworks.stages.generate import Generate
from tasks.gates import found, gate
from tasks.places import workspace_of


@pytest.fixture
def samples(tiny_config: PipelineConfig) -> Generate:
    return Generate(tiny_config, workspace_of(tiny_config))


def test_the_gate_of_a_stage_that_never_ran_is_shut(samples: Generate) -> None:
    with pytest.raises(DraftworksError, match=r"^not yet\. samples: 0 of 24 prompts \(0\.0%\)$"):
        gate("generate", samples.config)
    assert not found("generate", samples.config)


def test_an_incomplete_stage_is_refused_with_its_true_count(
    samples: Generate, interrupted: Callable[[int], Progress], shown: Callable[[str], Any]
) -> None:
    with pytest.raises(StopRequested):
        samples.run(interrupted(8))
    with pytest.raises(DraftworksError, match=r"^not yet\. samples: 8 of 24 prompts \(33\.3%\)$"):
        gate("generate", samples.config)
    (row,) = shown("gate-generate")
    assert (row["found"], row["gate"]) == ("8 of 24 prompts", "shut")


def test_a_complete_stage_opens_it_with_its_digest(
    samples: Generate, shown: Callable[[str], Any]
) -> None:
    samples.run(Progress())
    assert found("generate", samples.config)
    assert gate("generate", samples.config) == samples.store.digest() != ""
    (row,) = shown("gate-generate")
    assert (row["gate"], row["problems"]) == ("open", "none")
    assert row["digest"] == samples.store.digest()[:16]


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
    (row,) = shown("gate-generate")
    assert first.name in row["problems"]
    assert second.name in row["problems"]
