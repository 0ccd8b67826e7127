"""Step time and throughput: simulates a layout's schedule with the costs of its stages.

MFU counts the operations of three forwards for every token, without recomputation, against the data sheet's
peak of all accelerators. Utilization is the share of a step in which ranks compute or wait inside a layer
(for experts, say), the mean over ranks; bubble is the share in which they wait for other stages, or lose to
pending messages; the rest is gathering weights, reducing gradients and updating.

A message of Async2BW occupies processors on both ranks from when it is sent or its receive is posted until it
has arrived. An early receive, posted one action of its kind ahead, hides the transfer and may be pending for
long. A late receive, posted when the rank is idle, does not slow down any computation, but exposes the
transfer, and the sender may wait. torch's schedules are planned as if messages occupied no processors, which
is slightly optimistic.

With four or more stages per rank weights are gathered repeatedly: torch's schedules keep the weights of the
next three stages of a rank, and start the gather of a stage when it becomes one of them. Gathers run one at a
time, in parallel to the computation; a stage waits for its own. The rank's other waits are ignored, so the
gather time is an upper bound.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan.trainer import Trainer

from titan_async.pipelining._order_internals import torch_order
from titan_async.pipelining.programs import stages_of_ranks
from titan_async.pipelining.simulation import Timing, simulate
from titan_async.planning.hardware import Cluster
from titan_async.planning.layout import Layout
from titan_async.planning.network import Network
from titan_async.planning.stage_cost import StageCost, message_bytes, stage_cost
from titan_async.planning.traced_parts import Part

__all__ = [
    "KEPT_STAGES",
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

KEPT_STAGES = 3
"""Stages of a rank whose weights torch's schedules keep gathered at a time."""

Receives = Literal["auto", "always", "never"]
"""`pipeline.early_receives`: which receives are early; with "auto" those of activations from other nodes, if
there is lookahead."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step of one schedule on all ranks."""

    schedule: str
    step_seconds: float
    synchronous_step_seconds: float
    """Of a step of a synchronous start; equal to `step_seconds` without one."""
    tokens_per_second: float
    mfu: float
    utilization: float
    bubble: float
    days: float
    """Of the whole run, including its synchronous start."""
    accelerator_hours: float
    sent_bytes: dict[str, float]
    """Sent by all ranks in a step, by kind."""
    world_size: int

    @property
    def sent_by_a_rank(self) -> dict[str, float]:
        """The mean over ranks, in bytes per step."""
        return {kind: size / self.world_size for kind, size in self.sent_bytes.items()}


def stage_costs(
    config: Trainer.Config, layout: Layout, parts: Mapping[str, Part], cluster: Cluster
) -> list[StageCost]:
    """The cost of every stage."""
    network = Network(cluster, layout)
    costs = [stage_cost(config, layout, parts, network, stage) for stage in range(len(layout.stages))]
    return _with_regathers(layout, costs, network.collective_share)


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
        config: of the layout.
        layout: of the run.
        parts: traced for the layout's microbatch size.
        cluster: the hardware.
        costs: of the stages, if they are known.

    Raises:
        ValueError: if the schedule does not support the layout.
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
    # Each stage is on one pipeline rank, so the mean over ranks is the sum over stages divided by pp.
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
    """Seconds of all steps of a run, including its synchronous start."""
    delayed = layout.steps - layout.synchronous_steps
    return delayed * step_seconds + layout.synchronous_steps * synchronous_step_seconds


def seconds_by_receives(
    config: Trainer.Config, layout: Layout, costs: Sequence[StageCost], cluster: Cluster
) -> dict[Receives, float]:
    """Seconds of a step by choice of early receives; empty if it makes no difference."""
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
    """The durations of a layout's tasks, for the simulation."""
    network, size = Network(cluster, layout), message_bytes(config, layout)
    edges = list(itertools.pairwise(layout.rank_of(stage) for stage in range(len(costs))))
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
    """When receives are posted between two ranks; see `Timing.receives_ahead`."""
    if not network.message_share(*edge):
        return None
    if receives == "auto":
        return int(layout.lookahead > 0 and network.spans_nodes(*edge)), 0
    return (1, 1) if receives == "always" else (0, 0)


def _step_seconds(layout: Layout, timing: Timing, drains: bool = False) -> float:
    def simulated(microbatches: int) -> list[float]:
        # A synchronous step begins when the previous one has ended on all ranks; Async2BW needs a few batches
        # to reach a steady state.
        batches = 6 if layout.delayed and not drains else 3
        return [simulate(layout.programs(microbatches, batches, drains), timing).step_seconds]

    if layout.passes > 1:
        return simulated(layout.microbatches)[0]
    return _extrapolated(simulated, layout.microbatches, layout.pp)[0]


def _extrapolated(run: Callable[[int], list[float]], microbatches: int, pp: int) -> list[float]:
    """`run(microbatches)`, extrapolated linearly for many, because all but the first and last are alike."""
    short, long = 6 * pp, 12 * pp
    if microbatches <= long or microbatches % pp:
        return run(microbatches)
    shorter, longer = run(short), run(long)
    return [
        b + (microbatches - long) * (b - a) / (long - short) for a, b in zip(shorter, longer, strict=True)
    ]


def _with_regathers(layout: Layout, costs: Sequence[StageCost], share: float) -> list[StageCost]:
    """The costs of all stages, including repeated gathers of weights.

    Returns them unchanged if the schedule does not support the layout; the simulation then raises.

    Args:
        layout: of the run.
        costs: without regathers.
        share: of a rank's processors that a gather occupies.
    """
    if len(costs) // layout.pp <= KEPT_STAGES or not any(cost.unshard.seconds for cost in costs):
        return list(costs)

    def of_a_pass(microbatches: int) -> list[float]:
        gathers, waits = _gathers_and_waits(layout, costs, microbatches, share)
        return [*gathers, *waits]

    try:
        found = _extrapolated(of_a_pass, layout.microbatches // layout.passes, layout.pp)
    except ValueError:
        return list(costs)
    gathers, waits = found[: len(costs)], found[len(costs) :]
    return [
        dataclasses.replace(
            cost,
            gather=waits[stage] * layout.passes,
            sent={
                **cost.sent,
                "weights": cost.sent["weights"] + (gathers[stage] - 1) * layout.passes * cost.unshard.sent,
            },
        )
        for stage, cost in enumerate(costs)
    ]


def _gathers_and_waits(
    layout: Layout, costs: Sequence[StageCost], microbatches: int, share: float
) -> tuple[list[float], list[float]]:
    """The number of each stage's gathers in one pass, and the seconds its rank loses to them."""
    stages = stages_of_ranks(layout.schedule, layout.pp, len(costs) // layout.pp)
    gathers, waits = [0.0] * len(costs), [0.0] * len(costs)
    for actions in torch_order(layout.schedule, stages, microbatches, gathers=True):
        now = free = 0.0  # of the computation, and of the gathers
        ready: dict[int, float] = {}
        for kind, stage, _ in actions:
            cost = costs[stage]
            if kind == "G":
                gathers[stage] += 1
                ready[stage] = free = max(free, now) + cost.unshard.seconds
                continue
            if stage in ready:
                waited = max(ready.pop(stage) - now, 0.0)
                # The rest of the gather ran in parallel to the computation.
                lost = waited + share * max(cost.unshard.seconds - waited, 0.0)
                waits[stage] += lost
                now += lost
            now += {
                "F": cost.forward,
                "B": cost.backward,
                "I": cost.input_gradient,
                "W": cost.weight_gradient,
            }[kind]
    return gathers, waits


def _used(layout: Layout, parts: Mapping[str, Part]) -> list[Part]:
    return [parts[name] for stage in layout.stages for name in stage]
