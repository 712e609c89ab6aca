"""What a stage is: four functions over a config and a workspace, and an identity."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from draftworks.config import PipelineConfig
from draftworks.errors import DraftworksError
from draftworks.estimates.rates import Rate, measured
from draftworks.estimates.remaining import span
from draftworks.progress import Progress
from draftworks.records.inspection import Committed, Findings, Inspection, Seen
from draftworks.target import Target
from draftworks.workspace import Workspace, digest

NO_RATE = "speed not known yet: the first run measures it"
NAMED = 3  # units that a sentence names of each kind
NOTHING = Findings()


@dataclass(frozen=True)
class Plan:
    """What a stage will make and take, before anything starts; `assumptions` say what it rests on.

    hours: None where nothing is known yet, and a number is not made up. gpus: 0 is the CPU.
    gpu_bytes: what weights and optimizer take of the memory of each.
    """

    stage: str
    units: int
    unit: str
    bytes: int
    assumptions: tuple[str, ...]
    hours: float | None = None
    gpus: int = 0
    gpu_bytes: int = 0

    @property
    def time(self) -> str:
        """For people."""
        if self.hours is None:
            return "unknown"
        return span(self.hours * 3600) if self.hours else "seconds"


@dataclass(frozen=True)
class Sizes:
    """How large a pipeline is, and where that is known from."""

    samples: int
    tokens: int
    source: str
    hidden_size: int


@dataclass(frozen=True)
class Check:
    """One thing that must hold before a stage starts. detail: what was found, or the remedy."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Verdict(Findings):
    """What lies on disk of a stage's output, by reading it.

    done: units committed and not found damaged, of `expected`. problems: what is wrong with the
    whole rather than with a unit. checked: how closely it looked. digest: of what it holds.
    """

    stage: str
    title: str
    unit: str
    expected: int
    done: int
    problems: tuple[str, ...] = ()
    checked: str
    digest: str

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong with what is there, though some may be missing."""
        return not (self.duplicate or self.foreign or self.damaged or self.problems)

    @property
    def complete(self) -> bool:
        return self.sound and not self.missing and self.done == self.expected > 0

    @property
    def sentence(self) -> str:
        """One line for people: "hidden states: 18,420 of 37,312 samples (49.4%)", then what is
        wrong, the first of each kind by name. A missing unit is named when few are missing."""
        share = self.done / self.expected if self.expected else 0.0
        text = f"{self.title}: {self.done:,} of {self.expected:,} {self.unit} ({share:.1%})"
        for kind, names in self._kinds().items():
            if kind != "missing" or len(names) <= NAMED:
                text += f"; {len(names):,} {kind}: {_first(names)}"
        return text

    def rows(self) -> list[dict[str, str]]:
        """The findings as a table, a kind a row; empty when there are none."""
        return [
            {"found": kind, "count": f"{len(names):,}", "which": _first(names)}
            for kind, names in self._kinds().items()
        ]

    def _kinds(self) -> dict[str, Sequence[str]]:
        kinds: dict[str, Sequence[str]] = {
            # A stage that never ran misses everything: its count says so.
            "missing": self.missing if self.done else (),
            "duplicate": self.duplicate,
            "foreign": self.foreign,
            "damaged": [f"{name} {reason}" for name, reason in self.damaged.items()],
            "problem" if len(self.problems) == 1 else "problems": self.problems,
        }
        return {kind: names for kind, names in kinds.items() if names}


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


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
        """What the stage wrote when it ended; empty while it has not, or when it is damaged."""
        if not self.record_file.is_file():
            return {}
        try:
            record: dict[str, Any] = json.loads(self.record_file.read_text(encoding="utf-8"))
        except ValueError:
            return {}
        return record

    @property
    def job_directory(self) -> Path:
        return self.workspace.job(self.name, self.identity)

    def rate(self, stated: float | None) -> Rate | None:
        """How fast it will be: as measured in this workspace, else as the config states."""
        found = measured(self.workspace, self.config, self.name)
        if found is None and stated:
            return Rate(stated, f"{stated:,.0f} tokens/s, as the config states")
        return found

    def loading(self) -> tuple[str, ...]:
        """What loading a large target adds, where the config states its size."""
        size, disk = self.config.plan.target_gb, self.config.plan.disk_gbps
        if not size or not disk:
            return ()
        return (f"and {size / disk / 60:,.0f} min or more to load {size:,.0f} GB of weights",)

    def of(self, cls: type[S]) -> S:
        """Another stage of the same pipeline."""
        if cls not in self._family:
            cls(self.config, self.workspace, self._family)
        return cast("S", self._family[cls])

    def require_inputs(self, expected: Mapping[str, str] | None = None) -> dict[str, str]:
        """What the inputs hold, a digest by each name. A record keeps it, and `changed_inputs`
        holds it against what lies on disk later.

        expected: digests that a gate saw. Raises DraftworksError for an input that is not
        complete on disk, or no longer what the gate saw.
        """
        found = {}
        for cls in self.inputs:
            verdict = self.of(cls).verify(share=0)
            if not self.accepts(verdict):
                raise DraftworksError(f"{self.name} cannot start. {verdict.sentence}")
            found[cls.name] = verdict.digest
            seen = (expected or {}).get(cls.name, verdict.digest)
            if seen != verdict.digest:
                raise DraftworksError(
                    f"{verdict.title} changed since the gate opened: gate saw {seen}, disk holds "
                    f"{verdict.digest}; let the gate look again"
                )
        return found

    def accepts(self, verdict: Verdict) -> bool:
        """Whether an output is enough: complete, or in an experiment on a part
        (`allow_partial`) sound as far as it goes."""
        partial = self.config.allow_partial is not None and verdict.done > 0 and verdict.sound
        return verdict.complete or partial

    def changed_inputs(self, record: Mapping[str, Any]) -> list[str]:
        """Problems: inputs whose content is not what the record's output was made from."""
        if not record:
            damaged = f"{self.record_name} cannot be read; run {self.name} again"
            return [damaged] if self.record_file.is_file() else []
        return [
            f"made from other {cls.title} than lie on disk now; run {self.name} again"
            for cls in self.inputs
            if record["inputs"][cls.name] != self.of(cls).content()
        ]

    def damaged_files(
        self, inspection: Inspection, files: Mapping[Path, str | None]
    ) -> dict[str, str]:
        """Name within the output -> what is wrong with it. files: their checksums as recorded;
        None for a file that is not recorded yet."""
        return inspection.damaged(
            [
                Committed(str(path.relative_to(self.directory)), path, sha256)
                for path, sha256 in files.items()
                if sha256
            ]
        )

    def already_complete(self, progress: Progress) -> bool:
        """Whether a whole and sound output lies there, so that there is nothing to do."""
        verdict = self.verify(progress=progress)
        if verdict.complete:
            progress.begin(verdict.expected, self.unit, verdict.done)
        return verdict.complete

    def verify(
        self, *, share: float = 1.0, progress: Progress | None = None, seen: Seen | None = None
    ) -> Verdict:
        """Read what lies on disk.

        share: of the files whose every byte is read; 0 looks at presence and sizes only. seen:
        files that an earlier look has read, and that need no reading while they are unchanged.
        An input that cannot be read is a problem of this stage too.
        """
        inspection = Inspection(share, progress, seen)
        try:
            return self.inspect(inspection)
        except DraftworksError as error:
            if not self.inputs:
                raise
            return self.verdict(inspection, 0, 0, problems=[str(error)])

    def verdict(
        self,
        inspection: Inspection,
        expected: int,
        done: int,
        findings: Findings = NOTHING,
        problems: Sequence[str] = (),
    ) -> Verdict:
        return Verdict(
            **vars(findings),
            stage=self.name,
            title=self.title,
            unit=self.unit,
            expected=expected,
            done=done,
            problems=tuple(problems),
            checked=inspection.checked,
            digest=self.content(),
        )

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
    def inspect(self, inspection: Inspection) -> Verdict:
        """Hold what lies on disk against what should, as closely as `inspection` says."""

    @abstractmethod
    def content(self) -> str:
        """Digest of what the output holds by its manifest or record; empty while there is none."""


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
