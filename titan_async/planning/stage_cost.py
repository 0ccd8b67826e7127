"""Seconds of one stage per microbatch and per batch, and bytes that each of its ranks sends.

The time of a part is that of its matrix products, by their shapes, of attention, and of the memory traffic of
its elementwise operations, which activation checkpointing repeats. The gradients of the weights add the
traffic of the gradients in the parameters' dtype and of their float32 sum, which FSDP keeps unsharded.
Tensor- and expert-parallel collectives are exposed, with two exceptions: asynchronous tensor parallelism
hides a share, and in overlapped pairs each half computes during the other's all-to-alls, which are assumed
not to block compute. Without a pipeline FSDP's collectives overlap with computation, and occupy processors.

Weights are gathered and gradients reduced once per pass; Async2BW has one pass per batch. Under Async2BW,
1F1B and GPipe FSDP gathers a part's weights during the first forward of the part before it, and only the
excess is exposed. Under torch's other schedules a stage has all its weights before it begins, and only a
rank's first stage waits. `step_time.py` adds the repeated gathers of ranks with four or more stages.
Reductions are exposed under all schedules; none overlaps them with a backward.

Without a pipeline FSDP gathers weights in each forward, and again in each backward if it has freed them, and
reduces gradients in each backward, over replicas too. These overlap with the part's computation: the longer
of the two counts. A chunked loss gathers the head again and reduces its gradient, both exposed; the head's
backward gathers it once more. Under torch's schedules this holds in pipelines too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher, HybridEPTokenDispatcher
from torchtitan.trainer import Trainer

from titan_async.planning.fsdp_memory import reshards_after_forward
from titan_async.planning.hardware import (
    EXPERT_IMBALANCE,
    TENSOR_HIDDEN,
    Accelerator,
)
from titan_async.planning.layout import Layout
from titan_async.planning.network import Network
from titan_async.planning.optimizer_cost import update_cost
from titan_async.planning.traced_parts import Part, deduplicated

__all__ = ["Collectives", "Half", "StageCost", "message_bytes", "pair_seconds", "stage_cost"]

_REDUCED_BYTES = 4
_OVERLAPPED_GATHERS = ("1F1B", "GPipe", "Async2BW")


class Half(NamedTuple):
    """A forward or a backward that runs alone."""

    seconds: float
    exchange: float
    """Seconds in all-to-alls between experts, without computation; part of `seconds`."""
    hand_overs: int
    """The number of all-to-alls."""


def pair_seconds(forward: Half, backward: Half) -> float:
    """The time of an overlapped pair, if all-to-alls and the computations between them are equally long.

    Each half computes during the other's all-to-alls, one at a time. The backward runs first, and starts its
    first all-to-all before any computation; the forward ends with one. Surplus all-to-alls of one half are
    not overlapped.
    """
    rounds = min(forward.hand_overs, backward.hand_overs)
    if not rounds:
        return forward.seconds + backward.seconds
    hidden = 0.0
    for one, other in ((forward, backward), (backward, forward)):
        computed = (one.seconds - one.exchange) / one.hand_overs
        hidden += min(computed, other.exchange / other.hand_overs)
    return forward.seconds + backward.seconds - rounds * hidden


@dataclass(frozen=True)
class Collectives:
    """Consecutive collectives."""

    seconds: float
    sent: float
    """Bytes, by one rank."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Seconds of one stage on each of its ranks, and bytes that each rank sends in a step, by kind."""

    forward: float
    input_gradient: float
    """Including the recomputation of activation checkpointing."""
    weight_gradient: float
    gather: float
    """Exposed time."""
    reduction: float
    update: float
    unshard: Collectives
    """One gather of all weights of the stage, exposed or not."""
    sent: Mapping[str, float]
    exchange: tuple[float, float] = (0.0, 0.0)
    """Seconds of all-to-alls in the forward and in the backward."""
    exchanges: tuple[int, int] = (0, 0)
    """The number of all-to-alls in the forward and in the backward."""

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient

    @property
    def pair(self) -> float:
        """Of an overlapped forward and backward."""
        halves = zip((self.forward, self.backward), self.exchange, self.exchanges, strict=True)
        return pair_seconds(*(Half(*half) for half in halves))

    def microbatch(self, overlap: bool) -> float:
        """Of a forward and a backward."""
        return self.pair if overlap else self.forward + self.backward


def stage_cost(
    config: Trainer.Config, layout: Layout, parts: Mapping[str, Part], network: Network, stage: int
) -> StageCost:
    """The cost of one stage of a layout, with `parts` traced for its microbatch size."""
    own_parts = [parts[name] for name in layout.stages[stage]]
    times = [_PartTimes(config, layout, part, network) for part in own_parts]
    own = deduplicated(own_parts)
    update = update_cost(config, layout, network, [weight for part in own for weight in part.weights])
    fsdp = _fsdp_of(config, layout, own_parts, network)
    for part_times, collectives in zip(times, fsdp, strict=True):
        if layout.pp == 1:
            part_times.overlap(collectives.gather.seconds, collectives.in_backward, network.collective_share)
        if collectives.in_loss:
            part_times.wait(
                collectives.gather.seconds + collectives.reduction.seconds, collectives.gather.seconds
            )
    tied_bytes = _tied_bytes(layout, parts) if layout.delayed and stage in (0, layout.pp - 1) else 0.0
    waits = _gather_wait(layout, stage, [each.gather.seconds for each in fsdp], [t.forward for t in times])
    at_batch_end = [each.reduction.seconds for each in fsdp if not each.in_loss]
    passes = layout.passes
    if layout.pp == 1:  # only the first part's reduction is after the last backward
        at_batch_end, passes = at_batch_end[:1], 1
    sent = {
        "activations": _messages_sent(config, layout, stage),
        "weights": sum(each.gather.sent * each.gathers for each in fsdp),
        "gradients": sum(each.reduction.sent * each.reductions for each in fsdp) + tied_bytes,
        "experts": sum(t.expert_bytes for t in times) * layout.microbatches,
        "tensor parallelism": sum(t.tensor_bytes for t in times) * layout.microbatches,
        "Muon": update.sent_bytes,
    }
    return StageCost(
        forward=sum(t.forward for t in times),
        input_gradient=sum(t.input_gradient for t in times),
        weight_gradient=sum(t.weight_gradient for t in times),
        gather=waits * passes,
        unshard=Collectives(
            sum(each.gather.seconds for each in fsdp), sum(each.gather.sent for each in fsdp)
        ),
        reduction=sum(at_batch_end) * passes,
        update=update.seconds,
        sent=sent,
        exchange=(sum(t.exchange for t in times), sum(t.exchange * t.repeats for t in times)),
        exchanges=(sum(t.exchanges for t in times), sum(t.exchanges * t.repeats for t in times)),
    )


def message_bytes(config: Trainer.Config, layout: Layout) -> float:
    """Bytes that a stage sends to the next one per microbatch."""
    each = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize
    return layout.tokens_per_microbatch * config.model_spec.model.dim * each / layout.tp


def _tied_bytes(layout: Layout, parts: Mapping[str, Part]) -> float:
    """A rank's shard of the gradient of a tied weight, which the first and last stage all-reduce."""
    twice = {weight.name for weight in parts["tok_embeddings"].weights}
    tied = sum(weight.size for weight in parts["head"].weights if weight.name in twice)
    return tied / (layout.dp_shard * layout.tp) * _REDUCED_BYTES


class _PartTimes:
    """Seconds and sent bytes of one part per microbatch."""

    def __init__(self, config: Trainer.Config, layout: Layout, part: Part, network: Network) -> None:
        accelerator, tp = network.cluster.accelerator, layout.tp
        dtype = config.training.mixed_precision_param
        even = layout.ep == 1 or config.debug.moe_force_load_balance
        imbalance = 1.0 if even else EXPERT_IMBALANCE
        speed = accelerator.peak(dtype) * _product_share(config, layout, part, accelerator, imbalance)
        attends = accelerator.peak(dtype) * accelerator.attention_share(layout.seq_len, dtype)
        memory = accelerator.moved_bandwidth
        each = TORCH_DTYPE_MAP[dtype].itemsize
        local = part.dense / tp + part.experts / layout.ep
        products, attention = part.forward_flops - part.attention_flops, part.attention_flops
        repeated = part.recompute_flops >= 0.9 * part.forward_flops > 0
        attention_again = attention if repeated else 0.0
        self.repeats = 1 + repeated  # of the forward's collectives, in the backward
        exchanged = part.dispatched_bytes / tp
        self.exchanges = 2 if exchanged and layout.ep > 1 else 0
        self.exchange = (
            self.exchanges
            * imbalance
            * network.dispatch_seconds(
                network.groups.experts, exchanged, _choices(part), once=_sends_once(config, part)
            )
        )
        collectives = 4 if part.name.startswith("layers.") else 1
        hidden = message_bytes(config, layout) * tp  # of the whole hidden state
        inside = collectives * network.gather_seconds(network.groups.tensor, hidden)
        inside *= 1 - TENSOR_HIDDEN * config.compile.enable_async_tensor_parallel

        def seconds(products: float, attention: float, passed: float) -> float:
            return (products / speed + attention / attends + passed / memory) / tp

        self.forward = (
            seconds(products, attention, accelerator.forward_passes * part.passed_bytes)
            + self.exchange
            + inside
        )
        again = part.passed_bytes > part.saved_bytes
        self.input_gradient = (
            seconds(
                products + part.recompute_flops - attention_again,
                part.input_flops - products + attention_again,
                (accelerator.backward_passes + again * accelerator.forward_passes) * part.passed_bytes,
            )
            + (self.exchange + inside) * self.repeats
        )
        summed = local * (each + 2 * _REDUCED_BYTES)
        self.weight_gradient = part.weight_flops / tp / speed + summed / memory
        if part.chunked:
            self.forward += self.input_gradient + self.weight_gradient
            self.input_gradient = self.weight_gradient = 0.0
        passes = 1 + self.repeats
        self.expert_bytes = passes * 2 * exchanged * network.groups.experts.share_sent
        self.tensor_bytes = passes * collectives * hidden * network.groups.tensor.share_sent

    def overlap(self, forward: float, backward: float, share: float) -> None:
        """Overlap FSDP's collectives with the computation, which loses `share` of the processors to them."""
        self.forward = max(self.forward + share * forward, forward)
        self.weight_gradient += max(share * backward, backward - self.input_gradient - self.weight_gradient)

    def wait(self, forward: float, backward: float) -> None:
        """Add exposed collectives to each microbatch."""
        self.forward += forward
        self.input_gradient += backward


def _choices(part: Part) -> float:
    """Experts per token."""
    return part.dispatched_bytes / part.message_bytes if part.dispatched_bytes and part.message_bytes else 1.0


def _sends_once(config: Trainer.Config, part: Part) -> bool:
    """Whether the layer sends each token once per rank and per node."""
    if not part.dispatched_bytes or not part.name.startswith("layers."):
        return False
    moe = getattr(config.model_spec.model.layers[int(part.name.rpartition(".")[2])], "moe", None)
    once = (DeepEPTokenDispatcher.Config, HybridEPTokenDispatcher.Config)
    return moe is not None and isinstance(moe.routed_experts.token_dispatcher, once)


def _product_share(
    config: Trainer.Config, layout: Layout, part: Part, accelerator: Accelerator, imbalance: float
) -> float:
    """The share of the peak that the matrix products of a part reach on average.

    Tensor parallelism divides the dimension of a weight that is not the model's width. An expert's product
    has the tokens of all expert-parallel ranks.
    """
    dtype, width = config.training.mixed_precision_param, config.model_spec.model.dim
    tokens = layout.tokens_per_microbatch
    operations = seconds = 0.0
    for weight in part.weights:
        if len(weight.shape) < 2:
            continue
        n, k = weight.shape[-2:]
        count = weight.size // (n * k)
        m, slower = float(tokens), 1.0
        if weight.expert:
            shared = layout.ep / layout.tp if layout.ep > 1 else 1  # ranks that dispatch to an expert
            m, slower = tokens * _choices(part) * shared / count, imbalance
            count //= layout.ep
        elif k == width:
            n /= layout.tp
        else:
            k /= layout.tp
        operations += count * m * n * k
        seconds += slower * count * m * n * k / accelerator.product_share(dtype, m, n, k)
    return operations / seconds if seconds else accelerator.achievable


@dataclass(frozen=True)
class _Fsdp:
    """FSDP's collectives of one part."""

    gather: Collectives
    gathers: int
    """Per batch."""
    reduction: Collectives
    reductions: int
    in_loss: bool
    """Whether they are within a chunked loss."""
    in_backward: float
    """Seconds overlapped with a backward, without a pipeline."""


def _fsdp_of(config: Trainer.Config, layout: Layout, parts: Sequence[Part], network: Network) -> list[_Fsdp]:
    each = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize
    turns, frees = layout.passes, [False for _ in parts]
    if layout.pp == 1:
        turns = layout.microbatches
        frees = reshards_after_forward(config.parallelism.fsdp_reshard_after_forward, parts)
    found = []
    for part, again in zip(deduplicated(parts), frees, strict=True):
        gather, reduction = _over_units(layout, part, network, each), _reduction(layout, part, network)
        if part.chunked and not layout.delayed:  # gathered for the norm, in the loss and in the backward
            m = layout.microbatches
            found.append(_Fsdp(gather, turns + 2 * m, reduction, m, in_loss=True, in_backward=0.0))
            continue
        in_backward = again * gather.seconds + reduction.seconds
        found.append(_Fsdp(gather, turns * (1 + again), reduction, turns, False, in_backward))
    return found


def _over_units(layout: Layout, part: Part, network: Network, each: int) -> Collectives:
    """An all-gather or a reduce-scatter of each FSDP unit of a part, with `each` bytes per element."""
    sizes: dict[tuple[str, bool], float] = {}
    for weight in part.weights:
        local = weight.size / (layout.ep if weight.expert else layout.tp)
        key = weight.unit, weight.expert
        sizes[key] = sizes.get(key, 0.0) + local * each
    groups = {False: network.groups.shards, True: network.groups.expert_shards}
    return Collectives(
        sum(network.gather_seconds(groups[expert], size) for (_, expert), size in sizes.items()),
        sum(groups[expert].share_sent * size for (_, expert), size in sizes.items()),
    )


def _reduction(layout: Layout, part: Part, network: Network) -> Collectives:
    """A reduce-scatter of each FSDP unit of a part over its shards, and an all-reduce over replicas."""
    scattered, replicas = _over_units(layout, part, network, _REDUCED_BYTES), network.groups.replicas
    shard = (part.dense + part.experts) / (layout.dp_shard * layout.tp) * _REDUCED_BYTES
    return Collectives(
        scattered.seconds + network.all_reduce_seconds(replicas, shard),
        scattered.sent + 2 * shard * replicas.share_sent,
    )


def _gather_wait(layout: Layout, stage: int, gathers: list[float], forwards: list[float]) -> float:
    if layout.pp == 1:
        return gathers[0]
    if layout.schedule in _OVERLAPPED_GATHERS:
        before = [0.0, *forwards]
        return sum(max(gather - hidden, 0.0) for gather, hidden in zip(gathers, before, strict=False))
    return sum(gathers) if stage < layout.pp else 0.0


def _messages_sent(config: Trainer.Config, layout: Layout, stage: int) -> float:
    neighbors = [other for other in (stage - 1, stage + 1) if 0 <= other < len(layout.stages)]
    remote = sum(layout.rank_of(other) != layout.rank_of(stage) for other in neighbors)
    return remote * layout.microbatches * message_bytes(config, layout)
