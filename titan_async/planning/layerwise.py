"""What one stage under FSDP2 holds beyond its shards, moment by moment of a microbatch.

Without a pipeline FSDP2 gathers a unit's weights when the unit is due and frees them after it; each backward
reduces its gradients at once, unit by unit. torchtitan's `fsdp_reshard_after_forward` says whether weights
are freed between forward and backward too: "always", "never", or all but the last unit's ("default").

A loss in chunks gathers the head's weights anew, makes and reduces their gradient in the forward, and frees
them whatever that says; the backward gathers them once more, for the norm that is in their unit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_async.planning.parts import Part, together

__all__ = ["Held", "Unit", "backward_moments", "forward_moments", "reshards_after_forward"]


@dataclass(frozen=True)
class Unit:
    """An FSDP unit, which is one part of the model, in bytes on a rank."""

    part: Part
    weights: int
    """Unsharded, in the dtype of the computation, as their gradients are."""
    gather: int
    """What an all-gather of them comes in through, before it is copied out."""
    reduction: int
    """What a reduce-scatter of them is sent from."""
    reduced: int
    """What it leaves on the rank, in the dtype of the reduction."""
    shard: int
    """The same in the dtype of the parameters, in which gradients are summed over microbatches."""
    reshards: bool
    """Whether its weights are freed between forward and backward."""
    foreign: int
    """Gradients that the part's trace has made and this rank does not: those of other ranks' experts."""


@dataclass(frozen=True)
class Held:
    """Bytes at a moment, beyond what there is between microbatches."""

    weights: int
    gradients: int
    """Unsharded ones, where they are not among the temporary bytes of the backward that makes them."""
    activations: int
    temporary: int
    summed: int = 0
    """Shards of gradients that this microbatch is the first to make."""


def reshards_after_forward(policy: str, parts: Sequence[Part]) -> list[bool]:
    """Whether FSDP frees the weights of each part between forward and backward, without a pipeline.

    Args:
        policy: `parallelism.fsdp_reshard_after_forward`; by default torchtitan keeps the last part's weights,
            and those of embedding and head where they are one.
        parts: of the whole model.
    """
    tied = together(parts)[-1].weights != parts[-1].weights
    kept = {parts[-1].name, parts[0].name if tied else ""}
    return [
        part.chunked or policy == "always" or (policy == "default" and part.name not in kept)
        for part in parts
    ]


def forward_moments(units: Sequence[Unit], tp: int, prefetches: bool, first: bool) -> Iterator[Held]:
    """The forward of a microbatch.

    Args:
        units: of the stage, in the model's order.
        tp: tensor-parallel ranks, which share activations.
        first: whether it is the first of a batch.
        prefetches: whether the next unit is gathered while one computes, as torchtitan asks for with expert
            parallelism; else the host only runs ahead, after the unit's weights have been freed.
    """
    kept = activations = before = 0
    for unit, following in zip(units, [*units[1:], None], strict=True):
        yield Held(kept, 0, activations, before + unit.gather)
        yield Held(kept + unit.weights, 0, activations, unit.gather)
        # The buffer stays until the next gather; that of the last unit until the loss begins.
        buffer = unit.gather if following else 0
        buffer += following.gather if following and prefetches else 0
        computing = buffer + unit.part.forward_peak // tp
        if unit.part.chunked:  # the gradient of the chunks so far, and what it is sent from
            computing += 2 * unit.reduction + (unit.reduced if first else 0)
        yield Held(kept + unit.weights, 0, activations, computing)
        activations += unit.part.saved_bytes // tp
        kept += 0 if unit.reshards else unit.weights
        before = unit.gather


def backward_moments(units: Sequence[Unit], tp: int, first: bool) -> Iterator[Held]:
    """The backward of a microbatch, in which the unit before is gathered while one computes.

    Args:
        units: of the stage, in the model's order.
        tp: tensor-parallel ranks.
        first: whether it is the first of a batch, which leaves shards of gradients where there were none.
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
