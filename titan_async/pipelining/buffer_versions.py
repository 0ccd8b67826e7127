"""Versions of a module's buffers, so that a microbatch sees those of its batch.

A router's bias changes with the weights: the bias in force at a microbatch's forward must be in force at its
recomputation. Token counts change in the forward itself, and belong to the batch that they count. So buffers
follow the recurrence of the weights: a batch reads those that are there when its step begins, and what its
microbatches change in them arrives together with its gradient,

    B[b+1] = B[b] + change_b,    change_b made by batch b at B[max(b-1, 0)].
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_async.pipelining._torch_internals import canonical_name, write_count

__all__ = ["BufferVersions"]


class _Buffer(NamedTuple):
    name: str
    persistent: bool
    owners: tuple[tuple[nn.Module, str], ...]  # every place in the module that shows this buffer

    @property
    def master(self) -> Tensor:
        module, name = self.owners[0]
        buffer = getattr(module, name)
        assert isinstance(buffer, Tensor)
        return buffer


class _Copy(NamedTuple):
    start: Tensor  # the values when the batch began
    now: Tensor  # what the batch's microbatches see and change
    writes: int  # how often `now` had been written to when the batch began


def _collect(module: nn.Module) -> list[_Buffer]:
    owners: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    names: dict[Tensor, str] = {}
    persistent = set(module.state_dict(keep_vars=True))
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            owners.setdefault(buffer, []).append((submodule, name))
            names.setdefault(buffer, f"{prefix}.{name}" if prefix else name)
    kept = {canonical_name(name) for name in persistent}
    return [
        _Buffer(name := canonical_name(names[buffer]), name in kept, tuple(places))
        for buffer, places in owners.items()
    ]


class BufferVersions:
    """Keeps the buffers of `module` in two versions, beside those that the module shows between steps.

    Four more copies of the buffers: the values that each version began with, and those it has now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = _collect(module)
        self._copies: tuple[list[_Copy], list[_Copy]] = ([], [])
        self._held: list[Tensor] | None = None
        self._masters: list[Tensor] | None = None  # the module's own while it shows a version

    @torch.no_grad()
    def read(self, version: int) -> None:
        """Let `version`, which must no longer be needed, hold the module's values now, or the held ones."""
        values = self._held or [buffer.master for buffer in self._buffers]
        self._held = None
        copies = self._copies[version]
        for index, value in enumerate(values):
            old = copies[index] if index < len(copies) else None
            if old is None or old.now.shape != value.shape or old.now.dtype != value.dtype:
                copies[index : index + 1] = [_Copy(value.clone(), value.clone(), 0)]
            else:
                old.start.copy_(value)
                old.now.copy_(value)
            copies[index] = copies[index]._replace(writes=write_count(copies[index].now))

    def show(self, version: int | None) -> None:
        """Let the module show `version`, or its own buffers (None)."""
        if self._masters is None:
            if version is None:
                return
            self._masters = [buffer.master for buffer in self._buffers]
        tensors = self._masters if version is None else [copy.now for copy in self._copies[version]]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            for submodule, name in buffer.owners:
                setattr(submodule, name, tensor)
        if version is None:
            self._masters = None

    def take_changes(self, version: int) -> list[Tensor | None]:
        """What the batch of `version` has changed in each buffer, None where nothing was written."""
        return [
            None
            if write_count(copy.now) == copy.writes
            else copy.now.clone()
            if copy.now.dtype == torch.bool
            else copy.now - copy.start
            for copy in self._copies[version]
        ]

    @torch.no_grad()
    def deliver(self, changes: list[Tensor | None]) -> None:
        """Apply a batch's changes to the module's own buffers; a flag takes the batch's value."""
        for buffer, change in zip(self._buffers, changes, strict=True):
            if change is not None:
                buffer.master.copy_(change) if change.dtype == torch.bool else buffer.master.add_(change)

    def hold(self) -> None:
        """Keep the module's values of now for the next batch."""
        if self._held is None:
            self._held = [buffer.master.detach().clone() for buffer in self._buffers]

    def next_values(self) -> dict[str, Tensor]:
        """What the next batch will read, by name, of the buffers that a `state_dict` holds."""
        values = self._held or [buffer.master.detach().clone() for buffer in self._buffers]
        return {
            buffer.name: value
            for buffer, value in zip(self._buffers, values, strict=True)
            if buffer.persistent
        }

    @torch.no_grad()
    def set_next_values(self, values: dict[str, Tensor]) -> None:
        """Let the next batch read `values`, which name every buffer that a `state_dict` holds."""
        self.hold()
        assert self._held is not None
        for buffer, held in zip(self._buffers, self._held, strict=True):
            if buffer.persistent:
                held.copy_(values[buffer.name])
