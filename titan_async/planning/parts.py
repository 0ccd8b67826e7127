"""The pieces of a model that pipeline stages are made of, and what each costs.

A part is the embedding, one layer, or the head: the last norm, the output projection and the loss.
"""

from dataclasses import dataclass

__all__ = ["Part", "Weight"]


@dataclass(frozen=True)
class Weight:
    """A parameter of the model."""

    name: str
    """Fully qualified, as in a checkpoint."""
    shape: tuple[int, ...]
    expert: bool
    """Whether expert parallelism divides it, along the first dimension."""
    unit: str
    """The FSDP unit that gathers it together with the others of that name."""

    @property
    def size(self) -> int:
        """Numbers."""
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one part costs. FLOPs and bytes are those of one microbatch, without tensor parallelism.

    With experts the tokens are taken to be spread evenly.
    """

    name: str
    """"tok_embeddings", "layers.0", ..., "head"."""
    weights: tuple[Weight, ...]
    active: int
    """Parameters that take part in computing one token: of the experts, those it is sent to."""
    forward_flops: float
    input_flops: float
    """Of the gradient of the input; forward_flops for matrix products, more for attention."""
    weight_flops: float
    """Of the gradients of the weights."""
    recompute_flops: float
    """Of what activation checkpointing computes again before the backward."""
    saved_bytes: int
    """What the forward leaves behind for the backward; its output included, its input not."""
    dispatched_bytes: int
    """What tokens weigh that are sent to experts, before any are sent: twice forward (there and back) and
    twice backward this goes through expert-parallel ranks, each of which keeps its own share of 1/ep."""

    @property
    def backward_flops(self) -> float:
        """All that is computed between a forward's end and its gradients."""
        return self.input_flops + self.weight_flops + self.recompute_flops

    @property
    def dense(self) -> int:
        """Parameters that expert parallelism leaves whole."""
        return sum(weight.size for weight in self.weights if not weight.expert)

    @property
    def experts(self) -> int:
        """Parameters that expert parallelism divides."""
        return sum(weight.size for weight in self.weights if weight.expert)
