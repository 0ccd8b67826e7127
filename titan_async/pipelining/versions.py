"""Versions of a stage's weights and buffers, whatever the module is wrapped in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from titan_async.pipelining._torch_internals import identity_of, is_fully_sharded
from titan_async.pipelining.buffer_versions import BufferVersions
from titan_async.pipelining.overlap import PairState
from titan_async.pipelining.sharded_versions import ShardedVersions
from titan_async.pipelining.side_stream import SideStream
from titan_async.pipelining.weight_versions import WeightVersions

__all__ = ["BatchGrads", "Versions"]


class BatchGrads(NamedTuple):
    """Gradients and buffer deltas of a finished batch."""

    grads: list[Tensor | None]
    buffer_deltas: list[Tensor]


class _PairVersions:
    """The versions that the forward (0) and the backward (1) of an overlapped pair use."""

    def __init__(self, versions: "Versions", of_halves: tuple[int, int]) -> None:
        self._versions, self._of_halves = versions, of_halves
        self._states = [versions.weights.training_state()] * 2

    def leave(self, half: int) -> None:
        self._states[half] = self._versions.weights.training_state()

    def enter(self, half: int) -> None:
        # For backwards too: activation checkpointing recomputes the forward, and FSDP accumulates gradients
        # on the active version.
        if self._of_halves[0] != self._of_halves[1]:
            self._versions.activate(self._of_halves[half])
        self._versions.weights.set_training_state(self._states[half])


class Versions:
    """Versions of all parameters and buffers of `module` that change during training.

    Between steps the module holds its own parameters, whose values the next batch reads.

    Args:
        module: a plain module, or one under FSDP2; see `WeightVersions` and `ShardedVersions`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.weights: WeightVersions | ShardedVersions = (
            ShardedVersions(module) if is_fully_sharded(module) else WeightVersions(module)
        )
        self._buffers = BufferVersions(module)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The module's own trainable parameters, in the order of gradients."""
        return self.weights.parameters

    def grads(self) -> list[Tensor | None]:
        """The `.grad` of the parameters."""
        return [parameter.grad for parameter in self.parameters]

    def begin_batch(self) -> int:
        """The version of a new batch, which holds the module's values as they are now, or the frozen ones."""
        version = self.weights.begin_batch()
        self._buffers.begin_batch(version)
        return version

    def activate(self, version: int | None) -> None:
        """Put `version` into the module, or its own parameters and buffers (None)."""
        self.weights.activate(version)
        self._buffers.activate(version)

    def pair(self, forward: int, backward: int) -> PairState:
        """The state of an overlapped pair that uses these versions. `forward` is active before and after."""
        return _PairVersions(self, (forward, backward))

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """Allow `activate` inside, and restore the module's own parameters and buffers afterwards.

        Raises:
            RuntimeError: if a backward has accumulated gradients on the module's own parameters.
        """
        before = [identity_of(grad) for grad in self.grads()]
        try:
            yield
        finally:
            self.activate(None)
        for name, old, grad in zip(self.weights.names, before, self.grads(), strict=True):
            if identity_of(grad) != old:
                raise RuntimeError(
                    f"the module uses its parameter {name} from outside of its modules' attributes (a list "
                    "or a closure, say), where Async2BW cannot put the right version of it"
                )

    @contextmanager
    def warmup(self, version: int) -> Iterator[None]:
        """Activate `version` inside, and drop the gradients and buffer deltas of what runs there."""
        with self.swapping():
            self.activate(version)
            yield
            self.weights.pop_grads(version)
        self._buffers.reset_deltas(version)

    def pop_grads(self, version: int, side_stream: SideStream) -> BatchGrads:
        """Remove and return the gradients and buffer deltas of the finished batch of `version`, which is
        active.

        The gradients are ready on `side_stream`.
        """
        deltas = self._buffers.deltas(version)  # before the next batch writes to these buffers
        with side_stream.running():
            return BatchGrads(self.weights.pop_grads(version), deltas)

    def accumulate(self, finished: BatchGrads) -> None:
        """Add `.grad` to a batch's gradients."""
        for parameter, grad in zip(self.parameters, finished.grads, strict=True):
            if grad is not None and parameter.grad is not None:
                grad.add_(parameter.grad)

    def accumulated_grads(self, finished: BatchGrads) -> list[Tensor | None]:
        """The gradients that `.grad` will hold after `publish_grads`."""
        return [
            parameter.grad if grad is None else grad
            for parameter, grad in zip(self.parameters, finished.grads, strict=True)
        ]

    def publish_grads(self, finished: BatchGrads) -> None:
        """Put a batch's accumulated gradients into `.grad` of the parameters, and apply its buffer deltas."""
        for parameter, grad in zip(self.parameters, finished.grads, strict=True):
            if parameter.grad is None:
                parameter.grad = grad
            elif grad is not None:
                parameter.grad.copy_(grad)
        self._buffers.publish(finished.buffer_deltas)

    def freeze(self) -> None:
        """Keep the module's current values for the next batch. No batch may be in flight."""
        self.weights.freeze()
        self._buffers.freeze()

    def unfreeze(self) -> None:
        """Let the next batch read the module's values when it begins. No batch may be in flight."""
        self.weights.unfreeze()
        self._buffers.unfreeze()

    def state_dict(self) -> dict[str, Tensor]:
        """The values that the next batch will read: trainable parameters, and persistent buffers, by name."""
        return self.weights.state_dict() | self._buffers.state_dict()

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Let the next batch read the values of `state_dict`, which names all of these."""
        self.weights.load_state_dict(state_dict)
        self._buffers.load_state_dict(state_dict)
