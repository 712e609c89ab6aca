"""What a stage is: four functions over a config and a workspace, and an identity."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.progress import Progress
from draftworks.target import Target
from draftworks.workspace import Workspace, digest


@dataclass(frozen=True)
class Plan:
    """What a stage will make, before anything starts; `assumptions` say what it rests on."""

    stage: str
    units: int
    unit: str
    bytes: int
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """One thing that must hold before a stage starts. detail: what was found, or the remedy."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verdict:
    """What lies on disk of a stage's output, by reading it."""

    stage: str
    title: str
    unit: str
    expected: int
    done: int
    problems: tuple[str, ...]
    digest: str

    @property
    def complete(self) -> bool:
        return self.done == self.expected > 0 and not self.problems

    @property
    def sentence(self) -> str:
        """One line for people: "hidden states: 18,420 of 37,312 samples (49.3 %)"."""
        share = self.done / self.expected if self.expected else 0.0
        text = f"{self.title}: {self.done:,} of {self.expected:,} {self.unit} ({share:.1%})"
        if self.problems:
            more = f" and {len(self.problems) - 3} more" if len(self.problems) > 3 else ""
            text += f"; {len(self.problems)} problems: {'; '.join(self.problems[:3])}{more}"
        return text


S = TypeVar("S", bound="Stage")


class Stage(ABC):
    """One step from prompts to drafter. Its output lies in `directory`, named by `identity`."""

    name: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[str]
    inputs: ClassVar[tuple[type["Stage"], ...]] = ()
    record_name: ClassVar[str] = ""
    """Of the file that ends a stage without a manifest: what it found, from which inputs."""
    format_version: ClassVar[int] = 1

    def __init__(
        self,
        config: PipelineConfig,
        workspace: Workspace,
        family: dict[type["Stage"], "Stage"] | None = None,
    ) -> None:
        self.config = config
        self.workspace = workspace
        # The stages of one pipeline that have met: prompts and target are read once for all.
        self._family = {} if family is None else family
        self._family[type(self)] = self

    @cached_property
    def target(self) -> Target:
        first = next(iter(self._family.values()))
        return Target.resolve(self.config.target) if first is self else first.target

    @cached_property
    def identity(self) -> str:
        """Digest of what decides the result: settings, inputs, format version."""
        return digest(
            {
                "stage": self.name,
                "format": self.format_version,
                "settings": self.settings(),
                "inputs": {cls.name: self.of(cls).identity for cls in self.inputs},
            }
        )

    @property
    def directory(self) -> Path:
        return self.workspace.artifact(self.name, self.identity)

    @property
    def record_file(self) -> Path:
        return self.directory / self.record_name

    def record(self) -> dict[str, Any]:
        """What the stage wrote when it ended; empty while it has not."""
        if not self.record_file.is_file():
            return {}
        record: dict[str, Any] = json.loads(self.record_file.read_text(encoding="utf-8"))
        return record

    @property
    def job_directory(self) -> Path:
        return self.workspace.job(self.name, self.identity)

    def of(self, cls: type[S]) -> S:
        """Another stage of the same pipeline."""
        if cls not in self._family:
            cls(self.config, self.workspace, self._family)
        return cast("S", self._family[cls])

    def require_inputs(self) -> None:
        """Raises DraftworksError unless every input is complete on disk."""
        for cls in self.inputs:
            verdict = self.of(cls).verify(deep=False)
            if not self.accepts(verdict):
                raise DraftworksError(f"{self.name} cannot start. {verdict.sentence}")

    def accepts(self, verdict: Verdict) -> bool:
        """Whether an output is enough: complete, or in an experiment on a part
        (`allow_partial`) sound as far as it goes."""
        partial = self.config.allow_partial is not None and verdict.done > 0 and verdict.sound
        return verdict.complete or partial

    def input_digests(self) -> dict[str, str]:
        """What the inputs hold now, by their names. A record keeps it, and `changed_inputs`
        holds it against what lies on disk later."""
        return {cls.name: self.of(cls).verify(deep=False).digest for cls in self.inputs}

    def changed_inputs(self, record: Mapping[str, Any]) -> list[str]:
        """Problems: inputs whose content is not what the record's output was made from."""
        if not record:
            return []
        now = self.input_digests()
        return [
            f"made from other {cls.title} than lie on disk now; run {self.name} again"
            for cls in self.inputs
            if record["inputs"][cls.name] != now[cls.name]
        ]

    def already_complete(self, progress: Progress) -> bool:
        """Whether a whole and sound output lies there, so that there is nothing to do."""
        verdict = self.verify()
        if verdict.complete:
            progress.begin(verdict.expected, self.unit, verdict.done)
        return verdict.complete

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """The settings that decide the result."""

    @abstractmethod
    def plan(self) -> Plan:
        """What it will need, from config and prompts alone."""

    @abstractmethod
    def prepare(self) -> list[Check]:
        """Everything that can be checked before the inputs exist."""

    @abstractmethod
    def run(self, progress: Progress) -> None:
        """Do the work, from what is committed already. Raises DraftworksError, StopRequested."""

    @abstractmethod
    def verify(self, *, deep: bool = True) -> Verdict:
        """Read what lies on disk; with `deep`, every byte of it against its checksum."""


def check(name: str, test: Callable[[], str]) -> Check:
    """Run a test that returns what it found or raises DraftworksError."""
    try:
        return Check(name, True, test())
    except DraftworksError as error:
        return Check(name, False, str(error))


def size(count: int) -> str:
    """Bytes for people, in powers of 1000 as disks are sold."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
