"""The runs of the study, and the TOML files of questions that list them.

A file has tables ``[[runs]]`` with fields of `Run`; a list as a value stands for one run per entry, and
several lists for their product. Missing fields have the values of the file's ``[defaults]``, then those of
`Run`. ``lr = "grid"`` is every rate of the optimizer's grid (``grids.toml``); ``lr = "tuned"``, the default,
the one with the lowest validation loss of synchronous runs; ``lr = "own"``, the one with the lowest loss of
the run itself, delay and feedback included.
"""

import functools
import itertools
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from _model import MODELS
from _optimizers import OPTIMIZERS, REST_LR

from titan_async.errors import UserError

__all__ = ["Question", "Run", "grid_runs", "load_questions", "rates_of", "run_key", "synchronous"]

QUESTIONS = Path(__file__).parent / "questions"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run. Equal runs have equal results, so questions share them."""

    model: str = "dense"
    optimizer: str = "adamw"
    lr: float | str = "tuned"
    """Peak learning rate, or "tuned", "own" or "grid"."""
    rest_lr: float = REST_LR
    """Peak rate of AdamW for the parameters without Muon or NorMuon."""
    lr_factor: float = 1.0
    """Scales all peak rates, `rest_lr` included."""
    lr_anneal: float = 0.0
    """Divides the rate by (1 + delay)^p, where p decreases from 1 to 0 over this fraction of the run."""
    warm_up: float = 0.1
    """Fraction of the run for the warm-up of the rate."""
    momentum: float | None = None
    """beta1 or mu; None is the optimizer's default."""
    delay: int | str = 0
    """In updates, for all weights; or "pipedream-d": d stages with delays d - 1 - r and weight stashing."""
    synchronous_start: float = 0.0
    """Fraction of the run without a delay, at the start."""
    synchronous_end: float = 0.0
    """Fraction of the run without a delay, at the end, which begins by removing the feedback's look-ahead."""
    feedback: str = "none"
    """Error feedback: "none", "update", "gradient", or "smoothed" (`SmoothedFeedback`)."""
    strength: float | str = 1.0
    """Strength of the feedback; "adaptive" for the similarity of successive updates."""
    smoothing: float = 0.0
    """Decay of the average of updates for the feedback "smoothed"."""
    prediction: float = 0.0
    """The `horizon` of `Prediction`, in updates."""
    curvature: float = 0.0
    """Weight of the term by which DC-ASGD extrapolates a gradient to the newest weights."""
    paci: int = 0
    """Number of stages of a pipeline without weight stashing (`PaciGradients`); 0 for none."""
    steps: int = 300
    sequences: int = 12
    seed: int = 0


@dataclass(frozen=True)
class Question:
    name: str
    runs: tuple[Run, ...]


def synchronous(run: Run) -> Run:
    """The run to compare with: the same without a delay and its corrections."""
    return Run(
        model=run.model,
        optimizer=run.optimizer,
        lr=run.lr,
        rest_lr=run.rest_lr,
        momentum=run.momentum,
        steps=run.steps,
        sequences=run.sequences,
        seed=run.seed,
    )


def run_key(run: Run) -> str:
    """A run's identity in the results: the fields that are not at their defaults."""
    plain = Run()
    return json.dumps(
        {name: value for name, value in asdict(run).items() if value != getattr(plain, name)}, sort_keys=True
    )


def load_questions(chosen: Sequence[str]) -> list[Question]:
    """Loads questions by name, file or number, such as "q2"; all questions if none is named.

    Raises:
        UserError: there is no such question, or its file is invalid.
    """
    # q9 before q10.
    names = sorted((path.stem for path in QUESTIONS.glob("*.toml")), key=lambda name: (name.find("_"), name))
    found = []
    for choice in chosen or names:
        fitting = [name for name in names if name == choice or name.split("_")[0] == choice]
        if not fitting and not Path(choice).is_file():
            raise UserError(f"There is no question {choice!r}: choose from {', '.join(names)}.")
        found.append(_load(QUESTIONS / f"{fitting[0]}.toml" if fitting else Path(choice)))
    return found


def _load(path: Path) -> Question:
    """Reads one question's file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}.") from error
    defaults = content.get("defaults", {})
    runs = [run for table in content.get("runs", []) for run in _expand({**defaults, **table}, path)]
    # By length, then by seed, so that an interrupted study has complete comparisons.
    ordered = sorted(dict.fromkeys(runs), key=lambda run: (run.steps, run.seed))
    return Question(path.stem, tuple(ordered))


def _expand(table: dict[str, Any], path: Path) -> Iterable[Run]:
    known = {field.name for field in fields(Run)}
    for name in table.keys() - known:
        raise UserError(f"{path}: a run has no {name!r}; it has {', '.join(sorted(known))}.")
    axes = [value if isinstance(value, list) else [value] for value in table.values()]
    for values in itertools.product(*axes):
        run = _plain(Run(**dict(zip(table.keys(), values, strict=True))))
        if run.lr == "grid":
            yield from (replace(run, lr=rate) for rate in rates_of(run.model, run.optimizer))
        else:
            yield run


def _plain(run: Run) -> Run:
    """Validates a run, and replaces the default momentum by None, so that equal runs compare equal."""
    if run.model not in MODELS:
        raise UserError(f"There is no model {run.model!r}: choose from {', '.join(MODELS)}.")
    if run.optimizer not in OPTIMIZERS:
        raise UserError(f"There is no optimizer {run.optimizer!r}: choose from {', '.join(OPTIMIZERS)}.")
    return replace(run, momentum=None) if run.momentum == OPTIMIZERS[run.optimizer].momentum else run


def rates_of(model: str, optimizer: str) -> list[float]:
    """The learning rates of the grid.

    Raises:
        UserError: ``grids.toml`` has none for this model and optimizer.
    """
    try:
        return _grids()[model][optimizer]
    except KeyError:
        raise UserError(f"grids.toml has no learning rates for {optimizer} on the model {model}.") from None


@functools.cache
def _grids() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "grids.toml").read_text(encoding="utf-8"))


def grid_runs(runs: Iterable[Run]) -> list[Run]:
    """The synchronous runs over the grid that `tuned_rate` needs for the `runs` whose `lr` is "tuned"."""
    wanted = dict.fromkeys(
        replace(synchronous(run), lr=rate, momentum=None)
        for run in runs
        if run.lr == "tuned" and (run.seed == 0 or run.model not in _grids()["one_seed"])
        for rate in rates_of(run.model, run.optimizer)
    )
    return list(wanted)
