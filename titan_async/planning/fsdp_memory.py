"""Memory of one stage under FSDP2 beyond its shards, during a microbatch without a pipeline.

FSDP2 all-gathers a unit's weights before the unit runs and frees them after it; each backward reduce-scatters
its gradients immediately, unit by unit. torchtitan's `fsdp_reshard_after_forward` determines whether weights
are freed between forward and backward too: "always", "never", or all except the last unit's ("default").

A chunked loss gathers the head's weights again, computes and reduces their gradient in the forward, and frees
them in any case; the backward gathers them once more, for the norm in the same unit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_async.planning.traced_parts import Part, deduplicated

__all__ = ["Held", "Unit", "backward_memory", "forward_memory", "reshards_after_forward"]


@dataclass(frozen=True)
class Unit:
    """An FSDP unit, which is one part of the model. Sizes are bytes on a rank."""

    part: Part
    weights: int
    """Unsharded, in the compute dtype, like their gradients."""
    gather: int
    """The all-gather's buffer, before the copy-out."""
    reduction: int
    """The reduce-scatter's input buffer."""
    reduced: int
    """The reduce-scatter's output, in the dtype of the reduction."""
    shard: int
    """The output in the dtype of the parameters, in which gradients accumulate over microbatches."""
    reshards: bool
    """Whether its weights are freed between forward and backward."""
    foreign: int
    """Gradients in the part's trace that this rank does not compute: those of other ranks' experts."""


@dataclass(frozen=True)
class Held:
    """Bytes at one point, relative to those between microbatches."""

    weights: int
    gradients: int
    """Unsharded gradients, unless they are among the temporary bytes of their backward."""
    activations: int
    temporary: int
    summed: int = 0
    """Gradient shards that this microbatch allocates."""


def reshards_after_forward(policy: str, parts: Sequence[Part]) -> list[bool]:
    """Whether FSDP frees the weights of each part between forward and backward, without a pipeline.

    Args:
        policy: `parallelism.fsdp_reshard_after_forward`; by default torchtitan keeps the last part's weights,
            and those of embedding and head where they are tied.
        parts: of the whole model.
    """
    tied = deduplicated(parts)[-1].weights != parts[-1].weights
    kept = {parts[-1].name, parts[0].name if tied else ""}
    return [
        part.chunked or policy == "always" or (policy == "default" and part.name not in kept)
        for part in parts
    ]


def forward_memory(units: Sequence[Unit], tp: int, prefetches: bool, first: bool) -> Iterator[Held]:
    """Memory during the forward of a microbatch.

    Args:
        units: of the stage, in the model's order.
        tp: tensor-parallel ranks, over which activations are sharded.
        prefetches: whether the next unit is prefetched during computation, as torchtitan configures with
            expert parallelism; otherwise only after the unit's weights have been freed.
        first: whether it is the first microbatch of a batch.
    """
    kept = activations = before = 0
    for unit, following in zip(units, [*units[1:], None], strict=True):
        yield Held(kept, 0, activations, before + unit.gather)
        yield Held(kept + unit.weights, 0, activations, unit.gather)
        # The buffer is held until the next gather; that of the last unit until the loss.
        buffer = unit.gather if following else 0
        buffer += following.gather if following and prefetches else 0
        computing = buffer + unit.part.forward_peak // tp
        if unit.part.chunked:  # the gradient of the chunks so far, and its input buffer
            computing += 2 * unit.reduction + (unit.reduced if first else 0)
        yield Held(kept + unit.weights, 0, activations, computing)
        activations += unit.part.saved_bytes // tp
        kept += 0 if unit.reshards else unit.weights
        before = unit.gather


def backward_memory(units: Sequence[Unit], tp: int, first: bool) -> Iterator[Held]:
    """Memory during the backward of a microbatch, in which the previous unit is prefetched.

    Args:
        units: of the stage, in the model's order.
        tp: tensor-parallel ranks.
        first: whether it is the first microbatch of a batch, which allocates gradient shards.
    """
    kept = sum(unit.weights for unit in units if not unit.reshards)
    activations = sum(unit.part.saved_bytes // tp for unit in units)
    sending = 0
    summed = sum(unit.shard for unit in units if unit.part.chunked and first)
    for unit, following in zip(reversed(units), [*units[-2::-1], None], strict=True):
        if unit.reshards:
            kept += unit.weights
            yield Held(kept, 0, activations, sending + unit.gather, summed)
        gathering = following.gather if following and following.reshards else 0
        activations -= unit.part.saved_bytes // tp
        computing = unit.part.first_backward_peak // tp - unit.foreign
        yield Held(kept, 0, activations, sending + gathering + computing, summed)
        kept -= unit.weights
        if unit.part.chunked:
            continue
        yield Held(kept, unit.weights, activations, gathering + unit.reduction, summed)
        yield Held(kept, 0, activations, gathering + unit.reduction + unit.reduced, summed)
        summed += unit.shard if first else 0
        sending = unit.reduction
