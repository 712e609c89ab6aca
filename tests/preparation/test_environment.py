"""What an environment is, and what is wrong with it."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from draftworks.errors import DraftworksError
from draftworks.preparation.environment import (
    changes,
    environment,
    environment_of,
    require,
    source_version,
)


def test_it_names_what_a_result_may_depend_on() -> None:
    found = environment()
    assert found["torch"] == version("torch")
    assert found["draftworks"].partition("+")[2]
    assert changes(found, environment()) == []


def test_a_version_in_range_is_fine() -> None:
    assert f"torch {version('torch')}" in require({"torch": ">=2.0", "pytest": ">=1"})
    assert require({"draftworks": f"=={source_version()}"})


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"torch": ">=99"},
            rf"torch is {version('torch')}.*, >=99 is required".replace("+", r"\+"),
        ),
        ({"no-such-package": ">=1"}, "no-such-package is not installed, >=1 is required"),
        ({"draftworks": "==0.0.1+0123"}, r"draftworks is .*\+.*, ==0.0.1\+0123 is required"),
        ({"torch": "new"}, "jobs.requires: torch 'new' is no version range"),
    ],
)
def test_what_does_not_fit_is_named(wanted: dict[str, str], message: str) -> None:
    with pytest.raises(DraftworksError, match=message):
        require(wanted)


def test_what_changed_is_named() -> None:
    before = {"torch": "2.10", "numpy": "2.0"}
    after = {"torch": "2.11", "numpy": "2.0", "vllm": "0.32"}
    assert changes(before, after) == ["torch was 2.10, is 2.11", "vllm was absent, is 0.32"]


def test_another_interpreter_tells_its_own(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    assert environment_of(str(other)) == environment_of("") == environment()


def test_an_interpreter_without_draftworks_says_what_is_missing(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(DraftworksError, match="does not know itself: ModuleNotFoundError"):
        environment_of(str(bare))
    with pytest.raises(DraftworksError, match="cannot be run"):
        environment_of(str(tmp_path / "absent"))
