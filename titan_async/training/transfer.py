"""Copies between host and device for which the host does not wait.

On an accelerator the host launches work and is ahead of the device. A value that it waits for, a norm to
branch on or a loss to print, lets the device run dry. So it reads values of a step after it has launched the
next one: they have arrived then, and the device still has that step to compute. The CPU does the same.
"""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

__all__ = ["HostCopy", "Later", "Microbatch", "Upload"]

Microbatch = tuple[dict[str, Tensor], Tensor]
"""Inputs by name, and labels."""


class HostCopy:
    """What a tensor holds now, for the host to read later."""

    def __init__(self, tensor: Tensor) -> None:
        on_device = tensor.device.type != "cpu"
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device)
        self._copy.copy_(tensor.detach(), non_blocking=True)
        self._copied: torch.Event | None = None
        if on_device:
            self._copied = torch.Event(tensor.device.type)
            self._copied.record(torch.accelerator.current_stream(tensor.device))

    def read(self) -> Tensor:
        """The values, on the host. Waits for the work that was launched before the copy, and for no other."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy


class Later:
    """What is to be done with values of a step once they are on the host, in order.

    Reading those of the step before also keeps the host from being more than a step ahead of the device.
    """

    def __init__(self) -> None:
        self._actions: deque[tuple[int, Callable[[], None]]] = deque()

    def add(self, step: int, action: Callable[[], None]) -> None:
        """Do `action`, which belongs to `step`, later."""
        self._actions.append((step, action))

    def run(self, before: int | None = None) -> None:
        """Do now what belongs to steps before `before`, by default all."""
        while self._actions and (before is None or self._actions[0][0] < before):
            self._actions.popleft()[1]()


class Upload:
    """Copies batches to a device from pinned memory, on a stream of its own.

    A batch is copied when it is read, just before its step is launched. The device is then still busy with
    the step before, so the copy is ahead of its use, and nothing is read ahead of what a checkpoint says.

    Args:
        device: on a CPU, batches are taken as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def __call__(
        self, groups: list[list[Microbatch]], valid_tokens: Tensor
    ) -> tuple[list[list[Microbatch]], Tensor]:
        """Copies of a batch and of its number of valid tokens, ready for the current stream."""
        with self._stream or nullcontext():
            copies = [
                [
                    ({k: self._copy(v) for k, v in fields.items()}, self._copy(labels))
                    for fields, labels in group
                ]
                for group in groups
            ]
            tokens = self._copy(valid_tokens)
        if self._stream is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in (tokens, *(t for g in copies for x, y in g for t in (*x.values(), y))):
                tensor.record_stream(current)
        return copies, tokens

    def _copy(self, tensor: Tensor) -> Tensor:
        pinned = tensor if self._stream is None else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)
