"""What the final report says, as data: the form of ``report.json``."""

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen and strict. NaN and infinity are refused: JSON has no word for them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class StepRow(Record):
    """One optimizer step of the training."""

    step: int
    """Optimizer step, from 1."""
    loss: float
    """Training loss of the step."""
    learning_rate: float
    """Learning rate of the step."""
    tokens_per_second: float
    """Tokens trained per second."""


class ValidationRow(Record):
    """One pass over the validation samples."""

    step: int
    """Optimizer step after which it ran."""
    loss: float
    """Loss over all validation samples."""
    accuracy_per_position: list[float]
    """Accuracy of each draft position; out-of-vocabulary rows count as wrong."""
    acceptance_length: float
    """Tokens per target step that these accuracies promise, bonus token included."""


class Training(Record):
    """How the drafter was trained."""

    steps: int
    """Optimizer steps."""
    parameters: int
    """Trained parameters."""
    train_samples: int
    """Samples trained on."""
    validation_samples: int
    """Samples kept out for validation."""
    history: list[StepRow]
    """The steps, in order."""
    validation: list[ValidationRow]
    """The validations, in order."""


class AcceptanceLength(Record):
    """Tokens per target step, bonus token included: the figure that the pipeline exists for."""

    measured: float
    """From real speculation."""
    estimated: float
    """From the stored hidden states."""
    tolerance: float
    """Largest relative difference that still counts as agreement."""
    agree: bool
    """Whether the two lie within the tolerance."""


class PerPosition(Record):
    """Conditional acceptance: accepted at a position, given that all before it were.

    A position that was never reached has no rate: the list ends before it.
    """

    measured: list[float]
    """From real speculation."""
    estimated: list[float]
    """From the stored hidden states."""


class Span(Record):
    """A time in which a stage was at work."""

    stage: str
    """Name of the stage."""
    start: str
    """ISO time, UTC."""
    end: str
    """ISO time, UTC."""

    def interval(self) -> tuple[float, float]:
        """Start and end in seconds since the epoch."""
        return instant(self.start).timestamp(), instant(self.end).timestamp()


class Report(Record):
    """Everything that a finished pipeline has to show."""

    name: str
    """Name of the pipeline, and so of the drafter."""
    created: str
    """ISO time, UTC."""
    target: str
    """The model that the drafter is made for."""
    target_layers: int
    """Its number of layers."""
    config: dict[str, Any]
    """The full configuration."""
    samples: int
    """Samples kept."""
    conversations: int
    """Conversations that they come from."""
    tokens: int
    """Tokens of all samples."""
    loss_tokens: int
    """Tokens that the target wrote itself: what the drafter learns from."""
    truncated: int
    """Answers that ended by length."""
    rejected: dict[str, int]
    """Answers left out, by reason."""
    coverage: float
    """Share of the loss tokens inside the draft vocabulary."""
    draft_vocabulary: int
    """Tokens that the drafter can propose."""
    target_vocabulary: int
    """Tokens of the target."""
    hidden_state_bytes: int
    """Size of the stored hidden states."""
    training: Training
    """The training and its course."""
    accuracy_per_position: list[float]
    """Validation accuracy of each draft position; out-of-vocabulary rows count as wrong."""
    acceptance_length: AcceptanceLength
    """Tokens per target step."""
    acceptance_per_position: PerPosition
    """Conditional acceptance of each draft position."""
    draft_tokens: int
    """Tokens drafted before each verification."""
    evaluated_prompts: int
    """Held-out prompts of the evaluation."""
    outputs_identical: bool
    """Whether speculative and plain decoding wrote the same, exact ties aside."""
    ties: int
    """Outputs that parted at an exact numerical tie of the target's two best tokens."""
    seconds: dict[str, float]
    """Time of work of each stage."""
    timeline: list[Span]
    """When each stage ran. Spans may overlap; an interrupted stage has several."""
    published: dict[str, str]
    """Folder of the drafter in each format."""
    warnings: list[str]
    """What a reader should know before using the drafter."""


def instant(text: str) -> datetime:
    """The moment of an ISO time; UTC where it names no zone."""
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
