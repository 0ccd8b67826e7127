"""Copies between host and device without a synchronization.

On an accelerator the host launches work ahead of the device. If it waits for a value, such as a norm to
branch on or a loss to print, the device becomes idle. So it reads the values of a step after it has launched
the next one: they have arrived then, and the device still computes that step. The CPU does the same.
"""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

__all__ = ["Deferred", "HostCopy", "Microbatch", "Upload"]

Microbatch = tuple[dict[str, Tensor], Tensor]
"""Inputs by name, and labels."""


class HostCopy:
    """A copy of a tensor's current values, for the host to read later."""

    def __init__(self, tensor: Tensor) -> None:
        on_device = tensor.device.type != "cpu"
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device)
        self._copy.copy_(tensor.detach(), non_blocking=True)
        self._copied: torch.Event | None = None
        if on_device:
            self._copied = torch.Event(tensor.device.type)
            self._copied.record(torch.accelerator.current_stream(tensor.device))

    def read(self) -> Tensor:
        """The values, on the host. Waits only for the work that was launched before the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy


class Deferred:
    """Actions on values of a step, run in order once these are on the host.

    Reading the values of the previous step also keeps the host at most a step ahead of the device.
    """

    def __init__(self) -> None:
        self._actions: deque[tuple[int, Callable[[], None]]] = deque()

    def add(self, step: int, action: Callable[[], None]) -> None:
        """Defer `action`, which belongs to `step`."""
        self._actions.append((step, action))

    def run(self, before: int | None = None) -> None:
        """Run the actions of steps before `before`, by default all."""
        while self._actions and (before is None or self._actions[0][0] < before):
            self._actions.popleft()[1]()


class Upload:
    """Copies batches to a device from pinned memory, on its own stream.

    A batch is copied when it is read, just before its step is launched. The device is then still busy with
    the previous step, so the copy overlaps with it, and no data are read ahead of a checkpoint.

    Args:
        device: on a CPU nothing is copied.
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
