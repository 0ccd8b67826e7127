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

from titan_async.local_tensors import canonical_name, local_part

__all__ = ["BufferVersions"]


class _Buffer(NamedTuple):
    name: str | None  # in the module's state_dict, None if it is not there
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


def _collect(module: nn.Module) -> list[_Buffer]:
    owners: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    names: dict[Tensor, str] = {}
    kept = {canonical_name(name) for name in module.state_dict(keep_vars=True)}
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False):
            owners.setdefault(buffer, []).append((submodule, name))
            full_name = canonical_name(f"{prefix}.{name}" if prefix else name)
            if full_name in kept:
                names.setdefault(buffer, full_name)
    return [_Buffer(names.get(buffer), tuple(places)) for buffer, places in owners.items()]


class BufferVersions:
    """Keeps the buffers of `module` in two versions, beside those that the module shows between steps.

    Four more copies of the buffers: the values that each version began with, and those it has now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = _collect(module)
        self._copies: tuple[list[_Copy], list[_Copy]] = ([], [])
        self._held: list[Tensor] | None = None
        self._masters: list[Tensor] | None = None  # the module's own while it shows a version
        self._shown: int | None = None

    @torch.no_grad()
    def read(self, version: int) -> None:
        """Let `version`, which must no longer be needed, hold the module's values now, or the held ones."""
        values = self._held or [buffer.master for buffer in self._buffers]
        self._held = None
        copies = self._copies[version]
        for index, value in enumerate(values):
            old = copies[index] if index < len(copies) else None
            if old is None or old.now.shape != value.shape or old.now.dtype != value.dtype:
                copies[index : index + 1] = [_Copy(value.clone(), value.clone())]
            else:
                old.start.copy_(value)
                old.now.copy_(value)

    def show(self, version: int | None) -> None:
        """Let the module show `version`, or its own buffers (None)."""
        self._follow()
        if self._masters is None:
            if version is None:
                return
            self._masters = [buffer.master for buffer in self._buffers]
        self._shown = version
        tensors = self._masters if version is None else [copy.now for copy in self._copies[version]]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            for submodule, name in buffer.owners:
                setattr(submodule, name, tensor)
        if version is None:
            self._masters = None

    def take_changes(self, version: int) -> list[Tensor]:
        """What the batch of `version`, which is shown, has changed in each buffer."""
        self._follow()
        # Compared by value: the kernels of a batch norm write without leaving a trace in autograd's counter.
        return [_change(copy.start, copy.now) for copy in self._copies[version]]

    def undo_changes(self, version: int) -> None:
        """Let `version`, which is not shown, have the values that it began with."""
        self._copies[version][:] = [copy._replace(now=copy.start.clone()) for copy in self._copies[version]]

    @torch.no_grad()
    def deliver(self, changes: list[Tensor]) -> None:
        """Apply a batch's changes to the module's own buffers; flags are set or cleared where it did so."""
        for buffer, change in zip(self._buffers, changes, strict=True):
            master = local_part(buffer.master)
            if master.dtype == torch.bool:
                master.copy_(master + change > 0)
            else:
                master.add_(change)

    def hold(self) -> None:
        """Keep the module's values of now for the next batch."""
        if self._held is None:
            self._held = [buffer.master.detach().clone() for buffer in self._buffers]

    def drop(self) -> None:
        """Let the next batch read the module's values as they then are."""
        self._held = None

    def next_values(self) -> dict[str, Tensor]:
        """What the next batch will read, by name, of the buffers that a `state_dict` holds."""
        values = self._held or [buffer.master.detach().clone() for buffer in self._buffers]
        return {
            buffer.name: value
            for buffer, value in zip(self._buffers, values, strict=True)
            if buffer.name is not None
        }

    @torch.no_grad()
    def set_next_values(self, values: dict[str, Tensor]) -> None:
        """Let the next batch read `values`, which name every buffer that a `state_dict` holds."""
        self.hold()
        assert self._held is not None
        for buffer, held in zip(self._buffers, self._held, strict=True):
            if buffer.name is not None:
                held.copy_(values[buffer.name])

    def _follow(self) -> None:
        """Take over the buffers that a forward has not written to but replaced."""
        if self._shown is None:
            return
        copies = self._copies[self._shown]
        for index, buffer in enumerate(self._buffers):
            if (current := buffer.master) is not copies[index].now:
                copies[index] = copies[index]._replace(now=current.detach())


@torch.no_grad()
def _change(before: Tensor, after: Tensor) -> Tensor:
    before, after = local_part(before), local_part(after)
    if before.dtype == torch.bool:
        return after.to(torch.int8) - before.to(torch.int8)
    return torch.where(after == before, 0, after - before)  # where both are infinite too
