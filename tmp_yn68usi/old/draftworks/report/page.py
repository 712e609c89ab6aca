"""The final report as one HTML file that needs nothing beside itself."""

import json
import shlex
from statistics import median
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from draftworks.report import plots
from draftworks.report.model import Report, instant


class Tile(NamedTuple):
    """One figure that a reader looks for first."""

    label: str
    value: str
    note: str
    good: bool | None = None
    """A verdict, where the figure is one."""


class Plot(NamedTuple):
    """A plot and what to see in it."""

    title: str
    caption: str
    svg: Markup | None
    """None where nothing was recorded."""


def render(report: Report) -> str:
    """The page. The same report gives the same bytes."""
    environment = Environment(
        loader=PackageLoader("draftworks", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        count=count,
        duration=plots.duration,
        magnitude=magnitude,
        median=median,
        percent=percent,
    )
    return environment.get_template("page.html.jinja").render(
        report=report,
        created=f"{instant(report.created):%Y-%m-%d %H:%M} UTC",
        alarms=alarms(report),
        tiles=tiles(report),
        plots=drawn(report),
        answers=max(1, report.samples + sum(report.rejected.values())),
        commands={form: serving(report, form) for form in report.published},
        config=json.dumps(report.config, indent=2, ensure_ascii=False),
    )


def alarms(report: Report) -> list[str]:
    """Findings that forbid trusting the drafter, each with what to do."""
    found = []
    length = report.acceptance_length
    if not length.agree:
        found.append(
            f"Measured acceptance length {length.measured:.2f} and estimated "
            f"{length.estimated:.2f} differ by more than {100 * length.tolerance:.3g}\u202f%. "
            "Training and engine probably follow different conventions: compare layer ids, "
            "final norm and draft vocabulary before using this drafter."
        )
    if not report.outputs_identical:
        found.append(
            "Speculative and plain decoding wrote different outputs. Speculation must never "
            "change what the target says: check the verification and the precision of the engine."
        )
    return found


def tiles(report: Report) -> list[Tile]:
    length = report.acceptance_length
    tolerance = f"{100 * length.tolerance:.3g}\u202f%"
    prompts = f"on {count(report.evaluated_prompts)} prompt{_s(report.evaluated_prompts)}"
    ties = f", {count(report.ties)} exact tie{_s(report.ties)} aside" if report.ties else ""
    work = sum(report.seconds.values())
    moments = [moment for span in report.timeline for moment in span.interval()]
    elapsed = max(moments) - min(moments) if moments else work
    return [
        Tile("Acceptance length", f"{length.measured:.2f}", "measured, tokens per target step"),
        Tile(
            "Estimated",
            f"{length.estimated:.2f}",
            f"agrees within {tolerance}" if length.agree else f"off by more than {tolerance}",
            length.agree,
        ),
        Tile(
            "Outputs identical",
            "Yes" if report.outputs_identical else "No",
            prompts + ties,
            report.outputs_identical,
        ),
        Tile(
            "Coverage",
            percent(report.coverage),
            f"{count(report.draft_vocabulary)} of {count(report.target_vocabulary)} tokens",
        ),
        Tile("Samples", count(report.samples), f"{magnitude(report.loss_tokens)} loss tokens"),
        Tile("Total time", plots.duration(work), f"{plots.duration(elapsed)} start to end"),
    ]


def drawn(report: Report) -> list[Plot]:
    training, rates = report.training, report.acceptance_per_position
    scored = any(row.accuracy_per_position for row in training.validation)
    return [
        Plot(
            "Acceptance per draft position",
            "Share of drafts accepted at a position, given that all before it were.",
            Markup(plots.acceptance(rates)) if rates.measured or rates.estimated else None,
        ),
        Plot(
            "Loss",
            "Over the whole training; each diamond is one validation.",
            Markup(plots.loss(training.history, training.validation))
            if training.history or training.validation
            else None,
        ),
        Plot(
            "Validation accuracy per position",
            "A line for each position; tokens outside the draft vocabulary count as wrong.",
            Markup(plots.accuracy(training.validation)) if scored else None,
        ),
        Plot(
            "Timeline",
            "When each stage was at work, and for how long in all.",
            Markup(plots.timeline(report.timeline)) if report.timeline else None,
        ),
    ]


def serving(report: Report, form: str) -> str | None:
    """The shell command that serves a published drafter beside its target."""
    target, folder, tokens = report.target, report.published[form], report.draft_tokens
    if form == "speculators":
        settings = {"method": "eagle3", "model": folder, "num_speculative_tokens": tokens}
        parts = [["vllm", "serve", target], ["--speculative-config", json.dumps(settings)]]
    elif form == "eagle":
        parts = [
            ["python", "-m", "sglang.launch_server", "--model-path", target],
            ["--speculative-algorithm", "EAGLE3"],
            ["--speculative-draft-model-path", folder],
            ["--speculative-num-steps", str(tokens)],
            ["--speculative-eagle-topk", "1"],
            ["--speculative-num-draft-tokens", str(tokens + 1)],
        ]
    else:
        return None
    return " \\\n  ".join(shlex.join(part) for part in parts)


def count(number: int) -> str:
    """37 312: all digits, in groups."""
    return f"{number:,}".replace(",", "\u202f")


def magnitude(number: float, unit: str = "") -> str:
    """14.4 M: three digits and a decimal prefix, where there are more than five."""
    if abs(number) < 100_000 and not unit:
        return count(round(number))
    for limit, prefix in ((1e12, "T"), (1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k")):
        # What rounds to 1000 of a prefix belongs to the next.
        if abs(number) >= 0.9995 * limit:
            return f"{_three(number / limit)}\u202f{prefix}{unit}"
    return f"{number:.0f}\u202f{unit}"


def percent(share: float) -> str:
    """98.3 %; never rounded up to the whole."""
    return f"{min(100 * share, 99.9) if share < 1 else 100 * share:.1f}\u202f%"


def _three(number: float) -> str:
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _s(number: int) -> str:
    return "" if number == 1 else "s"
