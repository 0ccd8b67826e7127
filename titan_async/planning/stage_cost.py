"""What one stage spends on a microbatch and on a batch, in seconds, and what each of its ranks sends.

A part takes the longer of two times: that of its operations at the achievable share of the peak, and that
of what it moves through memory. Moved are, forward, its weights and twice what it saves; the same for the
gradient of the input; for those of the weights, the gradient in the parameters' dtype and its float32 sum,
which FSDP keeps unsharded. Tensor- and expert-parallel collectives come on top, for layers wait for them; but
of an overlapped pair each half computes while the other's tokens travel, which is taken to slow nothing down.

Once a batch weights are gathered and gradients reduced. Under "1F1B" and "GPipe" FSDP gathers a part's
weights while the part before it computes its first forward, so that only what is longer than that is waited
for; under Async2BW, and under torch's schedules of several stages, a stage has all its weights before it
begins, and only a rank's first stage waits. Reductions are waited for under all schedules: none overlaps
them with a backward. Without a pipeline FSDP gathers weights anew in each forward and each backward and
reduces in each backward, all of it while the part computes, so that the longer of the two counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.trainer import Trainer

from titan_async.pipelining.simulation import Half, pair_seconds
from titan_async.planning.hardware import ACHIEVABLE_BANDWIDTH
from titan_async.planning.layout import Layout
from titan_async.planning.network import Network
from titan_async.planning.parts import Part, together
from titan_async.planning.update_cost import update_cost

__all__ = ["StageCost", "message_bytes", "stage_cost"]

_REDUCED_BYTES = 4
_OVERLAPPED_GATHERS = ("1F1B", "GPipe", "Async2BW")


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Seconds of one stage on each of its ranks, and bytes that one of them sends in a step, by kind."""

    forward: float
    input_gradient: float
    """What activation checkpointing computes again included."""
    weight_gradient: float
    gather: float
    reduction: float
    update: float
    sent: Mapping[str, float]
    exchange: tuple[float, float] = (0.0, 0.0)
    """Of the forward and of the backward, in which tokens travel between experts."""
    exchanges: tuple[int, int] = (0, 0)
    """Their number."""

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient

    @property
    def pair(self) -> float:
        """Of a forward and a backward that overlap."""
        halves = zip((self.forward, self.backward), self.exchange, self.exchanges, strict=True)
        return pair_seconds(*(Half(*half) for half in halves))


def stage_cost(
    config: Trainer.Config, layout: Layout, parts: Mapping[str, Part], network: Network, stage: int
) -> StageCost:
    """The cost of one stage of a layout, whose parts are those of a microbatch of its size."""
    own = [parts[name] for name in layout.stages[stage]]
    times = [_PartTimes(config, layout, part, network) for part in own]
    own = together(own)
    each = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize
    update = update_cost(config, layout, network, [weight for part in own for weight in part.weights])
    gathers = [_over_units(layout, part, network, each) for part in own]
    reductions = [_over_units(layout, part, network, _REDUCED_BYTES) for part in own]
    replicas = network.groups.replicas
    shard_bytes = sum(part.dense + part.experts for part in own) / (layout.dp_shard * layout.tp) * 4
    all_reduce = network.all_reduce_seconds(replicas, shard_bytes)
    exchanged = _tied_bytes(layout, parts) if layout.delayed and stage in (0, layout.pp - 1) else 0.0
    if layout.pp == 1:
        for part_times, gather, reduction in zip(times, gathers, reductions, strict=True):
            part_times.overlap(gather.seconds, reduction.seconds)
    repeats = layout.microbatches if layout.pp == 1 else 1
    waits = _gather_wait(layout, stage, [g.seconds for g in gathers], [t.forward for t in times])
    sent = {
        "activations": _messages_sent(config, layout, stage),
        "weights": sum(g.sent for g in gathers) * (2 * repeats if layout.pp == 1 else 1),
        "gradients": sum(r.sent for r in reductions) * repeats
        + 2 * shard_bytes * replicas.share_sent
        + exchanged,
        "experts": sum(t.expert_bytes for t in times) * layout.microbatches,
        "tensor parallelism": sum(t.tensor_bytes for t in times) * layout.microbatches,
        "Muon": update.sent_bytes,
    }
    return StageCost(
        forward=sum(t.forward for t in times),
        input_gradient=sum(t.input_gradient for t in times),
        weight_gradient=sum(t.weight_gradient for t in times),
        gather=waits,
        # Without a pipeline the first part's is the one after the last backward.
        reduction=sum(r.seconds for r in (reductions[:1] if layout.pp == 1 else reductions)) + all_reduce,
        update=update.seconds,
        sent=sent,
        exchange=(sum(t.exchange for t in times), sum(t.exchange * t.repeats for t in times)),
        exchanges=(sum(t.exchanges for t in times), sum(t.exchanges * t.repeats for t in times)),
    )


def message_bytes(config: Trainer.Config, layout: Layout) -> float:
    """What a stage sends the next one for one microbatch."""
    each = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize
    return layout.tokens_per_microbatch * config.model_spec.model.dim * each / layout.tp


def _tied_bytes(layout: Layout, parts: Mapping[str, Part]) -> float:
    """A rank's shard of the gradient of a tied weight, which both ends of the pipeline exchange."""
    twice = {weight.name for weight in parts["tok_embeddings"].weights}
    tied = sum(weight.size for weight in parts["head"].weights if weight.name in twice)
    return tied / (layout.dp_shard * layout.tp) * _REDUCED_BYTES


class _PartTimes:
    """Seconds of one part for one microbatch, and bytes that a rank sends for it."""

    def __init__(self, config: Trainer.Config, layout: Layout, part: Part, network: Network) -> None:
        accelerator, tp = network.cluster.accelerator, layout.tp
        speed = accelerator.peak(config.training.mixed_precision_param) * accelerator.achievable
        memory = accelerator.memory_bandwidth * ACHIEVABLE_BANDWIDTH
        each = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize
        local = part.dense / tp + part.experts / layout.ep
        # Of an embedding only the rows that are looked up are read, which are part of what it saves.
        read = 0.0 if part.name == "tok_embeddings" else local * each
        moved = read + 2 * part.saved_bytes / tp
        repeated = part.recompute_flops >= 0.9 * part.forward_flops > 0
        self.repeats = 1 + repeated  # of what the forward exchanges, in the backward
        exchanged = part.dispatched_bytes / tp
        self.exchanges = 2 if exchanged and layout.ep > 1 else 0
        self.exchange = self.exchanges * network.all_to_all_seconds(network.groups.experts, exchanged)
        collectives = 4 if part.name.startswith("layers.") else 1
        hidden = message_bytes(config, layout)
        inside = collectives * network.gather_seconds(network.groups.tensor, hidden)

        self.forward = max(part.forward_flops / tp / speed, moved / memory) + self.exchange + inside
        flops = (part.input_flops + part.recompute_flops) / tp
        self.input_gradient = max(flops / speed, moved / memory) + (self.exchange + inside) * self.repeats
        summed = local * (each + 2 * _REDUCED_BYTES)
        self.weight_gradient = part.weight_flops / tp / speed + summed / memory
        passes = 1 + self.repeats
        self.expert_bytes = passes * 2 * exchanged * network.groups.experts.share_sent
        self.tensor_bytes = passes * collectives * hidden * network.groups.tensor.share_sent

    def overlap(self, gather: float, reduction: float) -> None:
        """Take FSDP's collectives to run beside the computation of every microbatch."""
        self.forward = max(self.forward, gather)
        spare = gather + reduction - self.input_gradient - self.weight_gradient
        self.weight_gradient += max(spare, 0.0)


@dataclass(frozen=True)
class _Collectives:
    seconds: float
    sent: float
    """Bytes, by one rank."""


def _over_units(layout: Layout, part: Part, network: Network, each: int) -> _Collectives:
    """An all-gather or a reduce-scatter of each FSDP unit of a part, with `each` bytes a number."""
    sizes: dict[tuple[str, bool], float] = {}
    for weight in part.weights:
        local = weight.size / (layout.ep if weight.expert else layout.tp)
        key = weight.unit, weight.expert
        sizes[key] = sizes.get(key, 0.0) + local * each
    groups = {False: network.groups.shards, True: network.groups.expert_shards}
    return _Collectives(
        sum(network.gather_seconds(groups[expert], size) for (_, expert), size in sizes.items()),
        sum(groups[expert].share_sent * size for (_, expert), size in sizes.items()),
    )


def _gather_wait(layout: Layout, stage: int, gathers: list[float], forwards: list[float]) -> float:
    if layout.pp == 1:
        return gathers[0]
    if layout.schedule in _OVERLAPPED_GATHERS:
        before = [0.0, *forwards]
        return sum(max(gather - hidden, 0.0) for gather, hidden in zip(gathers, before, strict=False))
    return sum(gathers) if stage < layout.pp else 0.0


def _messages_sent(config: Trainer.Config, layout: Layout, stage: int) -> float:
    rank_of = {stage: rank for rank in range(layout.pp) for stage in layout.stages_of(rank)}
    neighbours = [other for other in (stage - 1, stage + 1) if other in rank_of]
    away = sum(rank_of[other] != rank_of[stage] for other in neighbours)
    return away * layout.microbatches * message_bytes(config, layout)
