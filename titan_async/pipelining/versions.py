"""Weights and buffers of a stage's module in two versions, whatever the module is wrapped in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from titan_async.pipelining._torch_internals import identity_of, is_fully_sharded
from titan_async.pipelining.buffer_versions import BufferVersions
from titan_async.pipelining.overlap import Halves
from titan_async.pipelining.sharded_versions import ShardedVersions
from titan_async.pipelining.side_stream import SideStream
from titan_async.pipelining.weight_versions import WeightVersions

__all__ = ["Gradient", "Versions"]


class Gradient(NamedTuple):
    """What a complete batch has to say: its gradient, and how it has changed the module's buffers."""

    of_parameters: list[Tensor | None]
    buffer_changes: list[Tensor]


class _Halves:
    """The versions that the forward and the backward of an overlapped pair use."""

    def __init__(
        self, versions: "Versions", weights: WeightVersions | ShardedVersions, of_halves: tuple
    ) -> None:
        self._versions, self._weights, self._of_halves = versions, weights, of_halves
        self._states = [weights.pass_state()] * 2

    def leave(self, half: int) -> None:
        self._states[half] = self._weights.pass_state()

    def enter(self, half: int) -> None:
        # A backward too may read them: activation checkpointing computes the forward once more, and FSDP
        # adds gradients to those of the version that is shown.
        if self._of_halves[0] != self._of_halves[1]:
            self._versions.show(self._of_halves[half])
        self._weights.set_pass_state(self._states[half])


class Versions:
    """The versions of everything in `module` that changes while it trains.

    Between steps the module shows its own parameters, whose values are what the next batch reads.

    Args:
        module: a plain module, or one under FSDP2; see `WeightVersions` and `ShardedVersions`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = ShardedVersions(module) if is_fully_sharded(module) else WeightVersions(module)
        self._buffers = BufferVersions(module)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The module's own trainable parameters, in the order of gradients."""
        return self._weights.parameters

    def gradients(self) -> list[Tensor | None]:
        """The `.grad` of the parameters."""
        return [parameter.grad for parameter in self.parameters]

    def read(self) -> int:
        """The version that the next batch is to use: the module's values now, or those that were held."""
        version = self._weights.read()
        self._buffers.read(version)
        return version

    def finish_reading(self) -> None:
        """Complete the version that was read last, after its first forward. Does nothing at a later call."""
        self._weights.finish_reading()

    def preserve(self, version: int) -> None:
        """Make `version` safe from the next update. The other version must no longer be needed."""
        self._weights.preserve(version)

    def release_other(self, version: int) -> None:
        """Free the memory of the version that is not `version`, where it has some of its own."""
        self._weights.release_other(version)

    def show(self, version: int | None) -> None:
        """Let the module show `version`, or its own parameters and buffers (None)."""
        self._weights.show(version)
        self._buffers.show(version)

    @property
    def is_gathering(self) -> bool:
        """Whether the next forward gathers the version that is shown, layer by layer."""
        return self._weights.is_gathering

    def halves(self, forward: int, backward: int) -> Halves:
        """For an overlapped pair that uses these versions. The first one is shown, now and afterwards."""
        return _Halves(self, self._weights, (forward, backward))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the module show what it will inside, and its own afterwards.

        Raises:
            RuntimeError: if a backward has put gradients into the module's own parameters.
        """
        before = [identity_of(gradient) for gradient in self.gradients()]
        try:
            yield
        finally:
            self.show(None)
        for name, old, gradient in zip(self._weights.names, before, self.gradients(), strict=True):
            if identity_of(gradient) != old:
                raise RuntimeError(
                    f"the module uses its parameter {name} from outside of its modules' attributes (a list "
                    "or a closure, say), where Async2BW cannot put the right version of it"
                )

    @contextmanager
    def on_trial(self, version: int) -> Iterator[None]:
        """Let the module show `version` inside, and drop the gradients and changes that are made there."""
        with self.running():
            self.show(version)
            yield
            self._weights.take_gradients(version)
        self._buffers.undo_changes(version)

    def take(self, version: int, beside: SideStream) -> Gradient:
        """Remove and return what the complete batch of `version`, which is shown, has gathered.

        The gradient is there for work on the stream `beside`.
        """
        changes = self._buffers.take_changes(version)  # before the next batch writes to what they are read of
        with beside.running():
            return Gradient(self._weights.take_gradients(version), changes)

    def accumulate(self, gradient: Gradient) -> None:
        """Add what `.grad` holds to a batch's gradient."""
        for parameter, part in zip(self.parameters, gradient.of_parameters, strict=True):
            if part is not None and parameter.grad is not None:
                part.add_(parameter.grad)

    def sums(self, gradient: Gradient) -> list[Tensor | None]:
        """What `.grad` will hold after the delivery of an accumulated gradient."""
        return [
            parameter.grad if part is None else part
            for parameter, part in zip(self.parameters, gradient.of_parameters, strict=True)
        ]

    def deliver(self, gradient: Gradient) -> None:
        """Put a batch's accumulated gradient into the `.grad` of the module's own parameters, and change its
        buffers."""
        for parameter, part in zip(self.parameters, gradient.of_parameters, strict=True):
            if parameter.grad is None:
                parameter.grad = part
            elif part is not None:
                parameter.grad.copy_(part)
        self._buffers.deliver(gradient.buffer_changes)

    def hold(self) -> None:
        """Keep the module's values of now for the next batch. No batch may be in flight."""
        self._weights.hold()
        self._buffers.hold()

    def drop(self) -> None:
        """Let the next batch read the module's values as they then are. No batch may be in flight."""
        self._weights.drop()
        self._buffers.drop()

    def next_values(self) -> dict[str, Tensor]:
        """What the next batch will read, by name: trainable parameters, and buffers of a `state_dict`."""
        return self._weights.next_weights() | self._buffers.next_values()

    def set_next_values(self, values: dict[str, Tensor]) -> None:
        """Let the next batch read `values`, which name all of these."""
        self._weights.set_next_weights(values)
        self._buffers.set_next_values(values)

    def check_unchanged(self) -> None:
        """Refuse to go on with a module whose trainable parameters are no longer those of the start."""
        self._weights.check_unchanged()
