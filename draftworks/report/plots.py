"""The report's plots: SVG that takes its colours from the page around it.

Every colour is written as ``var(--name, fallback)``. On the page it follows light and dark mode;
alone, the mid-tone fallback is readable on either. Nothing in the output depends on time or
chance.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from itertools import accumulate
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from draftworks.estimates.remaining import span
from draftworks.estimates.scaling import Scaled
from draftworks.report.model import PerPosition, Span, StepRow, ValidationRow

WIDTH = 4.3
"""Inches. Small, so that the text is still readable when a phone scales the plot down."""
MOST_POINTS = 800
"""Points of one line. More are not visible and make the page heavy."""

COLOURS = {
    "soft": "#7a8593",
    "line": "#a3abb5",
    "card": "#fefefe",
    "measured": "#2f86c6",
    "estimated": "#d98a1f",
    # Ordered by lightness, so that neighbours differ for every kind of colour vision.
    "position-1": "#5b4bb3",
    "position-2": "#3f70c1",
    "position-3": "#2f8fae",
    "position-4": "#36a181",
    "position-5": "#74aa4c",
    "position-6": "#b3a637",
    "position-7": "#cf8b4a",
}
POSITIONS = [colour for name, colour in COLOURS.items() if name.startswith("position-")]

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": COLOURS["soft"],
    "axes.labelcolor": COLOURS["soft"],
    "axes.edgecolor": COLOURS["line"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.6,
    "grid.alpha": 0.45,
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["soft"],
    "ytick.labelcolor": COLOURS["soft"],
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.borderaxespad": 0.2,
    "legend.handlelength": 1.3,
}

TICK_STEPS = [1, 2, 2.5, 5, 10]
TIME_UNITS = ((3 * 86_400, 86_400, "days"), (3 * 3_600, 3_600, "hours"), (180, 60, "minutes"))


def acceptance(rates: PerPosition) -> str:
    """Conditional acceptance of each draft position, measured beside estimated."""

    def draw(axes: Axes) -> None:
        positions = max(len(rates.measured), len(rates.estimated))
        digits = 1 if positions <= 4 else 0
        groups = [("measured", -0.2, rates.measured), ("estimated", 0.2, rates.estimated)]
        for name, shift, values in groups:
            places = [position + shift for position in range(1, len(values) + 1)]
            heights = [100 * value for value in values]
            bars = axes.bar(places, heights, width=0.37, color=COLOURS[name], label=name)
            axes.bar_label(bars, [f"{height:.{digits}f}" for height in heights], padding=2)
        axes.set(xlabel="draft position", ylabel="accepted, %", ylim=(0, 108))
        # Room for two more groups keeps a single pair of bars from filling the plot.
        axes.set_xlim(min(0.4, positions / 2 - 0.5), max(positions + 0.6, positions / 2 + 1.5))
        axes.set_xticks(range(1, positions + 1))
        axes.set_yticks(range(0, 101, 25))
        axes.grid(axis="y")
        _legend(axes)

    return _svg(draw, "Acceptance per draft position, measured and estimated")


def loss(history: Sequence[StepRow], validation: Sequence[ValidationRow]) -> str:
    """Training loss, raw and smoothed, with the validation loss on top."""

    def draw(axes: Axes) -> None:
        steps = _thinned([row.step for row in history])
        losses = [row.loss for row in history]
        colour = COLOURS["measured"]
        if len(history) > 1:
            axes.plot(steps, _thinned(losses), color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(steps, _thinned(smoothed(losses)), color=colour, label="training, smoothed")
        elif history:
            axes.plot(steps, losses, "o", color=colour, markersize=4, label="training")
        if validation:
            axes.plot(
                [row.step for row in validation],
                [row.loss for row in validation],
                "D",
                color=COLOURS["estimated"],
                markeredgecolor=COLOURS["card"],
                markeredgewidth=0.8,
                markersize=5.5,
                label="validation",
            )
        axes.set(ylabel="loss")
        axes.grid(axis="y")
        _step_axis(axes)
        _legend(axes)

    return _svg(draw, "Training and validation loss over steps")


def accuracy(validation: Sequence[ValidationRow]) -> str:
    """Validation accuracy over steps: one line for each draft position, named at its end."""

    def draw(axes: Axes) -> None:
        positions = max(len(row.accuracy_per_position) for row in validation)
        ends = []
        for position in range(positions):
            rows = [row for row in validation if len(row.accuracy_per_position) > position]
            values = [100 * row.accuracy_per_position[position] for row in rows]
            colour = POSITIONS[position % len(POSITIONS)]
            axes.plot([row.step for row in rows], values, "o-", color=colour, markersize=3)
            ends.append(values[-1])
        axes.set(ylabel="accuracy, %")
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS))
        axes.set_ylim(0, min(104, axes.get_ylim()[1] * 1.04))
        axes.grid(axis="y")
        _step_axis(axes)
        gap = 0.075 * axes.get_ylim()[1]
        for position, height in enumerate(spread(ends, gap)):
            axes.annotate(
                f"{position + 1}: {ends[position]:.1f} %",
                (1, height),
                (6, 0),
                xycoords=axes.get_yaxis_transform(),
                textcoords="offset points",
                color=POSITIONS[position % len(POSITIONS)],
                va="center",
                fontweight="bold",
            )

    return _svg(draw, "Validation accuracy of each draft position over steps")


def timeline(spans: Sequence[Span]) -> str:
    """When each stage was at work, with its duration; a row for each stage, first on top."""
    ordered = sorted(spans, key=lambda span: span.interval())
    stages = list(dict.fromkeys(span.stage for span in ordered))
    began = min(span.interval()[0] for span in ordered)
    total = max(1e-3, *(span.interval()[1] - began for span in ordered))
    unit, unit_name = next(
        ((unit, name) for limit, unit, name in TIME_UNITS if total >= limit), (1, "seconds")
    )

    def draw(axes: Axes) -> None:
        for row, stage in enumerate(stages):
            bars = [
                (start - began, max(end - start, 0))
                for start, end in (span.interval() for span in ordered if span.stage == stage)
            ]
            # A stage of seconds in a run of days would have no visible width.
            shown = [(start / unit, max(length, 0.006 * total) / unit) for start, length in bars]
            axes.broken_barh(shown, (row - 0.31, 0.62), facecolors=COLOURS["measured"])
            label = duration(sum(length for _, length in bars))
            _label(axes, label, row, shown, total / unit)
        axes.set_xlim(0, 1.02 * total / unit)
        axes.set_ylim(len(stages) - 0.45, -0.55)
        axes.set_yticks(range(len(stages)), [_shortened(stage) for stage in stages])
        axes.set_xlabel(f"{unit_name} from start")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=TICK_STEPS))
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")

    return _svg(draw, "Timeline of the stages", height=max(2.0, 0.75 + 0.33 * len(stages)))


def gpu_scaling(scalings: Sequence[Scaled], chosen: Scaled) -> str:
    """A step on each number of GPUs: computing, and exchanging gradients."""

    def draw(axes: Axes) -> None:
        places = range(len(scalings))
        works = [1000 * item.compute for item in scalings]
        waits = [1000 * item.exchange for item in scalings]
        axes.bar(places, works, width=0.6, color=COLOURS["measured"], label="computing")
        bars = axes.bar(
            places,
            waits,
            width=0.6,
            bottom=works,
            color=COLOURS["estimated"],
            label="exchanging gradients",
        )
        labels = [
            f"{1000 * item.step:,.0f} ms\neff. {item.efficiency(scalings[0]):.0%}"
            for item in scalings
        ]
        axes.bar_label(bars, labels, padding=2)
        names = [
            f"{item.gpus}\nrecommended" if item.gpus == chosen.gpus else f"{item.gpus}"
            for item in scalings
        ]
        axes.set_xticks(places, names)
        axes.set(xlabel="GPUs", ylabel="optimizer step, ms")
        axes.set_ylim(0, 1250 * max(item.step for item in scalings))
        axes.grid(axis="y")
        _legend(axes)

    return _svg(draw, "Step time of training by number of GPUs, with its efficiency")


def stage_hours(hours: Mapping[str, float | None]) -> str:
    """What each stage is planned to take; a stage without a known rate says so."""

    def draw(axes: Axes) -> None:
        known = [value or 0.0 for value in hours.values()]
        bars = axes.barh(range(len(hours)), known, height=0.62, color=COLOURS["measured"])
        labels = [
            "not known yet" if value is None else span(3600 * value) if value else "seconds"
            for value in hours.values()
        ]
        axes.bar_label(bars, labels, padding=4)
        axes.set_yticks(range(len(hours)), list(hours))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.18 * max(known) or 1)
        axes.set_xlabel("hours")
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")

    return _svg(draw, "Planned hours of each stage")


def duration(seconds: float) -> str:
    """A time as people say it: 4.2 s, 42 s, 7 min 5 s, 10 h 48 min, 2 d 3 h."""
    if seconds < 9.95:
        return "0 s" if seconds < 0.05 else f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 3_599.5:
        return _pair(round(seconds), 60, "min", "s")
    if seconds < 86_370:
        return _pair(round(seconds / 60), 60, "h", "min")
    return _pair(round(seconds / 3_600), 24, "d", "h")


def smoothed(values: Sequence[float]) -> list[float]:
    """Centred moving average over a 25th of the run.

    The window shrinks on both sides alike near an end, so the curve starts and ends on the data.
    """
    reach = max(1, len(values) // 50)
    sums = [0.0, *accumulate(values)]
    result = []
    for index in range(len(values)):
        side = min(reach, index, len(values) - 1 - index)
        result.append((sums[index + side + 1] - sums[index - side]) / (2 * side + 1))
    return result


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, moved apart as little as needed to lie `gap` from each other."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    # Each block of labels that touch is centred on the mean of the heights it stands for.
    blocks: list[list[int]] = []
    for index in order:
        blocks.append([index])
        while len(blocks) > 1 and _base(blocks[-1], heights, gap) < (
            _base(blocks[-2], heights, gap) + gap * len(blocks[-2])
        ):
            last = blocks.pop()
            blocks[-1] += last
    placed = list(heights)
    for block in blocks:
        base = _base(block, heights, gap)
        for rank, index in enumerate(block):
            placed[index] = base + rank * gap
    return placed


def _base(block: Sequence[int], heights: Sequence[float], gap: float) -> float:
    middle = sum(heights[index] for index in block) / len(block)
    return middle - gap * (len(block) - 1) / 2


def _pair(amount: int, base: int, large: str, small: str) -> str:
    whole, rest = divmod(amount, base)
    return f"{whole:,} {large}".replace(",", "\u202f") + (f" {rest} {small}" if rest else "")


def _thinned(values: Sequence[float]) -> list[float]:
    return list(values[:: -(-len(values) // MOST_POINTS) or 1])


def _shortened(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"


def _label(
    axes: Axes, text: str, row: int, bars: Sequence[tuple[float, float]], total: float
) -> None:
    """Write beside, between or on the bars (start, length): at the first place with room."""
    starts = [start for start, _ in bars]
    ends = [start + length for start, length in bars]
    beside, on = COLOURS["soft"], COLOURS["card"]
    places = [(ends[-1], total, "left", beside), (0, starts[0], "right", beside)]
    places += [
        (end, start, "center", beside) for end, start in zip(ends[:-1], starts[1:], strict=True)
    ]
    places += [(start, end, "center", on) for start, end in zip(starts, ends, strict=True)]
    needed = (0.024 * len(text) + 0.02) * total
    left, right, side, colour = next(
        (place for place in places if place[1] - place[0] >= needed),
        max(places, key=lambda place: place[1] - place[0]),
    )
    x = {"left": left, "right": right, "center": (left + right) / 2}[side]
    axes.annotate(
        text,
        (x, row),
        ({"left": 4, "right": -4, "center": 0}[side], 0),
        textcoords="offset points",
        ha=side,
        va="center",
        color=colour,
    )


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.margins(x=0.025)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=TICK_STEPS, integer=True))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda step, _: f"{step:,.0f}".replace(",", "\u202f"))
    )


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _svg(draw: Callable[[Axes], None], description: str, height: float = 2.7) -> str:
    # The salt makes ids repeatable, and keeps those of two plots on one page apart.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": description}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        file = StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    _, tag, drawing = file.getvalue().partition("<svg")
    text = f'{tag} role="img" aria-label="{description}"{drawing}'
    # The ids of groups repeat from plot to plot, and nothing refers to them.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name}, {colour})")
    return text
