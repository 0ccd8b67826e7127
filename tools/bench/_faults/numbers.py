"""NaNs, infinities, losses that are too large and batches without labels, on one stage, once and permanently.

All ranks skip the update of a batch with a non-finite gradient. The resulting state must be bitwise equal to
that of a run with finite gradients, which makes these updates and then reverts everything that they changed:
weights, routers' biases, the optimizers' state with its error feedback, and the average.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from _faults.inject_numbers import NORMS
from _faults.result import Attempt, Result, summarize
from _faults.runs import MOE_RECIPE, RECIPE, is_same, saved_state, start
from _faults.watched import Watched
from titan_async.training.checkpoint.folders import complete_steps

__all__ = ["measure"]

Fault = Mapping[str, Any]

STEPS, INTERVAL = 18, 4
"""Steps of a run, and steps between saves: the gradient of step 8's batch is delivered in a drain."""

MOST_IN_A_ROW = 4
FLAGS = (
    "--ema.decay", 0.9, "--checkpoint.interval", INTERVAL, "--checkpoint.keep_latest_k", 0,
    "--lr_scheduler.warmup_steps", 3, "--max_skipped_updates", MOST_IN_A_ROW,
)  # fmt: skip

EMPTY, SCALED, RANDOM = [12], [13, 14], [15, 16]
"""Steps whose batches have no labels, a loss 1000 times too large, and random tokens."""

HARMLESS = [
    {"place": "labels", "steps": EMPTY},
    {"place": "loss", "steps": SCALED, "factor": 1000.0},
    {"place": "tokens", "steps": RANDOM},
]
"""Faults with finite values, for which no update is skipped."""


def _faults(
    place: str, output: str, last: tuple[str, str], first: tuple[str, str], value: float
) -> dict[str, Fault]:
    """Faults in outputs and in gradients of either stage, each in a different batch.

    Args:
        place: of the faults in outputs.
        output: name of these outputs.
        last, first: name of the owner of the gradient on the last and on the first stage, and its parameter.
        value: of the fault on the first stage.
    """

    def of_output(stage: int, step: int, value: float) -> Fault:
        layer = f"layers.{1 + 3 * stage}"
        return {"place": place, "stage": stage, "layer": layer, "steps": [step], "value": value}

    def of_gradient(stage: int, step: int, parameter: str, value: float) -> Fault:
        return {"place": "gradient", "stage": stage, "steps": [step], "parameter": parameter, "value": value}

    return {
        f"NaN in {output}, first stage": of_output(0, 3, math.nan),
        f"infinity in {output}, last stage": of_output(1, 5, math.inf),
        f"NaN in {last[0]}'s gradient, last stage": of_gradient(1, 8, last[1], math.nan),
        f"infinity in {first[0]}'s gradient, first stage": of_gradient(0, 10, first[1], value),
    }


DENSE = _faults(
    "activations", "a layer's output", ("one parameter", "layers.4.attention.wo.weight"),
    ("one parameter", "layers.1.attention.wo.weight"), -math.inf,
)  # fmt: skip
MOE = _faults(
    "expert", "one expert's output", ("one router", "layers.4.moe.router.gate.weight"),
    ("one expert", "layers.1.moe.routed_experts.inner_experts.w1_EFD"), math.inf,
)  # fmt: skip

LASTING = {
    "NaN in a layer's output": (RECIPE, DENSE, 0, "the output of stage 0 (rank 0)"),
    "NaN in one parameter's gradient": (
        RECIPE, DENSE, 2, "the gradient of layers.4.attention.wo.weight on stage 1 (rank 1)"
    ),
    "infinity in one expert's output": (MOE_RECIPE, MOE, 1, "the output of stage 1 (rank 1)"),
}  # fmt: skip
"""The recipe, its faults, the index of the permanent one, and the place in the error message."""


@dataclass(frozen=True)
class _Ended:
    """A finished run."""

    folder: Path
    run: Watched
    status: int
    began: float
    """In seconds since the epoch, like all times."""
    ended: float

    @property
    def out(self) -> str:
        return "\n".join(line.text for line in self.run.out)

    @property
    def checkpoints(self) -> list[int]:
        return complete_steps(self.folder / "run" / "checkpoint")

    def when(self, pattern: str) -> float:
        """When it printed the first line that matches."""
        return next(line.time for line in self.run.out if re.match(pattern, line.text))


def measure(scratch: Path, *, quick: bool) -> Iterator[Result]:
    """See `faults.py`."""
    yield from _once(scratch / "dense", RECIPE, DENSE, HARMLESS)
    if not quick:
        yield from _once(scratch / "moe", MOE_RECIPE, MOE, [])
    for name in list(LASTING)[:1] if quick else LASTING:
        yield summarize("numbers", f"{name}, permanently", [_permanent(scratch / name, *LASTING[name])])


def _once(
    scratch: Path, recipe: Path, faults: Mapping[str, Fault], harmless: Sequence[Fault]
) -> Iterator[Result]:
    """Injects all of these faults into one run, each in a different batch."""
    steps = [step for fault in faults.values() for step in fault["steps"]]
    watched = [*harmless, {"place": "norms"}]
    spoiled = _run(scratch / "spoiled", [*faults.values(), *watched], recipe)
    undone = _run(scratch / "undone", [{"place": "undo", "steps": steps}, *watched], recipe)
    same = (
        spoiled.status == undone.status == 0
        and spoiled.checkpoints == undone.checkpoints == [*range(INTERVAL, STEPS, INTERVAL), STEPS]
        and all(_are_same_and_finite(spoiled, undone, step) for step in spoiled.checkpoints)
    )
    lines = [line.text for line in spoiled.run.out]
    for number, (name, fault) in enumerate(faults.items(), start=1):
        (step,) = fault["steps"]
        noticed = step if step % INTERVAL == 0 else step + 1
        said = f"step {noticed}: the gradient is not finite, so its update is skipped ({number} so far)"
        reported = lines.count(said) == 1 and len(re.findall("is skipped", spoiled.out)) == len(faults)
        seconds = spoiled.when(f"step {noticed}: ") - spoiled.when(f"step +{step - 1}/") if reported else None
        yield summarize("numbers", f"{name}, once", [Attempt(same and reported, notice=seconds, said=said)])
    if harmless:
        yield from _harmless(spoiled, same)


def _are_same_and_finite(one: _Ended, other: _Ended, step: int) -> bool:
    state = saved_state(one.folder, step)
    return is_same(state, saved_state(other.folder, step)) and _are_finite(state)


def _are_finite(state: Mapping[str, torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in state.values())


def _harmless(spoiled: _Ended, same: bool) -> Iterator[Result]:
    """Reports the batches with unusual but finite values."""
    found = re.findall(r"^step +(\d+)/.* loss +(\S+) +grad_norm +(\S+) ", spoiled.out, re.MULTILINE)
    figures = {int(step): (float(loss), norm) for step, loss, norm in found}
    parts = [json.loads((spoiled.folder / "run" / NORMS.format(rank=rank)).read_text()) for rank in range(2)]
    clipped = [math.hypot(*norms) for norms in zip(*parts, strict=True)]

    def said(steps: Sequence[int]) -> str:
        losses = ", ".join(f"{figures[step][0]:.2f}" for step in steps)
        after = ", ".join(f"{clipped[step - 1]:.2f}" for step in steps)
        return f"loss {losses}; gradient clipped to {after}"

    usual = figures[EMPTY[0] - 1][0]
    recovered = same and figures[STEPS][0] < usual + 0.5
    empty = figures[EMPTY[0]][0] == 0 == clipped[EMPTY[0] - 1]
    yield summarize("numbers", "a batch without labels", [Attempt(same and empty, said=said(EMPTY))])
    for name, steps in (("a loss scaled by 1000", SCALED), ("random tokens", RANDOM)):
        higher = all(figures[step][0] > usual for step in steps)
        held = all(0 < clipped[step - 1] < 1.01 for step in steps)
        yield summarize(
            "numbers", f"{name}, two batches", [Attempt(recovered and higher and held, said=said(steps))]
        )


def _permanent(folder: Path, recipe: Path, faults: Mapping[str, Fault], which: int, place: str) -> Attempt:
    """Injects a fault from step 6 on; without it the same command must resume from the last checkpoint."""
    first = INTERVAL + 2
    fault = list(faults.values())[which] | {"steps": list(range(first, 100))}
    ended = _run(folder, [fault], recipe)
    last = max((step for step, _ in ended.run.steps()), default=0)
    sentence = (
        rf"the gradient was not finite {MOST_IN_A_ROW} times in a row up to step {last + 1}, first in "
        rf"{re.escape(place)}: lower [^\n]*\(max_skipped_updates sets the limit\)"
    )
    err = "\n".join(line.text for line in ended.run.err)
    reported = ended.status == 2 and re.fullmatch(sentence, err) is not None
    usable = ended.checkpoints[-1:] == [last - last % INTERVAL] and _are_finite(
        saved_state(folder, ended.checkpoints[-1])
    )
    seconds = ended.ended - ended.run.steps()[first - 2][1]
    resumed = _run(folder, [], recipe)
    resumes = (
        resumed.status == 0 and resumed.checkpoints[-1] == STEPS and _are_finite(saved_state(folder, STEPS))
    )
    steps = resumed.run.steps()
    return Attempt(
        reported and usable and resumes,
        work_lost=last - steps[0][0] + 1 if steps else None,
        notice=seconds,
        resume=steps[0][1] - resumed.began if steps else None,
        said=err,
    )


def _run(folder: Path, faults: Sequence[Fault], recipe: Path) -> _Ended:
    folder.mkdir(parents=True, exist_ok=True)
    fault = {"kind": "numbers", "faults": faults}
    began = time.time()
    run = Watched(start(folder, *FLAGS, "--training.steps", STEPS, recipe=recipe, fault=fault))
    return _Ended(folder, run, run.wait(600), began, time.time())
