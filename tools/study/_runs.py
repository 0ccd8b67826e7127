"""What a run of the study is, and how a question's TOML file spells many of them.

A file has tables ``[[runs]]``. A table is a product: a list as a value stands for one run
for each of its entries. Fields are those of `Run`; those left out are the defaults of the file's
``[defaults]`` and then of `Run`. ``lr = "grid"`` is every rate of the optimizer's grid (``grids.toml``), and
``lr = "tuned"``, the default, the one whose synchronous runs end with the lowest validation loss;
``lr = "own"``, the one at which the very arm does, delay and feedback included.
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
    """One training run; equal runs give equal results, so questions share them."""

    model: str = "dense"
    optimizer: str = "adamw"
    lr: float | str = "tuned"
    """Peak learning rate, or "tuned", "own" or "grid"."""
    rest_lr: float = REST_LR
    """Peak rate of AdamW on what Muon and NorMuon do not take."""
    lr_factor: float = 1.0
    """Scales all peak rates, those of the parameters that Muon leaves to AdamW included."""
    lr_anneal: float = 0.0
    """Divides the rate by (1 + delay) to a power that falls from 1 to 0 over this share of the run."""
    warm_up: float = 0.1
    """The share of the run over which the rate rises."""
    momentum: float | None = None
    """beta1 or mu; None is the optimizer's default."""
    delay: int | str = 0
    """Updates for every weight, or "pipedream-d": d stages with delays d - 1 - r, weights stashed."""
    synchronous_start: float = 0.0
    """The share of the run without a delay, at its start."""
    synchronous_end: float = 0.0
    """The share of the run without a delay, at its end; there the look-ahead of feedback is removed first."""
    feedback: str = "none"
    """Error feedback: "none", "update", "gradient" or, the study's own, "smoothed"."""
    strength: float | str = 1.0
    """Of the feedback; "adaptive" follows the similarity of successive updates."""
    smoothing: float = 0.0
    """Of the feedback "smoothed": decay of its average of updates."""
    prediction: float = 0.0
    """How many of the last updates the weights are moved ahead for forward and backward."""
    curvature: float = 0.0
    """Weight of the term by which DC-ASGD brings a gradient to the newest weights."""
    paci: int = 0
    """Stages of a pipeline without weight stashing, some of whose forwards are one update too old."""
    steps: int = 300
    sequences: int = 12
    seed: int = 0


@dataclass(frozen=True)
class Question:
    name: str
    runs: tuple[Run, ...]


def synchronous(run: Run) -> Run:
    """The run to compare with: the same without a delay and whatever is done about it."""
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
    """Questions by name, file or number, such as "q2"; all of them if none is named.

    Raises:
        UserError: there is no such question, or its file is not as it should be.
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
    """Read one question's file; its name is the file's."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}.") from error
    defaults = content.get("defaults", {})
    runs = [run for table in content.get("runs", []) for run in _expand({**defaults, **table}, path)]
    # What is interrupted has all arms of the first seeds, and of the shorter runs before the longer ones.
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
    """The same run as others spell it: without what is the default anyway."""
    if run.model not in MODELS:
        raise UserError(f"There is no model {run.model!r}: choose from {', '.join(MODELS)}.")
    if run.optimizer not in OPTIMIZERS:
        raise UserError(f"There is no optimizer {run.optimizer!r}: choose from {', '.join(OPTIMIZERS)}.")
    return replace(run, momentum=None) if run.momentum == OPTIMIZERS[run.optimizer].momentum else run


def rates_of(model: str, optimizer: str) -> list[float]:
    """The learning rates among which the synchronous runs choose.

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
    """The synchronous runs over the grid that choose the rates of those `runs` whose `lr` is "tuned"."""
    wanted = dict.fromkeys(
        replace(synchronous(run), lr=rate, momentum=None)
        for run in runs
        if run.lr == "tuned" and (run.seed == 0 or run.model not in _grids()["one_seed"])
        for rate in rates_of(run.model, run.optimizer)
    )
    return list(wanted)
