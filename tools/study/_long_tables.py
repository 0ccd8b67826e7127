"""The tables of docs/study.md about runs longer than 300 updates, one function each, in Markdown.

Questions that take many hours may be incomplete: a cell shows the mean over the seeds that have run, and
their number if it is not five; "-" stands for none, and a row without results is left out.
"""

from collections.abc import Callable
from dataclasses import replace

from _gaps import Interval, Losses
from _runs import Question, Run, load_questions
from _tables import NAMES, mitigations, plain_momentum, table

__all__ = ["ARMS", "LENGTHS", "LONG", "LONG_TABLES", "RATES", "SHARES", "long_run"]

LENGTHS = (300, 1000, 3000, 10000)
RATES = {"adamw": 4e-3, "muon": 1e-2, "soap": 16e-3}
"""The best of synchronous runs of 300 updates; the question files repeat them."""
LONG = 3000
SHARES = (0.0, 0.02, 0.05, 0.1, 0.25)
ARMS: dict[str, dict[str, int | str]] = {
    "synchronous": {},
    "delayed": {"delay": 1},
    "delayed + EF": {"delay": 1, "feedback": "update"},
}
_SEEDS = 5
_STEP_S = 0.045  # of a core, on average over the optimizers


def long_run(optimizer: str, steps: int = LONG, **changes: int | float | str) -> Run:
    """A run at the rate of all lengths."""
    return replace(Run(optimizer=optimizer, lr=RATES[optimizer], steps=steps), **changes)


def _cell(found: Interval | None, signed: bool = True) -> str:
    if found is None:
        return "-"
    seeds = "" if found.count == _SEEDS else f" ({found.count} seed{'s' * (found.count > 1)})"
    return found.shown(signed) + seeds


def _measured(headings: list[str], rows: list[list[str]], named: int) -> str:
    """The table of the rows with a result; the first `named` columns are labels."""
    kept = [row for row in rows if any(cell not in ("-", "") for cell in row[named:])]
    return table(headings, kept) if kept else "Not run yet."


def length(losses: Losses) -> str:
    """Question 10."""
    rows = []
    for name in RATES:
        for label, arm in ARMS.items():
            runs = [long_run(name, steps, **arm) for steps in LENGTHS]
            if arm:
                cells = [_cell(losses.gap(run)) for run in runs]
            else:
                cells = [_cell(losses.loss(run), signed=False) for run in runs]
            rows.append([NAMES[name], f"{label}, {'gap' if arm else 'loss'}", *cells])
    return _measured(["optimizer", "", *(f"{steps} updates" for steps in LENGTHS)], rows, 2)


def against_adamw(losses: Losses) -> str:
    """Question 10: differences of test losses to synchronous AdamW."""
    rows = []
    for name in ("adamw", "muon", "soap"):
        for label, arm in ARMS.items():
            if name == "adamw" and not arm:
                continue
            over = [long_run("adamw", steps) for steps in LENGTHS]
            runs = [long_run(name, steps, **arm) for steps in LENGTHS]
            cells = [_cell(losses.gap(run, over=each)) for run, each in zip(runs, over, strict=True)]
            rows.append([f"{NAMES[name]}, {label}", *cells])
    return _measured(["", *(f"{steps} updates" for steps in LENGTHS)], rows, 1)


def start(losses: Losses) -> str:
    """Question 12: the gap by the share of the run that was synchronous."""
    rows = []
    for name in ("adamw", "muon"):
        for steps in LENGTHS[1:]:
            for label, part, level in (
                ("synchronous, delay", "synchronous_start", "none"),
                ("synchronous, EF", "synchronous_start", "update"),
                ("EF, synchronous", "synchronous_end", "update"),
            ):
                runs = [long_run(name, steps, delay=1, feedback=level, **{part: share}) for share in SHARES]
                cells = [_cell(losses.gap(run)) for run in runs]
                if part == "synchronous_end":
                    cells[0] = ""  # without synchronous updates the order does not matter
                rows.append([NAMES[name], str(steps), label, *cells])
    headings = ["optimizer", "updates", "order", *(f"{share:.0%}" for share in SHARES)]
    return _measured(headings, rows, 3)


def own_rates(losses: Losses) -> str:
    """Question 11: every arm at its own best rate."""
    rows = []
    for name in RATES:
        for label, arm in ARMS.items():
            run = replace(long_run(name, **arm), lr="own")
            rate = losses.rate(run)
            gap = losses.gap(run, over=replace(long_run(name), lr="own")) if arm else None
            rows.append(
                [
                    NAMES[name],
                    label,
                    "-" if rate is None else f"{rate:g}",
                    _cell(losses.loss(run), signed=False),
                    _cell(gap) if arm else "",
                    _cell(losses.gap(long_run(name, **arm))) if arm else "",
                ]
            )
    headings = ["optimizer", "", "own rate", "loss", "gap", "gap at the one rate"]
    return _measured(headings, rows, 2)


def remedies(losses: Losses) -> str:
    """Question 13."""
    more: list[tuple[str, Callable[[Run], Run]]] = [
        *(
            (f"curvature, {weight:g} (DC-ASGD)", lambda run, weight=weight: replace(run, curvature=weight))
            for weight in (1.0, 30.0, 768.0)
        ),
        ("warm-up of a quarter", lambda run: replace(run, warm_up=0.25)),
        ("warm-up of a quarter, feedback", lambda run: replace(run, warm_up=0.25, feedback="update")),
        ("warm-up of a quarter, no delay", lambda run: replace(run, warm_up=0.25, delay=0)),
        ("PipeDream, 2 stages; WPipe", lambda run: replace(run, delay="pipedream-2")),
        ("PipeDream, 4 stages", lambda run: replace(run, delay="pipedream-4")),
        ("PipeDream, 8 stages", lambda run: replace(run, delay="pipedream-8")),
        ("PipeDream, 16 stages", lambda run: replace(run, delay="pipedream-16")),
    ]
    shorter = [
        (label, change) for label, change in mitigations() if not label.startswith(("averaged", "first"))
    ]
    rows = []
    for label, change in [*shorter, *more]:
        cells = [
            _cell(losses.gap(change(long_run(name, delay=1)), over=long_run(name)))
            for name in ("adamw", "muon")
        ]
        rows.append([label, *cells])
    for name, label in (("nadam_99", "NAdam, 0.99 (AsyncPP)"), ("adamw_rotated", "AdamW, basis rotated")):
        for arm, changes in ARMS.items():
            run = replace(Run(optimizer=name, lr="own", steps=LONG), **changes)
            rows.append(
                [f"{label}, {arm}, against AdamW", _cell(losses.gap(run, over=long_run("adamw"))), ""]
            )
    return _measured(["remedy", "AdamW", "Muon"], rows, 1)


def averaged(losses: Losses) -> str:
    """Changes of the loss by a moving average of the weights."""
    rows = [
        [
            NAMES[name],
            label,
            *(_cell(losses.changed(long_run(name, steps, **arm), "averaged_test")) for steps in LENGTHS[1:]),
        ]
        for name in RATES
        for label, arm in ARMS.items()
    ]
    return _measured(["optimizer", "", *(f"{steps} updates" for steps in LENGTHS[1:])], rows, 2)


def longer(losses: Losses) -> str:
    """Question 14."""
    rows = []
    for level in ("update", "gradient"):
        for strength in (0.5, 1.0, 1.5):
            cells = [
                _cell(losses.gap(long_run(name, delay=1, feedback=level, strength=strength)))
                for name in ("adamw", "muon")
            ]
            rows.append([f"feedback, {level} {strength:g}", *cells])
    for momentum in (0.8, 0.9, 0.95, 0.98):
        for label, arm in list(ARMS.items())[1:]:
            runs = [
                long_run(name, momentum=plain_momentum(name, momentum), **arm) for name in ("adamw", "muon")
            ]
            rows.append([f"momentum {momentum:g}, {label}", *(_cell(losses.gap(run)) for run in runs)])
    for label, arm in list(ARMS.items())[1:]:
        runs = [
            replace(long_run(name, **arm), model="moe", lr=rate)
            for name, rate in (("adamw", 4e-3), ("muon", 2e-2))
        ]
        rows.append([f"mixture of experts, {label}", *(_cell(losses.gap(run)) for run in runs)])
    for label, arm in list(ARMS.items())[1:]:
        run = replace(Run(optimizer="adan", lr="own", steps=LONG), **arm)
        rows.append([f"Adan in place of AdamW, {label}", _cell(losses.gap(run)), ""])
    return _measured(["", "AdamW", "Muon"], rows, 1)


def progress(losses: Losses) -> str:
    """How much of the long questions has run."""
    rows = []
    for question in load_questions([]):
        if all(run.steps <= LENGTHS[0] for run in question.runs):
            continue
        done = sum(run.seed in losses.rows(run) for run in question.runs)
        rows.append([question.name, str(done), str(len(question.runs)), _hours(question)])
    return table(["question", "runs so far", "of", "hours on a core"], rows)


def _hours(question: Question) -> str:
    return f"{sum(run.steps for run in question.runs) * _STEP_S / 3600:.0f}"


LONG_TABLES: dict[str, Callable[[Losses], str]] = {
    "length": length,
    "against_adamw": against_adamw,
    "start": start,
    "own_rates": own_rates,
    "remedies": remedies,
    "longer": longer,
    "averaged": averaged,
    "progress": progress,
}
