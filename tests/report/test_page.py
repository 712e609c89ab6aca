import math
import random
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pytest
from pydantic import ValidationError

from draftworks.report.model import (
    AcceptanceLength,
    PerPosition,
    Report,
    Span,
    StepRow,
    Training,
    ValidationRow,
)
from draftworks.report.page import count, magnitude, percent, render
from draftworks.report.plots import duration, smoothed, spread

BEGAN = datetime(2026, 3, 2, 8, 30, tzinfo=UTC)


def span(stage: str, start: float, end: float) -> Span:
    moments = [(BEGAN + timedelta(seconds=seconds)).isoformat() for seconds in (start, end)]
    return Span(stage=stage, start=moments[0], end=moments[1])


def training(steps: int = 400, positions: int = 3, every: int = 50) -> Training:
    noise = random.Random(7)

    def loss(step: int) -> float:
        return 2.1 + 5 * math.exp(-step / (0.12 * steps))

    def accuracies(step: int) -> list[float]:
        learned = 1 - math.exp(-step / (0.25 * steps))
        return [learned * 0.415 * 0.85**position for position in range(positions)]

    return Training(
        steps=steps,
        parameters=23_592_960,
        train_samples=1_104,
        validation_samples=96,
        history=[
            StepRow(
                step=step,
                loss=loss(step) + noise.gauss(0, 0.16),
                learning_rate=1e-4 * (1 - step / (steps + 1)),
                tokens_per_second=3_200 + noise.gauss(0, 90),
            )
            for step in range(1, steps + 1)
        ],
        validation=[
            ValidationRow(
                step=step,
                loss=loss(step) + 0.12,
                accuracy_per_position=accuracies(step),
                acceptance_length=1 + sum(math.prod(accuracies(step)[:k]) for k in (1, 2, 3)),
            )
            for step in range(every, steps + 1, every)
        ],
    )


def report(**changes: Any) -> Report:
    """A finished run of the demo, with one interruption of its training."""
    values: dict[str, Any] = {
        "name": "smollm2-demo",
        "created": "2026-03-02T10:21:40+00:00",
        "target": "smollm2-135m-instruct",
        "target_layers": 30,
        "config": {"name": "smollm2-demo", "train": {"epochs": 5, "learning_rate": 1e-4}},
        "samples": 1_200,
        "conversations": 1_200,
        "tokens": 412_318,
        "loss_tokens": 297_544,
        "truncated": 41,
        "rejected": {"ended by length": 41, "empty answer": 7},
        "coverage": 0.983,
        "draft_vocabulary": 8_192,
        "target_vocabulary": 49_152,
        "hidden_state_bytes": 1_899_560_000,
        "training": training(),
        "accuracy_per_position": [0.407, 0.346, 0.294],
        "acceptance_length": AcceptanceLength(
            measured=1.62, estimated=1.58, tolerance=0.1, agree=True
        ),
        "acceptance_per_position": PerPosition(
            measured=[0.431, 0.352, 0.287], estimated=[0.412, 0.338, 0.295]
        ),
        "draft_tokens": 3,
        "evaluated_prompts": 40,
        "outputs_identical": True,
        "ties": 2,
        "seconds": {
            "generate": 1_934.0,
            "vocab": 3.4,
            "extract": 1_260.5,
            "train": 2_488.0,
            "evaluate": 342.0,
            "publish": 5.2,
        },
        "timeline": [
            span("generate", 0, 1_934),
            span("vocab", 1_936, 1_939.4),
            span("extract", 1_936, 3_196.5),
            span("train", 3_199, 4_399),
            span("train", 4_960, 6_248),
            span("evaluate", 6_250, 6_592),
            span("publish", 6_592, 6_597.2),
        ],
        "published": {
            "eagle": "/data/work/artifacts/publish-0f3a55d0c1b2e4a7/eagle",
            "speculators": "/data/work/artifacts/publish-0f3a55d0c1b2e4a7/speculators",
        },
        "warnings": [],
    }
    return Report(**(values | changes))


class Page(HTMLParser):
    """The tags, addresses and visible text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(re.sub(r"<style.*?</style>", "", html, flags=re.DOTALL))
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.words += [] if tag in {"strong", "span"} else [" "]
        self.addresses += [
            value or "" for name, value in attrs if name in {"src", "href", "xlink:href", "data"}
        ]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def html() -> str:
    return render(report())


def test_says_the_result_in_one_sentence(html: str) -> None:
    assert (
        "Yields 1.62 tokens per target step, measured by real speculation on 40 held-out "
        "prompts; estimated 1.58, agree within 10 %."
    ) in Page(html).text


def test_shows_every_figure(html: str) -> None:
    text = Page(html).text
    for figure in (
        "98.3\u202f%",
        "8\u202f192 of 49\u202f152 tokens",
        "297\u202f544",
        "23.6\u202fM",
        "1.90\u202fGB",
        "1 h 41 min",
        "1 h 50 min start to end",
        "41 min 28 s",
        "on 40 prompts, 2 exact ties aside",
        "empty answer",
    ):
        assert " ".join(figure.split()) in text


def test_needs_nothing_beside_itself(html: str) -> None:
    page = Page(html)
    assert all(address.startswith("#") for address in page.addresses)
    assert not {"script", "img", "link", "iframe", "image"} & set(page.tags)
    assert "@import" not in html
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    assert set(re.findall(r"(\S+)=\"https?://", html)) == {"xmlns", "xmlns:xlink"}
    assert page.tags.count("svg") == 4
    assert page.tags[0] == "html"


def test_ids_are_unique(html: str) -> None:
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids))


def test_plots_take_their_colours_from_the_page(html: str) -> None:
    svgs = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert "var(--measured, #" in svgs
    assert not re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", svgs)
    names = set(re.findall(r"var\(--([a-z0-9-]+)", html))
    light, dark = html.split("@media (prefers-color-scheme: dark)", 1)
    for name in names:
        assert f"--{name}:" in light
        assert f"--{name}:" in dark


def test_same_report_same_bytes(html: str) -> None:
    assert render(report()) == html


def test_gives_the_serving_commands(html: str) -> None:
    text = Page(html).text.replace(" \\ ", " ")
    folder = "/data/work/artifacts/publish-0f3a55d0c1b2e4a7"
    assert (
        "vllm serve smollm2-135m-instruct --speculative-config '"
        f'{{"method": "eagle3", "model": "{folder}/speculators", "num_speculative_tokens": 3}}\''
    ) in text
    assert (
        "python -m sglang.launch_server --model-path smollm2-135m-instruct "
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {folder}/eagle "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    ) in text


def test_quotes_paths_for_the_shell() -> None:
    text = Page(
        render(report(target="/my models/k", published={"eagle": "/it's", "other": "/x"}))
    ).text
    assert "--model-path '/my models/k'" in text
    assert "--speculative-draft-model-path '/it'\"'\"'s'" in text
    assert "other /x" in text


def test_disagreement_is_an_alarm() -> None:
    length = AcceptanceLength(measured=1.2, estimated=2.95, tolerance=0.075, agree=False)
    text = Page(render(report(acceptance_length=length, outputs_identical=False, ties=0))).text
    assert "Do not use this drafter yet" in text
    assert "1.20 and estimated 2.95 differ by more than 7.5" in text
    assert "apart by more than 7.5" in text
    assert "wrote different outputs" in text
    assert "agree within" not in text


def test_warnings_come_before_the_figures(html: str) -> None:
    assert "warning" not in Page(html).text
    text = Page(render(report(warnings=["Answers are short.", "Disk is nearly full."]))).text
    assert text.index("2 warnings Answers are short.") < text.index("Acceptance length")


def test_escapes_what_people_named() -> None:
    evil = "<script>alert('$x^$')</script>&"
    html = render(
        report(
            name=evil,
            target=evil,
            config={"name": f"</pre>{evil}"},
            rejected={evil: 1},
            seconds={evil: 3.0},
            timeline=[span(evil, 0, 3)],
            published={evil: evil, "eagle": evil, "speculators": evil},
            warnings=[evil],
        )
    )
    assert "<script" not in html
    assert "script" not in Page(html).tags
    assert html.count("&lt;script&gt;alert(") >= 9


def test_a_run_that_recorded_nothing() -> None:
    empty = report(
        samples=0,
        tokens=0,
        loss_tokens=0,
        rejected={},
        training=Training(
            steps=0,
            parameters=0,
            train_samples=0,
            validation_samples=0,
            history=[],
            validation=[],
        ),
        accuracy_per_position=[],
        acceptance_per_position=PerPosition(measured=[], estimated=[]),
        evaluated_prompts=1,
        seconds={},
        timeline=[],
        published={},
    )
    page = Page(render(empty))
    assert page.text.count("Nothing was recorded.") == 4
    assert "Nothing was published." in page.text
    assert "on 1 held-out prompt;" in page.text


@pytest.mark.parametrize("positions", [1, 2, 5, 7, 16])
def test_any_number_of_draft_positions(positions: int) -> None:
    rates = [0.9 * 0.93**position for position in range(positions)]
    page = Page(
        render(
            report(
                draft_tokens=positions,
                accuracy_per_position=rates,
                # The last position was never reached in real speculation.
                acceptance_per_position=PerPosition(measured=rates[:-1], estimated=rates),
                training=training(steps=40, positions=positions),
            )
        )
    )
    assert f"{positions} {100 * rates[-1]:.1f} % {100 * rates[-1]:.1f} % \u2013" in page.text


def test_single_points_are_drawn() -> None:
    once = training(steps=1, every=1)
    assert Page(render(report(training=once))).tags.count("svg") == 4


def test_a_long_run_stays_a_small_page() -> None:
    html = render(report(training=training(steps=30_000, every=1_000)))
    assert len(html) < 400_000


def test_a_validation_without_accuracies() -> None:
    row = ValidationRow(step=1, loss=2.0, accuracy_per_position=[], acceptance_length=1.0)
    bare = training().model_copy(update={"validation": [row]})
    assert "Nothing was recorded." in Page(render(report(training=bare))).text


def test_a_run_of_days() -> None:
    day = 86_400.0
    page = Page(
        render(
            report(
                seconds={"generate": 2 * day, "train": 3.5 * day},
                timeline=[span("generate", 0, 2 * day), span("train", 2 * day, 5.5 * day)],
            )
        )
    )
    assert "days from start" in page.text
    assert "5 d 12 h" in page.text


def test_round_trip() -> None:
    original = report()
    assert Report.model_validate_json(original.model_dump_json()) == original


def test_refuses_what_it_does_not_know() -> None:
    values = report().model_dump()
    with pytest.raises(ValidationError, match="speedup"):
        Report.model_validate(values | {"speedup": 2.0})
    with pytest.raises(ValidationError, match="coverage"):
        Report.model_validate(values | {"coverage": float("nan")})
    with pytest.raises(ValidationError, match="frozen"):
        report().samples = 1


def test_every_field_is_described() -> None:
    schema = Report.model_json_schema()
    for model in (schema, *schema["$defs"].values()):
        assert all("description" in field for field in model["properties"].values())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.23, "4.2 s"),
        (9.97, "10 s"),
        (42, "42 s"),
        (59.7, "1 min"),
        (425, "7 min 5 s"),
        (3_599.8, "1 h"),
        (38_880, "10 h 48 min"),
        (86_385, "1 d"),
        (183_600, "2 d 3 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_large_numbers() -> None:
    assert count(88_012_345) == "88\u202f012\u202f345"
    assert magnitude(99_999) == "99\u202f999"
    assert magnitude(14_400_000) == "14.4\u202fM"
    assert magnitude(999_999_999) == "1.00\u202fB"
    assert magnitude(828e9, "B") == "828\u202fGB"
    assert magnitude(12, "B") == "12\u202fB"
    assert percent(0.9999) == "99.9\u202f%"
    assert percent(1.0) == "100.0\u202f%"


def test_smoothing_keeps_level_and_ends() -> None:
    assert smoothed([3.0] * 10) == pytest.approx([3.0] * 10)
    line = [float(value) for value in range(200)]
    assert smoothed(line) == pytest.approx(line)
    assert smoothed([]) == []


def test_labels_are_spread_without_changing_their_order() -> None:
    assert spread([1.0, 5.0], 1) == [1.0, 5.0]
    assert spread([5.0, 5.0, 5.0], 1) == pytest.approx([4.0, 5.0, 6.0])
    placed = spread([3.0, 2.9, 0.0], 1)
    assert placed == pytest.approx([3.45, 2.45, 0.0])
