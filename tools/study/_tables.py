"""The tables of docs/study_300.md, one function per question, in Markdown.

Gaps are in nats per byte of the test split, above the synchronous run of the same optimizer, learning rate,
momentum and seed; "±" is half of the 95 % interval over seeds.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from _gaps import Interval, Losses, interval
from _optimizers import OPTIMIZERS
from _runs import Run, rates_of

__all__ = [
    "BUDGETS",
    "COMPARED",
    "LEVELS",
    "MOMENTA",
    "NAMES",
    "PAPER",
    "STRENGTHS",
    "TABLES",
    "mitigations",
    "plain_momentum",
    "table",
    "wallclock_cells",
]

NAMES = {
    "adamw": "AdamW",
    "nadam": "NAdam",
    "adan": "Adan",
    "mars": "MARS",
    "soap": "SOAP",
    "muon": "Muon",
    "normuon": "NorMuon",
    "lion": "Lion",
    "sgd": "SGD, momentum",
    "nadam_99": "NAdam, 0.99",
}
COMPARED = [name for name in NAMES if name != "nadam_99"]
"""Those of questions 1 and 5."""

STRENGTHS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, "adaptive")
MOMENTA = (0.8, 0.9, 0.95, 0.98, 0.99)
DELAYS = (1, 2, 4, "pipedream-2", "pipedream-4", "pipedream-8")
LEVELS = ("update", "gradient")
_MIXTURE_STRENGTHS = (0.5, 1.0)
_LARGER = Run(model="dense_5m", steps=150)

# Validation losses of arXiv 2606.30634 (SmolLM-2 360M): synchronous, delayed, with error feedback.
PAPER = {
    "muon": (2.578, 2.590, 2.583),
    "adan": (2.641, 2.651, None),
    "soap": (2.581, 2.608, 2.590),
    "adamw": (2.612, 2.890, 2.640),
}


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:g}"


def _loss(found: Interval | None) -> str:
    return "-" if found is None else found.shown()


def optimizers(losses: Losses, base: Run) -> str:
    """Question 1."""
    rows = []
    for name in COMPARED:
        run = replace(base, optimizer=name)
        delayed = replace(run, delay=1)
        paper = PAPER.get(name)
        reported = [
            f"{value - paper[0]:+.3f}" if paper and value else "" for value in (paper or (0, 0, 0))[1:]
        ]
        rows.append(
            [
                NAMES[name],
                _number(losses.rate(run)),
                _loss(losses.loss(run)),
                losses.shown_gap(delayed),
                losses.shown_gap(replace(delayed, feedback="update")),
                *reported,
            ]
        )
    headings = [
        "optimizer",
        "rate",
        "synchronous",
        "delayed",
        "delayed + EF",
        "paper: delayed",
        "paper: + EF",
    ]
    return table(headings, rows)


def feedback(losses: Losses, base: Run) -> str:
    """Question 2, of one model: gaps by level and strength."""
    rows = []
    for name in ("adamw", "muon", "soap", "lion"):
        delayed = replace(base, optimizer=name, delay=1)
        for level in LEVELS:
            corrected = replace(delayed, feedback=level)
            cells = [losses.shown_gap(replace(corrected, strength=strength)) for strength in STRENGTHS]
            adaptive = losses.rows(replace(corrected, strength="adaptive")).values()
            if adaptive:
                mean = interval([row["strength"] for row in adaptive]).mean
                cells[-1] += f" (mean {mean:.2f})"
            rows.append([NAMES[name], level, losses.shown_gap(delayed), *cells])
    return table(["optimizer", "level", "none", *map(str, STRENGTHS)], rows)


def momentum(losses: Losses, base: Run) -> str:
    """Question 3."""
    rows = []
    for name in ("adamw", "muon"):
        runs = [replace(base, optimizer=name, momentum=plain_momentum(name, value)) for value in MOMENTA]
        delayed = [replace(run, delay=1) for run in runs]
        rows += [
            [NAMES[name], "synchronous loss", *(_loss(losses.loss(run)) for run in runs)],
            ["", "delayed, gap", *(losses.shown_gap(run) for run in delayed)],
            ["", "+ EF, gap", *(losses.shown_gap(replace(run, feedback="update")) for run in delayed)],
        ]
    return table(["optimizer", "", *map(str, MOMENTA)], rows)


def plain_momentum(optimizer: str, value: float) -> float | None:
    """The `momentum` of a `Run`: None for the default."""
    return None if value == OPTIMIZERS[optimizer].momentum else value


def depth(losses: Losses, base: Run) -> str:
    """Question 4."""
    names = {
        1: "1 everywhere (2BW, any number of stages)",
        2: "2 everywhere",
        4: "4 everywhere",
        "pipedream-2": "PipeDream, 2 stages",
        "pipedream-4": "PipeDream, 4 stages",
        "pipedream-8": "PipeDream, 8 stages",
    }
    rows = []
    for delay in DELAYS:
        runs = [replace(base, optimizer=name, delay=delay) for name in ("adamw", "muon")]
        cells = [
            cell
            for run in runs
            for cell in (losses.shown_gap(run), losses.shown_gap(replace(run, feedback="update")))
        ]
        rows.append([names[delay], *cells])
    return table(["delay", "AdamW", "AdamW + EF", "Muon", "Muon + EF"], rows)


def rates(losses: Losses, base: Run) -> str:
    """Question 5: the validation losses that select the rates."""
    rows = []
    for name in COMPARED:
        grid = rates_of(base.model, name)
        for delay, label in ((0, "synchronous"), (1, "delayed")):
            runs = [replace(base, optimizer=name, lr=rate, delay=delay) for rate in grid]
            found = [losses.loss(run, "validation") for run in runs]
            best = min((each.mean for each in found if each), default=None)
            cells = []
            for run, rate, each in zip(runs, grid, found, strict=True):
                shown = _loss(each) if each or not losses.diverged(run) else "diverged"
                shown = f"**{shown}**" if each and each.mean == best else shown
                cells.append(f"{rate:g}: {shown}")
            rows.append([NAMES[name] if not delay else "", label, *cells])
    return table(["optimizer", "", "rate: loss", "", "", "", ""], rows)


def mixture(losses: Losses, base: Run) -> str:
    """Question 6."""
    rows = []
    for name in ("adamw", "muon"):
        for model in ("dense", "moe"):
            run = replace(base, optimizer=name, model=model)
            delayed = replace(run, delay=1)
            corrected = [
                replace(delayed, feedback=level, strength=strength)
                for level in LEVELS
                for strength in _MIXTURE_STRENGTHS
            ]
            rows.append(
                [
                    NAMES[name],
                    {"dense": "dense", "moe": "mixture"}[model],
                    _number(losses.rate(run)),
                    _loss(losses.loss(run)),
                    losses.shown_gap(delayed),
                    *(losses.shown_gap(each) for each in corrected),
                ]
            )
    strengths = [f"{level} {strength}" for level in LEVELS for strength in _MIXTURE_STRENGTHS]
    return table(["optimizer", "model", "rate", "synchronous", "delayed", *strengths], rows)


def mitigations() -> list[tuple[str, Callable[[Run], Run]]]:
    """Question 7: the name of each mitigation, and a function from the delayed run to the mitigated one."""
    return [
        ("nothing", lambda run: run),
        ("error feedback, update", lambda run: replace(run, feedback="update")),
        ("error feedback, gradient", lambda run: replace(run, feedback="gradient")),
        ("weight prediction", lambda run: replace(run, prediction=1.0)),
        *(
            (
                f"first {100 * share:.0f} % synchronous{then}",
                lambda run, share=share, level=level: replace(run, synchronous_start=share, feedback=level),
            )
            for level, then in (("none", ""), ("update", ", then feedback"))
            for share in (0.1, 0.25)
        ),
        ("half the rate", lambda run: replace(run, lr_factor=0.5)),
        ("rate rising from half (PipeMare)", lambda run: replace(run, lr_anneal=0.25)),
        ("PACI, 4 stages", lambda run: replace(run, delay=0, paci=4)),
        *(
            (
                f"averaged feedback {smoothing}, strength {strength:g}",
                lambda run, smoothing=smoothing, strength=strength: replace(
                    run, feedback="smoothed", smoothing=smoothing, strength=strength
                ),
            )
            for smoothing in (0.5, 0.8)
            for strength in (1.0, 2.0)
        ),
    ]


def mitigation_gaps(losses: Losses, base: Run) -> str:
    """Question 7."""
    rows = []
    for label, change in mitigations():
        runs = [change(replace(base, optimizer=name, delay=1)) for name in ("adamw", "muon")]
        over = [replace(base, optimizer=name) for name in ("adamw", "muon")]
        rows.append([label, *(losses.shown_gap(run, over=o) for run, o in zip(runs, over, strict=True))])
        if label == "error feedback, update":
            settled = [
                losses.shown_gap(run, "settled_test", over=o) for run, o in zip(runs, over, strict=True)
            ]
            rows.append(["the same, look-ahead removed at the end", *settled])
    nesterov = replace(base, optimizer="nadam_99", delay=1)
    adamw = replace(base, optimizer="adamw")
    rows.append(["NAdam, 0.99 (AsyncPP), against AdamW", losses.shown_gap(nesterov, over=adamw), ""])
    rows.append(
        [
            "the same without delay, against AdamW",
            losses.shown_gap(replace(nesterov, delay=0), over=adamw),
            "",
        ]
    )
    corrected = replace(nesterov, feedback="update")
    rows.append(["the same with error feedback, against AdamW", losses.shown_gap(corrected, over=adamw), ""])
    return table(["mitigation", "AdamW", "Muon"], rows)


def larger(losses: Losses, base: Run) -> str:
    """The confirmation at 5 M parameters."""
    rows = []
    for name in ("adamw", "muon"):
        run = replace(_LARGER, optimizer=name)
        delayed = replace(run, delay=1)
        gaps = [delayed, replace(delayed, feedback="update")]
        rows.append(
            [
                NAMES[name],
                _number(losses.rate(run)),
                _loss(losses.loss(run)),
                *(losses.shown_gap(each) for each in gaps),
            ]
        )
    return table(["optimizer", "rate", "synchronous", "delayed", "delayed + EF"], rows)


def wallclock_cells(results: Iterable[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of question 8: means over the seeds of a setting, optimizer and schedule."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["setting"], result["optimizer"], result["schedule"]].append(result)
    rows = []
    for (setting, optimizer, schedule), found in sorted(groups.items()):
        step_s, steps, seconds, busy, validation, test = (
            interval([result[name] for result in found])
            for name in ("step_s", "steps", "seconds", "utilization", "validation_loss", "test_loss")
        )
        late = [result["late_share"] for result in found]
        rows.append(
            [
                setting,
                NAMES[optimizer],
                schedule,
                str(len(found)),
                f"{1e3 * step_s.mean:.1f}",
                f"{steps.mean:.0f}",
                f"{seconds.mean:.1f}",
                f"{busy.mean:.0%}",
                "-" if None in late else f"{interval(late).mean:.1%}",
                validation.shown(),
                test.shown(),
            ]
        )
    headings = [
        "setting",
        "optimizer",
        "schedule",
        "seeds",
        "ms per step",
        "steps",
        "seconds",
        "busy",
        "late",
    ]
    return [*headings, "validation", "test"], rows


BUDGETS = {"wallclock": 25.0, "wallclock_120": 120.0}
"""The budgets in seconds of the tables and figures of question 8, by name."""


def wallclock(losses: Losses, base: Run, budget_s: float) -> str:
    """Question 8, of runs with this budget."""
    rows = losses.wallclock(budget_s)
    return table(*wallclock_cells(rows)) if rows else "Not run yet."


TABLES: dict[str, Callable[[Losses, Run], str]] = {
    "optimizers": optimizers,
    "feedback": feedback,
    "momentum": momentum,
    "depth": depth,
    "rates": rates,
    "mixture": mixture,
    "mitigations": mitigation_gaps,
    "larger": larger,
    **{name: partial(wallclock, budget_s=seconds) for name, seconds in BUDGETS.items()},
}
