"""How long a step takes, and what follows from that: the costs of the stages put through the simulation.

MFU counts three forwards' operations for every token, whatever is computed again, against the data sheet's
peak of all accelerators. Utilization is the share of a step in which ranks compute or wait inside a layer
(for experts, say), the mean over ranks; bubble is the share in which they wait for other stages, or lose to
messages that wait; the rest is gathering weights, reducing gradients and updating.

A message of Async2BW takes processors on both ranks from when it is sent or its receive is posted until it
is there. A receive that is posted early, an action of its kind ahead, hides the message's time and may wait
long. Posted late, when there is nothing else to do, it takes nothing from what is computed; but then the
message's time is waited for, and the sender's end may wait. torch's schedules are planned as if messages took
no processors, and so are a little too good.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan.trainer import Trainer

from titan_async.pipelining.simulation import Timing, simulate
from titan_async.planning.hardware import Cluster
from titan_async.planning.layout import Layout
from titan_async.planning.network import Network
from titan_async.planning.parts import Part
from titan_async.planning.regathers import with_regathers
from titan_async.planning.stage_cost import StageCost, message_bytes, stage_cost

__all__ = [
    "Receives",
    "StepTime",
    "receives_ahead",
    "run_seconds",
    "seconds_by_receives",
    "stage_costs",
    "step_time",
    "timing_of",
]

_DAY = 86_400

Receives = Literal["auto", "always", "never"]
"""`pipeline.early_receives`: which receives are early; with "auto" and a lookahead those of activations from
another node."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One schedule's step on all ranks."""

    schedule: str
    step_seconds: float
    synchronous_step_seconds: float
    """Of the steps of a synchronous start; as the others where there is none."""
    tokens_per_second: float
    mfu: float
    utilization: float
    bubble: float
    days: float
    """To the end of the run, its synchronous start included."""
    accelerator_hours: float
    sent_bytes: dict[str, float]
    """By all ranks together in a step, by kind."""
    world_size: int

    @property
    def sent_by_a_rank(self) -> dict[str, float]:
        """The mean over ranks, in bytes a step."""
        return {kind: size / self.world_size for kind, size in self.sent_bytes.items()}


def stage_costs(
    config: Trainer.Config, layout: Layout, parts: Mapping[str, Part], cluster: Cluster
) -> list[StageCost]:
    """The cost of every stage."""
    network = Network(cluster, layout)
    costs = [stage_cost(config, layout, parts, network, stage) for stage in range(len(layout.stages))]
    return with_regathers(layout, costs, network.collective_share)


def step_time(
    config: Trainer.Config,
    layout: Layout,
    parts: Mapping[str, Part],
    cluster: Cluster,
    *,
    costs: Sequence[StageCost] | None = None,
) -> StepTime:
    """Simulate a step.

    Args:
        config: what the layout was made from.
        layout: how the run lies on its ranks.
        parts: of a microbatch of the layout's size.
        cluster: the hardware.
        costs: of the stages, where they are known already.

    Raises:
        ValueError: if the schedule does not go together with the layout.
    """
    costs = costs or stage_costs(config, layout, parts, cluster)
    timing = timing_of(config, layout, costs, cluster, config.pipeline.early_receives)
    seconds = synchronous = _step_seconds(layout, timing)
    if layout.synchronous_steps:
        synchronous = _step_seconds(layout, timing, drains=True)
    of_run = run_seconds(layout, seconds, synchronous)
    ranks_of_a_stage = layout.world_size // layout.pp
    forward_flops = sum(part.forward_flops for part in _used(layout, parts))
    model_flops = 3 * forward_flops * layout.microbatches * layout.data_parallel
    peak = cluster.accelerator.peak(config.training.mixed_precision_param)
    # Every stage is on one rank, so that the mean over ranks is the sum over stages.
    busy = layout.microbatches * sum(cost.microbatch(layout.overlap) for cost in costs) / layout.pp
    outside = sum(cost.gather + cost.reduction + cost.update for cost in costs) / layout.pp
    sent: dict[str, float] = {}
    for cost in costs:
        for kind, size in cost.sent.items():
            sent[kind] = sent.get(kind, 0.0) + size * ranks_of_a_stage
    return StepTime(
        schedule=layout.schedule,
        step_seconds=seconds,
        synchronous_step_seconds=synchronous,
        tokens_per_second=layout.tokens_per_step / seconds,
        mfu=model_flops / (seconds * peak * layout.world_size),
        utilization=busy / seconds,
        bubble=max(1 - (busy + outside) / seconds, 0.0),
        days=of_run / _DAY,
        accelerator_hours=of_run * layout.world_size / 3600,
        sent_bytes=sent,
        world_size=layout.world_size,
    )


def run_seconds(layout: Layout, step_seconds: float, synchronous_step_seconds: float) -> float:
    """All steps of a run, those of its synchronous start among them."""
    delayed = layout.steps - layout.synchronous_steps
    return delayed * step_seconds + layout.synchronous_steps * synchronous_step_seconds


def seconds_by_receives(
    config: Trainer.Config, layout: Layout, costs: Sequence[StageCost], cluster: Cluster
) -> dict[Receives, float]:
    """Seconds of a step, by which receives are early; nothing where that makes no difference."""
    network = Network(cluster, layout)
    if not layout.delayed or not any(network.message_share(r, r + 1) for r in range(layout.pp - 1)):
        return {}
    timings = {each: timing_of(config, layout, costs, cluster, each) for each in get_args(Receives)}
    seconds = {
        ahead: _step_seconds(layout, timing)
        for ahead, timing in {tuple(timing.receives_ahead): timing for timing in timings.values()}.items()
    }
    return {each: seconds[tuple(timing.receives_ahead)] for each, timing in timings.items()}


def timing_of(
    config: Trainer.Config,
    layout: Layout,
    costs: Sequence[StageCost],
    cluster: Cluster,
    receives: Receives = "auto",
) -> Timing:
    """The simulation's times for a layout."""
    network, size = Network(cluster, layout), message_bytes(config, layout)
    rank_of = {stage: rank for rank in range(layout.pp) for stage in layout.stages_of(rank)}
    edges = [(rank_of[stage], rank_of[stage + 1]) for stage in range(len(costs) - 1)]
    ahead = [receives_ahead(network, layout, edge, receives) for edge in edges]
    return Timing(
        forward=[cost.forward for cost in costs],
        backward=[cost.backward for cost in costs],
        pair=[cost.pair for cost in costs],
        weight_gradient=[cost.weight_gradient for cost in costs],
        latency=[network.message_seconds(*edge, size) for edge in edges],
        receives_ahead=ahead if layout.delayed else (),
        message_share=[network.message_share(*edge) for edge in edges],
        gather=[cost.gather for cost in costs],
        reduction=[cost.reduction for cost in costs],
        update=[cost.update for cost in costs],
        norm=network.norm_seconds(),
    )


def receives_ahead(
    network: Network, layout: Layout, edge: tuple[int, int], receives: Receives
) -> tuple[int, int] | None:
    """How far ahead activations and gradients are received between two ranks, as in `Timing`."""
    if not network.message_share(*edge):
        return None
    if receives == "auto":
        return int(layout.lookahead > 0 and network.apart(*edge)), 0
    return (1, 1) if receives == "always" else (0, 0)


def _step_seconds(layout: Layout, timing: Timing, drains: bool = False) -> float:
    """A step by simulation. Of many microbatches all but the first and the last take the same time each."""
    short, long = 6 * layout.pp, 12 * layout.pp
    if layout.passes > 1 or layout.microbatches <= long or layout.microbatches % layout.pp:
        return _simulated(layout, layout.microbatches, timing, drains)
    shorter, longer = (_simulated(layout, m, timing, drains) for m in (short, long))
    return longer + (layout.microbatches - long) * (longer - shorter) / (long - short)


def _simulated(layout: Layout, microbatches: int, timing: Timing, drains: bool) -> float:
    # A synchronous step begins where the one before has ended, everywhere; Async2BW takes some to settle.
    batches = 6 if layout.delayed and not drains else 3
    return simulate(layout.programs(microbatches, batches, drains), timing).step_seconds


def _used(layout: Layout, parts: Mapping[str, Part]) -> list[Part]:
    return [parts[name] for stage in layout.stages for name in stage]
