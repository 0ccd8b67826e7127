"""A side stream for work that overlaps with the computation of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["SideStream", "record_on_current_stream"]


class SideStream:
    """A stream of `device`, created once. On the CPU, which has no streams, all work runs in place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[int, torch.Event] = {}

    @contextmanager
    def running(self, after_current: bool = True) -> Iterator[None]:
        """Enqueue the work inside on this stream, by default after what the current stream has enqueued."""
        if not _has_streams(self._device):
            yield
            return
        if after_current:
            self._stream.wait_stream(self._current())
        with self._stream:
            yield

    def record(self, batch: int) -> None:
        """Record an event after the work of `batch`."""
        if _has_streams(self._device):
            self._events[batch] = self._stream.record_event()

    def wait(self, batch: int) -> None:
        """Let the current stream wait for the event of `batch`, and for nothing after it."""
        if _has_streams(self._device):
            self._current().wait_event(self._events.pop(batch))

    @cached_property
    def _stream(self) -> torch.Stream:
        return torch.Stream(self._current().device)  # with its index, which `device` may lack

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


def record_on_current_stream(tensor: Tensor) -> None:
    """`Tensor.record_stream` with the current stream, where the device has streams."""
    if _has_streams(tensor.device):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def _has_streams(device: torch.device) -> bool:
    return device.type != "cpu"
