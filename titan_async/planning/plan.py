"""Makes a plan: stages, memory, compared schedules, traffic, and a faster layout if there is one."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.pipelining.actions import min_microbatches
from titan_async.planning.config_variants import with_overlap, with_schedule, world_size_of
from titan_async.planning.hardware import ACHIEVABLE_BANDWIDTH, Cluster
from titan_async.planning.interruptions import Interruptions, interruptions_of
from titan_async.planning.layout import Layout, layout_of, microbatch_size_of
from titan_async.planning.measured_times import AS_ASSUMED, Calibration
from titan_async.planning.memory import Memory, memory_of, usable_memory
from titan_async.planning.stage_cost import StageCost
from titan_async.planning.step_time import (
    Receives,
    StepTime,
    seconds_by_receives,
    stage_costs,
    step_time,
)
from titan_async.planning.suggest import Searcher, Suggestion
from titan_async.planning.traced_parts import Part, deduplicated, trace_parts
from titan_async.planning.verdict import COMPARED, Verdict, verdict_of
from titan_async.training.preflight.layout import check_layout

__all__ = ["Overlapped", "Plan", "Planner", "Refused"]

_MAX_TASKS = 2**15
"""Limit of microbatches times stages: some seconds of simulation per schedule."""

_MIN_STATE = 12
"""Minimal bytes per parameter: weight, gradient and one state tensor, in float32."""


@dataclass(frozen=True)
class Refused:
    """A schedule that cannot run, and the reason."""

    schedule: str
    reason: str


@dataclass(frozen=True)
class Overlapped:
    """A step with or without overlapped pairs."""

    step_seconds: float
    most_memory: int
    """Peak bytes, the maximum over ranks."""
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The output of `titan-async plan`."""

    recipe: str
    cluster: Cluster
    layout: Layout
    parts: dict[str, Part]
    costs: list[StageCost]
    calibration: Calibration
    memory: list[Memory]
    """Of each pipeline rank."""
    schedules: list[StepTime | Refused]
    """The plan's own schedule first."""
    receives: Receives
    """Which receives of Async2BW are posted early in the plan."""
    seconds_by_receives: dict[Receives, float]
    """Of a step; empty if it makes no difference."""
    by_overlap: dict[bool, Overlapped]
    """With overlapped pairs (true) and without; empty without all-to-alls between experts. Only without if
    there are too few microbatches."""
    suggestion: Suggestion | None
    verdict: Verdict
    """Whether Async2BW pays."""
    interruptions: Interruptions | None
    """Time added by saves and failures, if the failure rate is given."""

    @property
    def time(self) -> StepTime:
        """Of the plan's own schedule."""
        own = self.schedules[0]
        assert isinstance(own, StepTime)
        return own

    @property
    def usable_memory(self) -> float:
        """Bytes of an accelerator that are available to a rank."""
        return usable_memory(self.cluster)

    @property
    def fits(self) -> list[bool]:
        """Whether each pipeline rank fits."""
        return [memory.total <= self.usable_memory for memory in self.memory]

    @property
    def parameters(self) -> int:
        """Of the whole model. A tied weight counts once, although two stages hold it."""
        return sum(part.dense + part.experts for part in deduplicated(self.parts.values()))

    @property
    def active_parameters(self) -> int:
        """Active parameters per token, including the embedding."""
        return sum(part.active for part in deduplicated(self.parts.values()))

    @property
    def forward_flops_per_token(self) -> float:
        """Of the whole model; training takes three times as many."""
        return sum(part.forward_flops for part in self.parts.values()) / self.layout.tokens_per_microbatch

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values: seconds, bytes, FLOPs."""
        layout = self.layout
        return {
            "recipe": self.recipe,
            "model": {
                "parameters": self.parameters,
                "active_parameters": self.active_parameters,
                "forward_flops_per_token": self.forward_flops_per_token,
                "tokens_per_step": layout.tokens_per_step,
                "tokens": layout.tokens_per_step * layout.steps,
            },
            "hardware": {
                **dataclasses.asdict(self.cluster),
                "nodes": -(-layout.world_size // self.cluster.per_node),
                "achievable_bandwidth": ACHIEVABLE_BANDWIDTH,
                "calibration": dataclasses.asdict(self.calibration),
            },
            "layout": {
                **{key: value for key, value in dataclasses.asdict(layout).items() if key != "stages"},
                "world_size": layout.world_size,
            },
            "stages": [
                {
                    "stage": stage,
                    "rank": layout.rank_of(stage),
                    "parts": list(names),
                    "parameters": sum(part.dense + part.experts for part in self.parts_on(stage)),
                    "active_parameters": sum(part.active for part in self.parts_on(stage)),
                    "seconds": {
                        "forward": cost.forward,
                        "input_gradient": cost.input_gradient,
                        "weight_gradient": cost.weight_gradient,
                        "gather": cost.gather,
                        "reduction": cost.reduction,
                        "update": cost.update,
                    },
                }
                for stage, (names, cost) in enumerate(zip(layout.stages, self.costs, strict=True))
            ],
            "memory": [
                {"rank": rank, "items": dict(memory.items), "total": memory.total, "fits": fits}
                for rank, (memory, fits) in enumerate(zip(self.memory, self.fits, strict=True))
            ],
            "usable_memory": self.usable_memory,
            "schedules": [dataclasses.asdict(entry) for entry in self.schedules],
            "receives": {"early": self.receives, "step_seconds": self.seconds_by_receives},
            "overlap": {
                str(overlap).lower(): dataclasses.asdict(entry) for overlap, entry in self.by_overlap.items()
            },
            "suggestion": None if self.suggestion is None else self.suggestion.to_json(),
            "verdict": self.verdict.to_json(),
            "interruptions": self.interruptions and dataclasses.asdict(self.interruptions),
        }

    def parts_on(self, stage: int) -> list[Part]:
        """The parts of a stage."""
        return deduplicated(self.parts[name] for name in self.layout.stages[stage])


class Planner:
    """Makes plans of one model, whose parts are traced once per microbatch size.

    Args:
        cluster: the hardware.
        calibration: from measured times.
    """

    def __init__(self, cluster: Cluster, calibration: Calibration = AS_ASSUMED) -> None:
        self.cluster, self.calibration = cluster, calibration
        self._parts: dict[tuple[int, int], dict[str, Part]] = {}
        self._scaled: dict[tuple[int, int, int], dict[str, Part]] = {}

    @property
    def searcher(self) -> Searcher:
        """Searches for layouts; parts of other microbatch sizes are scaled from traced ones."""
        return Searcher(self.cluster, self.calibration, self._parts_about, self._fits)

    def plan(
        self, config: Trainer.Config, recipe: str, *, suggests: bool = True, mtbf: float | None = None
    ) -> Plan:
        """A plan for a configuration whose shard degree is not -1.

        Args:
            config: resolved.
            recipe: its name.
            suggests: whether to search for a faster layout.
            mtbf: hours between failures of the whole job, on average.

        Raises:
            UserError: if its numbers are inconsistent.
        """
        context = config.parallelism.context_parallel_degree
        if context > 1:
            raise UserError(
                f"parallelism.context_parallel_degree is {context}, but plans do not model context "
                "parallelism: set it to 1"
            )
        world_size = world_size_of(config)
        check_layout(config, world_size=world_size)
        layout = layout_of(config, world_size)
        if layout.microbatches * layout.pp > _MAX_TASKS:
            raise UserError(
                f"a batch of {layout.microbatches} microbatches on {layout.pp} stages takes too long to "
                "simulate: raise parallelism.pipeline_parallel_microbatch_size, or lower "
                "training.global_batch_size"
            )
        parts = self.parts_of(config)
        costs = self.calibration.apply(stage_costs(config, layout, parts, self.cluster))
        times: dict[Layout, StepTime] = {}  # the model and its optimizer are the same

        def time(changed: Trainer.Config) -> StepTime:
            key = layout_of(changed, world_size_of(changed))
            if key not in times:
                times[key] = self.time(changed)
            return times[key]

        own = time(config)
        compared = [name for name in COMPARED if name != layout.schedule and layout.pp > 1]
        others = [_time_or_reason(config, name, time) for name in compared]
        found = None
        memory = [self._memory(config, layout, parts, rank) for rank in range(layout.pp)]
        interruptions = None
        if mtbf is not None:
            saved = sum(of_rank.saved for of_rank in memory) * layout.dp_shard * layout.tp
            interruptions = interruptions_of(config, layout, own, saved, self.cluster.per_node, mtbf)
        if suggests:
            found = self._suggest(config, own)
        if found is not None:
            times[layout_of(found.config, world_size)] = found.time
        verdict = verdict_of(config, self.searcher, time, found, searches=suggests)
        return Plan(
            recipe=recipe,
            cluster=self.cluster,
            layout=layout,
            parts=parts,
            costs=costs,
            calibration=self.calibration,
            memory=memory,
            schedules=[own, *others],
            receives=config.pipeline.early_receives,
            seconds_by_receives=seconds_by_receives(config, layout, costs, self.cluster),
            by_overlap=self._by_overlap(config, layout, parts, costs, memory, time),
            suggestion=found,
            verdict=verdict,
            interruptions=interruptions,
        )

    def time(self, config: Trainer.Config) -> StepTime:
        """A step of a configuration.

        Raises:
            UserError: if its schedule does not support its numbers.
        """
        layout = layout_of(config, world_size_of(config))
        parts = self.parts_of(config)
        costs = self.calibration.apply(stage_costs(config, layout, parts, self.cluster))
        try:
            return step_time(config, layout, parts, self.cluster, costs=costs)
        except ValueError as error:
            raise UserError(f"{layout.schedule}: {' '.join(str(error).split())}") from error

    def _by_overlap(
        self,
        config: Trainer.Config,
        layout: Layout,
        parts: dict[str, Part],
        costs: list[StageCost],
        memory: list[Memory],
        time: Callable[[Trainer.Config], StepTime],
    ) -> dict[bool, Overlapped]:
        found: dict[bool, Overlapped] = {}
        if not layout.delayed or not any(cost.exchange[0] for cost in costs):
            return found
        least = min_microbatches(layout.pp, layout.lookahead, overlap=True)
        for overlap in (False, True)[: 1 + (layout.microbatches >= least)]:
            changed, of_ranks = with_overlap(config, overlap), memory
            if overlap != layout.overlap:
                other = dataclasses.replace(layout, overlap=overlap)
                of_ranks = [self._memory(config, other, parts, rank) for rank in range(layout.pp)]
            most = max(of_rank.total for of_rank in of_ranks)
            found[overlap] = Overlapped(time(changed).step_seconds, most, most <= usable_memory(self.cluster))
        return found

    def parts_of(self, config: Trainer.Config) -> dict[str, Part]:
        """The parts of a configuration's model for its microbatch size.

        Raises:
            UserError: if torchtitan refuses the model.
        """
        key = _microbatch(config)
        if key not in self._parts:
            try:
                self._parts[key] = trace_parts(config, on_cpu=self.cluster.accelerator.on_cpu)
            except (ValueError, NotImplementedError) as error:
                raise UserError(f"the model cannot be planned: {' '.join(str(error).split())}") from error
        return self._parts[key]

    def _parts_about(self, config: Trainer.Config) -> dict[str, Part]:
        """The same, scaled from another traced size if possible, because tracing takes seconds."""
        size, seq_len = _microbatch(config)
        traced = [key for key in self._parts if key[1] == seq_len]
        if (size, seq_len) in self._parts or not traced:
            return self.parts_of(config)
        nearest = min(traced, key=lambda key: abs(key[0] - size))
        if (size, *nearest) not in self._scaled:
            scaled = {n: _scaled(part, size / nearest[0]) for n, part in self._parts[nearest].items()}
            self._scaled[size, *nearest] = scaled
        return self._scaled[size, *nearest]

    def _suggest(self, config: Trainer.Config, own: StepTime) -> Suggestion | None:
        while True:
            found = self.searcher.suggest(config, own)
            if found is None or _microbatch(found.config) in self._parts:
                return found
            self.parts_of(found.config)  # trace, and search again

    def _memory(self, config: Trainer.Config, layout: Layout, parts: dict[str, Part], rank: int) -> Memory:
        return memory_of(config, layout, parts, rank, on_cpu=self.cluster.accelerator.on_cpu)

    def _fits(self, config: Trainer.Config, layout: Layout, parts: dict[str, Part]) -> bool:
        most = usable_memory(self.cluster)
        for rank in range(layout.pp):
            names = [name for stage in layout.stages_of(rank) for name in layout.stages[stage]]
            numbers = sum(part.dense + part.experts for part in deduplicated(parts[name] for name in names))
            if numbers / (layout.dp_shard * layout.tp) * _MIN_STATE > most:
                return False
        # Memory does not depend on the number of microbatches once the pipeline is full.
        few = min(layout.microbatches, 4 * layout.pp)
        layout = dataclasses.replace(layout, microbatches=few, passes=1)
        return all(self._memory(config, layout, parts, rank).total <= most for rank in range(layout.pp))


def _time_or_reason(
    config: Trainer.Config, schedule: str, time: Callable[[Trainer.Config], StepTime]
) -> StepTime | Refused:
    try:
        return time(with_schedule(config, schedule))
    except ValueError as error:  # a UserError is one
        return Refused(schedule, " ".join(str(error).split()))


def _microbatch(config: Trainer.Config) -> tuple[int, int]:
    """The microbatch size in sequences, and their length."""
    return microbatch_size_of(config), config.training.seq_len


_SIZE_INDEPENDENT = ("name", "weights", "active", "gradient_bytes", "chunked")
"""Fields of a part that do not depend on the microbatch size."""


def _scaled(part: Part, factor: float) -> Part:
    """The approximate cost of a part for another microbatch size."""
    names = [field.name for field in dataclasses.fields(part) if field.name not in _SIZE_INDEPENDENT]
    values = {name: getattr(part, name) * factor for name in names}
    return dataclasses.replace(
        part, **{n: round(v) if isinstance(getattr(part, n), int) else v for n, v in values.items()}
    )
