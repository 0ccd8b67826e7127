"""Looks for a faster layout on the same ranks, for the same batch.

Tried are all degrees of pipeline, shard, replicate and expert parallelism that multiply to the same ranks,
three sizes of microbatches, and lookahead; tensor parallelism stays as it is. A quick bound sorts them out:
a step takes at least what the slowest rank computes, plus, where the pipeline empties, the time of filling
it. Those that may be faster are simulated, the most promising first, and of those that are the first that
fits wins.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.planning.hardware import Cluster
from titan_async.planning.layout import Layout, layout_of
from titan_async.planning.measured import Calibration
from titan_async.planning.parts import Part
from titan_async.planning.scale import Degrees, at_degrees
from titan_async.planning.stage_cost import StageCost
from titan_async.planning.step_time import StepTime, stage_costs, step_time

__all__ = ["LEAST_GAIN", "Suggestion", "suggest"]

LEAST_GAIN = 0.02
"""Of the step time; less is within what the model does not know."""

_MOST_SIMULATED = 24


@dataclass(frozen=True)
class Suggestion:
    """A layout that is predicted to be faster."""

    changes: dict[str, tuple[int, int]]
    """What to set, by its key in a recipe, with the value of now and the suggested one."""
    time: StepTime
    gain: float
    """Tokens a second more, as a share."""
    config: Trainer.Config

    def to_json(self) -> dict[str, Any]:
        """What it says, without the configuration."""
        changes = {key: {"now": old, "suggested": new} for key, (old, new) in self.changes.items()}
        return {"changes": changes, "gain": self.gain, "time": dataclasses.asdict(self.time)}


@dataclass(frozen=True)
class _Candidate:
    bound: float
    config: Trainer.Config
    layout: Layout
    parts: dict[str, Part]
    costs: list[StageCost]


def suggest(
    config: Trainer.Config,
    now: StepTime,
    cluster: Cluster,
    calibration: Calibration,
    parts_of: Callable[[Trainer.Config], dict[str, Part]],
    fits: Callable[[Trainer.Config, Layout, dict[str, Part]], bool],
) -> Suggestion | None:
    """The fastest layout that fits and is faster by `LEAST_GAIN`, or None.

    Args:
        config: the run as it is, with a number as its shard degree.
        now: its step.
        cluster: the hardware.
        calibration: what measured times say.
        parts_of: the parts of a configuration for a microbatch of its size; may be asked often.
        fits: whether a layout fits into memory.
    """
    world_size = now.world_size
    limit = now.step_seconds / (1 + LEAST_GAIN)
    candidates = []
    for degrees in _choices(config, world_size):
        try:
            changed = at_degrees(config, degrees)
            layout = layout_of(changed, world_size)
        except (UserError, ValueError):
            continue
        parts = parts_of(changed)
        costs = calibration.apply(stage_costs(changed, layout, parts, cluster))
        bound = _least_seconds(layout, costs)
        if bound < limit:
            candidates.append(_Candidate(bound, changed, layout, parts, costs))
    best: tuple[float, _Candidate, StepTime] | None = None
    candidates.sort(key=lambda candidate: candidate.bound)
    simulated = 0
    for candidate in candidates:
        if candidate.bound >= (best[0] if best else limit) or simulated == _MOST_SIMULATED:
            break
        if not fits(candidate.config, candidate.layout, candidate.parts):
            continue
        simulated += 1
        try:
            time = step_time(
                candidate.config, candidate.layout, candidate.parts, cluster, costs=candidate.costs
            )
        except ValueError:
            continue  # torch's schedule does not take these numbers
        if time.step_seconds < (best[0] if best else limit):
            best = time.step_seconds, candidate, time
    if best is None:
        return None
    _, candidate, time = best
    gain = now.step_seconds / time.step_seconds - 1
    return Suggestion(_changes(config, candidate.config), time, gain, candidate.config)


def _choices(config: Trainer.Config, world_size: int) -> Iterator[Degrees]:
    parallelism = config.parallelism
    rest = world_size // parallelism.tensor_parallel_degree
    size = parallelism.pipeline_parallel_microbatch_size
    experts = _has_experts(config)
    for pp in _divisors(rest):
        for shard in _divisors(rest // pp):
            for ep in _divisors(shard * parallelism.tensor_parallel_degree) if experts else [1]:
                for microbatch in sorted({max(size // 2, 1), size, 2 * size}):
                    for lookahead in {0, pp - 1} if pp > 1 and hasattr(config, "pipeline") else {0}:
                        yield Degrees(
                            pp=pp,
                            dp_replicate=rest // pp // shard,
                            dp_shard=shard,
                            ep=ep,
                            microbatch_size=microbatch,
                            lookahead=lookahead,
                        )


def _has_experts(config: Trainer.Config) -> bool:
    layers = getattr(config.model_spec.model, "layers", [])
    return any(getattr(layer, "moe", None) is not None for layer in layers)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _least_seconds(layout: Layout, costs: list[StageCost]) -> float:
    """A bound from below for a step."""
    ranks = [[costs[stage] for stage in layout.stages_of(rank)] for rank in range(layout.pp)]
    pairs = [sum(cost.forward + cost.backward for cost in own) for own in ranks]
    once = [sum(cost.gather + cost.reduction + cost.update for cost in own) for own in ranks]
    slowest = max(layout.microbatches * pair + rest for pair, rest in zip(pairs, once, strict=True))
    if layout.delayed or layout.pp == 1:
        return slowest
    # The first microbatch must have passed the other ranks' forwards before the last rank can begin.
    return slowest + min(sum(cost.forward for cost in own) for own in ranks) / len(ranks[0])


def _changes(before: Trainer.Config, after: Trainer.Config) -> dict[str, tuple[int, int]]:
    changes = {}
    for section in ("parallelism", "training", "pipeline"):
        old, new = getattr(before, section, None), getattr(after, section, None)
        if old is None or new is None:
            continue
        for field in dataclasses.fields(old):
            was, becomes = getattr(old, field.name), getattr(new, field.name)
            if was != becomes:
                changes[f"{section}.{field.name}"] = (was, becomes)
    return changes
