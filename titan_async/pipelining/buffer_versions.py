"""Versions of a module's buffers, so that a microbatch sees the buffers of its batch.

A router's bias changes with the weights: a microbatch's recomputation must use the bias of its forward. Token
counts change in the forward itself, and belong to the batch that they count. So buffers follow the recurrence
of the weights: a batch reads their values when its step begins, and the deltas of its microbatches are
applied together with its gradient,

    B[b+1] = B[b] + delta_b,    delta_b made by batch b at B[max(b-1, 0)].
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_async.local_tensors import canonical_name, local_part

__all__ = ["BufferVersions"]


class _Buffer(NamedTuple):
    name: str | None  # in the module's state_dict; None if it is not persistent
    owners: tuple[tuple[nn.Module, str], ...]  # every module and attribute that holds this buffer

    @property
    def master(self) -> Tensor:
        module, name = self.owners[0]
        buffer = getattr(module, name)
        assert isinstance(buffer, Tensor)
        return buffer


class _Copy(NamedTuple):
    initial: Tensor  # the values when the batch began
    current: Tensor  # what the batch's microbatches read and change


def _collect(module: nn.Module) -> list[_Buffer]:
    owners: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    names: dict[Tensor, str] = {}
    persistent = {canonical_name(name) for name in module.state_dict(keep_vars=True)}
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False):
            owners.setdefault(buffer, []).append((submodule, name))
            full_name = canonical_name(f"{prefix}.{name}" if prefix else name)
            if full_name in persistent:
                names.setdefault(buffer, full_name)
    return [_Buffer(names.get(buffer), tuple(places)) for buffer, places in owners.items()]


class BufferVersions:
    """Keeps the buffers of `module` in two versions, in addition to its own between steps.

    That is four more copies of the buffers: each version's initial and current values.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = _collect(module)
        self._copies: tuple[list[_Copy], list[_Copy]] = ([], [])
        self._frozen: list[Tensor] | None = None
        self._masters: list[Tensor] | None = None  # the module's own buffers while a version is active
        self._active: int | None = None

    @torch.no_grad()
    def begin_batch(self, version: int) -> None:
        """Set `version`, which must be unused, to the module's current values, or the frozen ones."""
        values = self._frozen or [buffer.master for buffer in self._buffers]
        self._frozen = None
        copies = self._copies[version]
        for index, value in enumerate(values):
            old = copies[index] if index < len(copies) else None
            if old is None or old.current.shape != value.shape or old.current.dtype != value.dtype:
                copies[index : index + 1] = [_Copy(value.clone(), value.clone())]
            else:
                old.initial.copy_(value)
                old.current.copy_(value)

    def activate(self, version: int | None) -> None:
        """Put `version` into the module, or its own buffers (None)."""
        self._track_replaced()
        if self._masters is None:
            if version is None:
                return
            self._masters = [buffer.master for buffer in self._buffers]
        self._active = version
        tensors = self._masters if version is None else [copy.current for copy in self._copies[version]]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            for submodule, name in buffer.owners:
                setattr(submodule, name, tensor)
        if version is None:
            self._masters = None

    def deltas(self, version: int) -> list[Tensor]:
        """The change of each buffer in the batch of `version`, which is active."""
        self._track_replaced()
        # Compared by value: the kernels of batch norm write without incrementing autograd's version counter.
        return [_delta(copy.initial, copy.current) for copy in self._copies[version]]

    def reset_deltas(self, version: int) -> None:
        """Reset `version`, which is not active, to its initial values."""
        self._copies[version][:] = [
            copy._replace(current=copy.initial.clone()) for copy in self._copies[version]
        ]

    @torch.no_grad()
    def publish(self, deltas: list[Tensor]) -> None:
        """Apply a batch's deltas to the module's own buffers; boolean buffers are set or cleared."""
        for buffer, delta in zip(self._buffers, deltas, strict=True):
            master = local_part(buffer.master)
            if master.dtype == torch.bool:
                master.copy_(master + delta > 0)
            else:
                master.add_(delta)

    def freeze(self) -> None:
        """Keep the module's current values for the next batch."""
        if self._frozen is None:
            self._frozen = [buffer.master.detach().clone() for buffer in self._buffers]

    def unfreeze(self) -> None:
        """Let the next batch read the module's values when it begins."""
        self._frozen = None

    def state_dict(self) -> dict[str, Tensor]:
        """The values that the next batch will read, by name, of the persistent buffers."""
        values = self._frozen or [buffer.master.detach().clone() for buffer in self._buffers]
        return {
            buffer.name: value
            for buffer, value in zip(self._buffers, values, strict=True)
            if buffer.name is not None
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Let the next batch read `state_dict`, which names every persistent buffer."""
        self.freeze()
        assert self._frozen is not None
        for buffer, frozen in zip(self._buffers, self._frozen, strict=True):
            if buffer.name is not None:
                frozen.copy_(state_dict[buffer.name])

    def _track_replaced(self) -> None:
        """Adopt the buffers that a forward has replaced instead of writing to them."""
        if self._active is None:
            return
        copies = self._copies[self._active]
        for index, buffer in enumerate(self._buffers):
            if (current := buffer.master) is not copies[index].current:
                copies[index] = copies[index]._replace(current=current.detach())


@torch.no_grad()
def _delta(before: Tensor, after: Tensor) -> Tensor:
    before, after = local_part(before), local_part(after)
    if before.dtype == torch.bool:
        return after.to(torch.int8) - before.to(torch.int8)
    return torch.where(after == before, 0, after - before)  # also where both are infinite
