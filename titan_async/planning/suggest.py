"""Searches for a faster layout on the same ranks, for the same batch.

Candidates have all degrees of pipeline, shard, replicate and expert parallelism with the same product,
microbatches of a quarter to twice the size, lookahead, and overlapped pairs with expert parallelism; tensor
parallelism does not change. They are ordered by a lower bound: the computation of the slowest rank and, with
flushes, the warm-up and cool-down of the pipeline. Candidates that fit are simulated in that order, until the
bound exceeds the fastest one.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.pipelining.programs import SPLIT_BACKWARD
from titan_async.planning.config_variants import Degrees, at_degrees, sequences_of
from titan_async.planning.hardware import Cluster
from titan_async.planning.layout import Layout, layout_of
from titan_async.planning.measured_times import Calibration
from titan_async.planning.stage_cost import StageCost
from titan_async.planning.step_time import StepTime, stage_costs, step_time
from titan_async.planning.traced_parts import Part
from titan_async.training.pipeline.schedule import is_async

__all__ = ["LEAST_GAIN", "Searcher", "Suggestion"]

LEAST_GAIN = 0.02
"""Minimal relative gain in step time; smaller ones are within the error of plans."""

_MAX_SIMULATED = 12


@dataclass(frozen=True)
class Suggestion:
    """A layout with a shorter predicted step."""

    changes: dict[str, tuple[int | bool, int | bool]]
    """Settings by key in a recipe: the current value and the suggested one."""
    time: StepTime
    gain: float
    """Relative increase of tokens per second."""
    config: Trainer.Config

    def to_json(self) -> dict[str, Any]:
        """The suggestion without its configuration."""
        changes = {key: {"now": old, "suggested": new} for key, (old, new) in self.changes.items()}
        return {"changes": changes, "gain": self.gain, "time": dataclasses.asdict(self.time)}


@dataclass(frozen=True)
class _Candidate:
    bound: float
    config: Trainer.Config
    layout: Layout
    parts: dict[str, Part]
    costs: list[StageCost]


@dataclass(frozen=True)
class Searcher:
    """Searches for layouts of a model on a cluster."""

    cluster: Cluster
    calibration: Calibration
    """From measured times."""
    parts_of: Callable[[Trainer.Config], dict[str, Part]]
    """Returns the parts of a configuration for its microbatch size; called often."""
    fits: Callable[[Trainer.Config, Layout, dict[str, Part]], bool]
    """Returns whether a layout fits into memory."""

    def fastest(
        self,
        config: Trainer.Config,
        world_size: int,
        limit: float = math.inf,
        only: Callable[[Layout], bool] = lambda _: True,
    ) -> tuple[StepTime, Trainer.Config] | None:
        """The fastest layout that fits and takes less than `limit` seconds a step; None if there is none.

        Args:
            config: of a run with any number of ranks; its shard degree is not -1.
            world_size: ranks to use.
            limit: seconds.
            only: returns whether to consider a layout.
        """
        candidates = [c for c in self._candidates(config, world_size, only) if c.bound < limit]
        candidates.sort(key=lambda candidate: candidate.bound)
        best: tuple[StepTime, Trainer.Config] | None = None
        simulated = 0
        for candidate in candidates:
            if candidate.bound >= limit or simulated == _MAX_SIMULATED:
                break
            if not self.fits(candidate.config, candidate.layout, candidate.parts):
                continue
            simulated += 1
            try:
                time = step_time(
                    candidate.config, candidate.layout, candidate.parts, self.cluster, costs=candidate.costs
                )
            except ValueError:
                continue  # torch's schedule does not support these numbers
            if time.step_seconds < limit:
                limit, best = time.step_seconds, (time, candidate.config)
        return best

    def suggest(self, config: Trainer.Config, now: StepTime) -> Suggestion | None:
        """The fastest layout that fits and is faster by `LEAST_GAIN`, or None.

        Args:
            config: of the run; its shard degree is not -1.
            now: its step.
        """
        found = self.fastest(config, now.world_size, now.step_seconds / (1 + LEAST_GAIN))
        if found is None:
            return None
        time, changed = found
        return Suggestion(_changes(config, changed), time, now.step_seconds / time.step_seconds - 1, changed)

    def _candidates(
        self, config: Trainer.Config, world_size: int, only: Callable[[Layout], bool] = lambda _: True
    ) -> Iterator[_Candidate]:
        known: dict[Degrees, list[StageCost]] = {}
        for degrees in _choices(config, world_size):
            try:
                changed = at_degrees(config, degrees)
                layout = layout_of(changed, world_size)
            except (UserError, ValueError):
                continue
            if not only(layout):
                continue
            parts = self.parts_of(changed)
            # The costs of a stage do not depend on the order of its tasks.
            key = dataclasses.replace(degrees, lookahead=0, overlap=False)
            if key not in known:
                known[key] = self.calibration.apply(stage_costs(changed, layout, parts, self.cluster))
            yield _Candidate(_least_seconds(layout, known[key]), changed, layout, parts, known[key])


def _choices(config: Trainer.Config, world_size: int) -> Iterator[Degrees]:
    """All degrees whose product is the world size, and which divide the batch and the experts."""
    parallelism = config.parallelism
    delayed = is_async(parallelism)
    rest = world_size // parallelism.tensor_parallel_degree
    own, experts = parallelism.pipeline_parallel_microbatch_size, _experts(config)
    sequences = sequences_of(config.training, parallelism)
    sizes = sorted({max(own // 4, 1), max(own // 2, 1), own, 2 * own})
    for pp, microbatch in itertools.product(_divisors(rest), sizes):
        data_parallel = rest // pp
        if sequences % (data_parallel * microbatch) or sequences // data_parallel // microbatch < pp:
            continue
        for shard in _divisors(data_parallel):
            ranks = shard * parallelism.tensor_parallel_degree
            for ep in [n for n in _divisors(ranks) if experts % n == 0] if experts else [1]:
                lookaheads = sorted({0, pp - 1}) if delayed else [0]
                overlaps = [False, True] if delayed and pp > 1 and ep > 1 else [False]  # needs all-to-alls
                for lookahead, overlap in itertools.product(lookaheads, overlaps):
                    yield Degrees(
                        pp=pp,
                        dp_replicate=data_parallel // shard,
                        dp_shard=shard,
                        ep=ep,
                        microbatch_size=microbatch,
                        lookahead=lookahead,
                        overlap=overlap,
                    )


def _experts(config: Trainer.Config) -> int:
    """The greatest common divisor of the layers' numbers of experts; 0 without experts."""
    layers = getattr(config.model_spec.model, "layers", [])
    return math.gcd(*(layer.moe.num_experts for layer in layers if getattr(layer, "moe", None) is not None))


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _least_seconds(layout: Layout, costs: list[StageCost]) -> float:
    """A lower bound of the step time."""
    fills, drains = [0.0] * layout.pp, [0.0] * layout.pp
    if not layout.delayed:
        # The first microbatch reaches a rank through the first stages of the previous ranks, and the last one
        # returns through them. Weight halves of split backwards may fill the latter time.
        before = costs[: layout.pp - 1]
        fills = [0.0, *itertools.accumulate(cost.forward for cost in before)]
        if layout.schedule not in SPLIT_BACKWARD:
            drains = [0.0, *itertools.accumulate(cost.backward for cost in before)]
    bounds = []
    for rank, (fill, drain) in enumerate(zip(fills, drains, strict=True)):
        own = [costs[stage] for stage in layout.stages_of(rank)]
        again = (layout.passes - 1) * (fill + drain)
        bounds.append(
            max(fill, sum(cost.gather for cost in own))
            + layout.microbatches * sum(cost.microbatch(layout.overlap) for cost in own)
            + again
            + max(drain, sum(cost.reduction for cost in own))
            + sum(cost.update for cost in own)
        )
    return max(bounds)


def _changes(before: Trainer.Config, after: Trainer.Config) -> dict[str, tuple[int | bool, int | bool]]:
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
