"""A stream beside the one that computes, for what the pipeline need not wait for until a step ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["SideStream", "keep_for_stream"]


class SideStream:
    """A stream of `device`, made once. On the CPU, which has none, everything is done in its place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[int, torch.Event] = {}

    @contextmanager
    def running(self, after_current: bool = True) -> Iterator[None]:
        """Put the work inside on this stream, by default after what the current stream was given so far."""
        if not _has_streams(self._device):
            yield
            return
        if after_current:
            self._stream.wait_stream(self._current())
        with self._stream:
            yield

    def mark(self, batch: int) -> None:
        """Note that what this stream was given so far belongs to `batch`, or to those before."""
        if _has_streams(self._device):
            self._marks[batch] = self._stream.record_event()

    def join(self, batch: int) -> None:
        """Let the current stream wait for what `mark` noted for `batch`, and for nothing after it."""
        if _has_streams(self._device):
            self._current().wait_event(self._marks.pop(batch))

    @cached_property
    def _stream(self) -> torch.Stream:
        return torch.Stream(self._current().device)  # with its index, which `device` may lack

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


def keep_for_stream(tensor: Tensor) -> None:
    """Keep the memory of `tensor`, also once it is dropped, until the current stream has come this far."""
    if _has_streams(tensor.device):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def _has_streams(device: torch.device) -> bool:
    return device.type != "cpu"
