"""The figures of docs/study.md and docs/study_300.md, one function per question.

Error bars are 95 % intervals over seeds.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from _gaps import Interval, Losses
from _long_tables import LENGTHS, RATES, SHARES, long_run
from _runs import Run, rates_of
from _tables import BUDGETS, COMPARED, LEVELS, MOMENTA, NAMES, PAPER, STRENGTHS, mitigations, plain_momentum
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["PLOTS"]

DELAYED, CORRECTED, OTHER, PLAIN = "#d55e00", "#1b7f5c", "#5b9bd5", "#555555"
GAP = "gap to synchronous, nats per byte"


def _finish(panels: Iterable[Axes], label: str = GAP, zero: bool = True) -> None:
    """Grid and zero line of all panels; label and legend of the first one."""
    first, *others = panels
    for axes in (first, *others):
        if zero:
            axes.axhline(0, color=PLAIN, linewidth=0.6)
        axes.grid(alpha=0.3)
    first.set_ylabel(label)
    _legend(first)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _log_axis(axes: Axes, ticks: Sequence[float], base: int = 10, **options: float) -> None:
    """Sets a logarithmic x axis with only these ticks."""
    axes.set_xscale("log", base=base)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], **options)
    axes.minorticks_off()


def _points(
    axes: Axes, x: Sequence[float], found: Sequence[Interval | None], colour: str, label: str
) -> None:
    """Draws a line through the measured values, with their intervals."""
    there = [(at, each) for at, each in zip(x, found, strict=True) if each is not None]
    if there:
        at, each = zip(*there, strict=True)
        half = np.nan_to_num([one.half for one in each])
        axes.errorbar(
            at, [one.mean for one in each], half, marker="o", markersize=3, linewidth=1, capsize=2,
            color=colour, label=label,
        )  # fmt: skip


def _rows(
    axes: Axes, labels: Sequence[str], series: Sequence[tuple[str, str, list[Interval | None]]]
) -> None:
    """Draws one row per label, with a point for each series."""
    for index, (name, colour, found) in enumerate(series):
        there = [(row, each) for row, each in enumerate(found) if each is not None]
        if there:
            rows, each = zip(*there, strict=True)
            shift = 0.22 * (index - (len(series) - 1) / 2)
            half = np.nan_to_num([one.half for one in each])
            axes.errorbar(
                [one.mean for one in each], np.array(rows) + shift, xerr=half, fmt="o", markersize=4,
                capsize=2, linewidth=1, color=colour, label=name,
            )  # fmt: skip
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.axvline(0, color=PLAIN, linewidth=0.6)
    axes.set_xlabel(GAP)
    axes.grid(axis="x", alpha=0.3)
    _legend(axes)


def optimizers(figure: Figure, losses: Losses, base: Run) -> None:
    delayed = [replace(base, optimizer=name, delay=1) for name in COMPARED]
    _rows(
        figure.subplots(),
        [NAMES[name] for name in COMPARED],
        [
            ("one update of delay", DELAYED, [losses.gap(run) for run in delayed]),
            (
                "with error feedback",
                CORRECTED,
                [losses.gap(replace(run, feedback="update")) for run in delayed],
            ),
        ],
    )


def _against_strength(axes: Axes, losses: Losses, delayed: Run) -> None:
    strengths = [strength for strength in STRENGTHS if isinstance(strength, float)]
    for level, colour in zip(LEVELS, (CORRECTED, OTHER), strict=True):
        runs = [replace(delayed, feedback=level, strength=strength) for strength in strengths]
        found = [losses.gap(delayed), *(losses.gap(run) for run in runs)]
        _points(axes, [0.0, *strengths], found, colour, level)
    axes.set_xlabel("strength")


def feedback(figure: Figure, losses: Losses, base: Run) -> None:
    names = ("adamw", "muon", "soap", "lion")
    panels = figure.subplots(1, len(names))
    for axes, name in zip(panels, names, strict=True):
        _against_strength(axes, losses, replace(base, optimizer=name, delay=1))
        axes.set_title(NAMES[name])
    _finish(panels)


def momentum(figure: Figure, losses: Losses, base: Run) -> None:
    panels = figure.subplots(1, 2)
    for axes, name in zip(panels, ("adamw", "muon"), strict=True):
        delayed = [
            replace(base, optimizer=name, delay=1, momentum=plain_momentum(name, value)) for value in MOMENTA
        ]
        places = range(len(MOMENTA))
        _points(axes, places, [losses.gap(run) for run in delayed], DELAYED, "one update of delay")
        corrected = [losses.gap(replace(run, feedback="update")) for run in delayed]
        _points(axes, places, corrected, CORRECTED, "with error feedback")
        axes.set_xticks(places, [str(value) for value in MOMENTA])
        axes.set(title=NAMES[name], xlabel="beta1" if name == "adamw" else "mu")
    _finish(panels)


def depth(figure: Figure, losses: Losses, base: Run) -> None:
    panels = figure.subplots(1, 2)
    for axes, name in zip(panels, ("adamw", "muon"), strict=True):
        run = replace(base, optimizer=name)
        stages = (1, 2, 4, 8)
        none = Interval(0.0, 0.0)
        steady = losses.gap(replace(run, delay=1))
        corrected = losses.gap(replace(run, delay=1, feedback="update"))
        variable = [losses.gap(replace(run, delay=f"pipedream-{count}")) for count in stages[1:]]
        _points(axes, stages, [none, *variable], DELAYED, "PipeDream: d - 1 - r")
        _points(axes, stages, [none, *[steady] * 3], OTHER, "2BW: 1 everywhere")
        _points(axes, stages, [none, *[corrected] * 3], CORRECTED, "2BW with error feedback")
        _log_axis(axes, stages, base=2)
        axes.set(title=NAMES[name], xlabel="stages d")
    _finish(panels, zero=False)


def rates(figure: Figure, losses: Losses, base: Run) -> None:
    panels = figure.subplots(3, 3)
    for axes, name in zip(panels.flat, COMPARED, strict=True):
        grid = rates_of(base.model, name)
        for delay, colour, label in ((0, PLAIN, "synchronous"), (1, DELAYED, "one update of delay")):
            runs = [replace(base, optimizer=name, lr=rate, delay=delay) for rate in grid]
            _points(axes, grid, [losses.loss(run, "validation") for run in runs], colour, label)
        _log_axis(axes, grid, fontsize=6)
        axes.grid(alpha=0.3)
        axes.set_title(NAMES[name])
    _legend(panels[0][0])
    panels[1][0].set_ylabel("validation loss, nats per byte")
    panels[2][1].set_xlabel("peak learning rate")


def mixture(figure: Figure, losses: Losses, base: Run) -> None:
    panels = figure.subplots(1, 4)
    shown = [(name, model) for name in ("adamw", "muon") for model in ("dense", "moe")]
    for axes, (name, model) in zip(panels, shown, strict=True):
        _against_strength(axes, losses, replace(base, optimizer=name, model=model, delay=1))
        axes.set_title(f"{NAMES[name]}, {'mixture' if model == 'moe' else 'dense'}")
    _finish(panels)


def mitigation_gaps(figure: Figure, losses: Losses, base: Run) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    changes = mitigations()
    for axes, name in zip(panels, ("adamw", "muon"), strict=True):
        run = replace(base, optimizer=name, delay=1)
        found = [losses.gap(change(run), over=replace(base, optimizer=name)) for _, change in changes]
        _rows(axes, [label for label, _ in changes], [(NAMES[name], OTHER, found)])
    # The panels share the axis, which each call of `_rows` inverts.
    panels[0].invert_yaxis()


def wallclock(figure: Figure, losses: Losses, base: Run, budget_s: float) -> None:
    """Training loss against seconds, the mean over seeds; one panel per setting."""
    groups: dict[str, dict[str, list[list]]] = defaultdict(lambda: defaultdict(list))
    for row in losses.wallclock(budget_s):
        groups[row["setting"]][row["schedule"]].append(row["curve"])
    panels = np.atleast_1d(figure.subplots(1, max(1, len(groups)), sharey=True))
    colours = {"1F1B": PLAIN, "ZBVZeroBubble": OTHER, "Async2BW": DELAYED, "Async2BW+EF": CORRECTED}
    for axes, (setting, schedules) in zip(panels, sorted(groups.items()), strict=False):
        for schedule, curves in schedules.items():
            end = min(curve[-1][0] for curve in curves)
            grid = np.linspace(0.15 * end, end, 60)
            values = [np.interp(grid, *np.array(curve).T) for curve in curves]
            axes.plot(grid, np.mean(values, axis=0), linewidth=1, color=colours.get(schedule), label=schedule)
        axes.set(title=setting, xlabel="seconds")
    _finish(panels, "training loss, nats per byte", zero=False)


def length(figure: Figure, losses: Losses, base: Run) -> None:
    """Question 10, and the gaps of arXiv 2606.30634 as lines."""
    panels = figure.subplots(1, len(RATES))
    for axes, name in zip(panels, RATES, strict=True):
        synchronous, *late = PAPER[name]
        variants = (("delayed", DELAYED, "none"), ("with error feedback", CORRECTED, "update"))
        for (label, colour, level), paper in zip(variants, late, strict=True):
            runs = [long_run(name, steps, delay=1, feedback=level) for steps in LENGTHS]
            _points(axes, LENGTHS, [losses.gap(run) for run in runs], colour, label)
            axes.axhline(
                paper - synchronous,
                color=colour,
                linewidth=0.8,
                linestyle=":",
                label=f"{label}, 360 M (paper)",
            )
        _log_axis(axes, LENGTHS)
        axes.set(title=NAMES[name], xlabel="updates")
    _finish(panels)


def start(figure: Figure, losses: Losses, base: Run) -> None:
    """Question 12."""
    panels = figure.subplots(1, 2)
    for axes, name in zip(panels, ("adamw", "muon"), strict=True):
        for steps, colour in zip(LENGTHS[1:], (OTHER, DELAYED, CORRECTED), strict=True):
            runs = [
                long_run(name, steps, delay=1, feedback="update", synchronous_start=share) for share in SHARES
            ]
            places = [100 * share for share in SHARES]
            _points(axes, places, [losses.gap(run) for run in runs], colour, f"{steps} updates")
        axes.set(title=f"{NAMES[name]}, then feedback", xlabel="synchronous start, % of the updates")
    _finish(panels)


PLOTS: dict[str, tuple[Callable[[Figure, Losses, Run], None], tuple[float, float]]] = {
    "optimizers": (optimizers, (5, 3.2)),
    "feedback": (feedback, (10, 2.8)),
    "momentum": (momentum, (7, 2.8)),
    "depth": (depth, (7, 2.8)),
    "rates": (rates, (9, 6.5)),
    "mixture": (mixture, (10, 2.8)),
    "mitigations": (mitigation_gaps, (9, 3.6)),
    **{name: (partial(wallclock, budget_s=seconds), (9, 2.8)) for name, seconds in BUDGETS.items()},
    "length": (length, (10, 3)),
    "start": (start, (7, 2.8)),
}
"""For each figure, the function that draws it and its size in inches."""
