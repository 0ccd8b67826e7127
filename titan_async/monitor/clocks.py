"""When spans begin and end: by the host's clock, or by an accelerator's own, which is not made to wait."""

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "HostClock", "Mark", "StreamClock", "clock_of"]

Mark = Any
"""A point in time that a clock can tell, now or later."""


class Clock(Protocol):
    """Marks points in time cheaply, and tells them later."""

    def mark(self) -> Mark:
        """Now."""

    def nanoseconds(self, mark: Mark) -> int | None:
        """When that was, in nanoseconds since the epoch; None as long as it is not known.

        Marks are asked for roughly in the order in which they were made.
        """


class HostClock:
    """The clock of this process's host, for what the processor does itself."""

    def __init__(self) -> None:
        # The process may lose the processor between the two: the largest difference is the most exact.
        self._offset = max(time.time_ns() - time.perf_counter_ns() for _ in range(10))
        self.mark = time.perf_counter_ns

    def nanoseconds(self, mark: int) -> int:
        """See `Clock`."""
        return mark + self._offset


class StreamClock:
    """The clock of an accelerator's current stream: what it has done, not what it was told to do.

    A mark is an event in the stream. Nothing waits for it: it is told once the stream has come by. Making the
    clock waits for the device, once.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.accelerator.synchronize(device)
        self._origin = self.mark()
        torch.accelerator.synchronize(device)
        self._origin_ns = time.time_ns()

    def mark(self) -> torch.Event:
        """See `Clock`."""
        event = torch.Event(self._device.type, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def nanoseconds(self, mark: torch.Event) -> int | None:
        """See `Clock`."""
        if not mark.query():
            return None
        passed = round(self._origin.elapsed_time(mark) * 1e6)
        if passed > _LONGEST_NS:
            # It is measured in float32 milliseconds: after a minute, to 4 microseconds.
            self._origin, self._origin_ns = mark, self._origin_ns + passed
            return self._origin_ns
        return self._origin_ns + passed


_LONGEST_NS = 2_000_000_000


def clock_of(device: torch.device) -> Clock:
    """The clock for what is computed on `device`."""
    return HostClock() if device.type == "cpu" else StreamClock(device)
