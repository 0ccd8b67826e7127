"""The pictures of docs/study.md about runs of more than 300 updates; error bars are 95 % intervals."""

from collections.abc import Callable

from _gaps import Losses
from _long_tables import LENGTHS, RATES, SHARES, long_run
from _plots import CORRECTED, DELAYED, GAP, OTHER, PLAIN, legend, points
from _tables import NAMES, PAPER
from matplotlib.figure import Figure

__all__ = ["LONG_PLOTS"]


def length(figure: Figure, losses: Losses) -> None:
    """Question 10, and the gaps of arXiv 2606.30634 as lines."""
    panels = figure.subplots(1, len(RATES))
    for axes, name in zip(panels, RATES, strict=True):
        synchronous, *late = PAPER[name]
        arms = (("delayed", DELAYED, "none"), ("with error feedback", CORRECTED, "update"))
        for (label, colour, level), paper in zip(arms, late, strict=True):
            runs = [long_run(name, steps, delay=1, feedback=level) for steps in LENGTHS]
            points(axes, LENGTHS, [losses.gap(run) for run in runs], colour, label)
            axes.axhline(
                paper - synchronous,
                color=colour,
                linewidth=0.8,
                linestyle=":",
                label=f"{label}, 360 M (paper)",
            )
        axes.axhline(0, color=PLAIN, linewidth=0.6)
        axes.set_xscale("log")
        axes.set_xticks(LENGTHS, [str(steps) for steps in LENGTHS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set(title=NAMES[name], xlabel="updates")
    panels[0].set_ylabel(GAP)
    legend(panels[0])


def start(figure: Figure, losses: Losses) -> None:
    """Question 12."""
    panels = figure.subplots(1, 2)
    for axes, name in zip(panels, ("adamw", "muon"), strict=True):
        for steps, colour in zip(LENGTHS[1:], (OTHER, DELAYED, CORRECTED), strict=True):
            runs = [
                long_run(name, steps, delay=1, feedback="update", synchronous_start=share) for share in SHARES
            ]
            places = [100 * share for share in SHARES]
            points(axes, places, [losses.gap(run) for run in runs], colour, f"{steps} updates")
        axes.axhline(0, color=PLAIN, linewidth=0.6)
        axes.grid(alpha=0.3)
        axes.set(title=f"{NAMES[name]}, then feedback", xlabel="synchronous start, % of the updates")
    panels[0].set_ylabel(GAP)
    legend(panels[0])


LONG_PLOTS: dict[str, tuple[Callable[[Figure, Losses], None], tuple[float, float]]] = {
    "length": (length, (10, 3)),
    "start": (start, (7, 2.8)),
}
"""What draws a picture of that name, and its size in inches."""
