"""Records the spans of a rank in memory; a thread writes them to event files a few times a second.

A span costs the training process two calls of about a microsecond each. The thread also writes while the
process waits or hangs, so that a reader can see what it waits for.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from titan_async.monitor.events import BURST, CAPACITY, RECORD, SUMMARY, EventWriter, utilization_of
from titan_async.pipelining.recording import Kind

__all__ = ["Clock", "EventRecorder", "HostClock", "StreamClock", "clock_of"]

Mark = Any
"""An unresolved timestamp."""


class Clock(Protocol):
    """Takes timestamps cheaply, and resolves them later."""

    def mark(self) -> Mark:
        """A timestamp of the current time."""

    def nanoseconds(self, mark: Mark) -> int | None:
        """The mark in nanoseconds since the epoch; None while it is unresolved.

        Marks are resolved roughly in the order in which they were taken.
        """


class HostClock:
    """The clock of the host, for work on the CPU."""

    def __init__(self) -> None:
        # The process may be preempted between the two calls: the largest difference is the most accurate.
        self._offset = max(time.time_ns() - time.perf_counter_ns() for _ in range(10))
        self.mark = time.perf_counter_ns

    def nanoseconds(self, mark: int) -> int:
        """See `Clock`."""
        return mark + self._offset


class StreamClock:
    """The clock of an accelerator's current stream: times of execution, not of enqueueing.

    A mark is an event in the stream. It does not block, and is resolved once the stream has reached it. The
    constructor synchronizes with the device.

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
        elapsed = round(self._origin.elapsed_time(mark) * 1e6)
        if elapsed > _MAX_ELAPSED_NS:
            # float32 milliseconds: after a minute, the resolution is 4 microseconds.
            self._origin, self._origin_ns = mark, self._origin_ns + elapsed
            return self._origin_ns
        return self._origin_ns + elapsed


_MAX_ELAPSED_NS = 2_000_000_000


def clock_of(device: torch.device) -> Clock:
    """The clock for computations on `device`."""
    return HostClock() if device.type == "cpu" else StreamClock(device)


_PERIOD_SECONDS = 0.25

_Fields = tuple[int, int, int | None, int | None, int | None]  # kind, stage, batch, microbatch, version
_Span = tuple[_Fields, Mark, Mark, int]  # begin, end and depth


class _IntervalEnd(NamedTuple):
    """Separates the spans of one interval from those of the next."""

    first_step: int
    last_step: int


class EventRecorder:
    """A `titan_async.pipelining.recording.Recorder` that writes event files.

    A schedule numbers batches and updates from its creation; they are recorded with `first_step` added.

    Args:
        writer: of this rank's files.
        clock: of the device on which the rank computes.
        stages: of this rank; spans that belong to no stage are recorded for the first.
        first_step: steps done before.
        memory: returns bytes in use, peak and total; called by the writing thread.
        failed: called once by that thread, with the error that ends the recording.
    """

    def __init__(
        self,
        writer: EventWriter,
        clock: Clock,
        stages: Sequence[int],
        *,
        first_step: int,
        memory: Callable[[], tuple[int, int, int]],
        failed: Callable[[OSError], None],
    ) -> None:
        self._writer, self._clock, self._memory, self._failed = writer, clock, memory, failed
        self._mark = clock.mark
        self._stages, self._first_step = tuple(stages), first_step
        self._open: list[tuple[_Fields, Mark]] = []
        # If writing cannot keep up, the oldest spans are dropped, as in the ring.
        self._ended: deque[_Span | _IntervalEnd] = deque(maxlen=CAPACITY)
        self._nested = [0] * 16  # by depth: nanoseconds of ended spans inside one still open
        # Since the last summary: seconds by stage and kind, and the range of times.
        self._seconds: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._interval_start = self._interval_end = 0
        self._last_rows: np.ndarray | None = None
        self._lock = threading.Lock()  # around writing
        self._enabled = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def begin(
        self,
        kind: Kind,
        stage: int,
        batch: int | None = None,
        microbatch: int | None = None,
        version: int | None = None,
    ) -> None:
        """See `Recorder`."""
        self._open.append(((kind, stage, batch, microbatch, version), self._mark()))

    def end(self) -> None:
        """See `Recorder`."""
        fields, begin = self._open.pop()
        self._ended.append((fields, begin, self._mark(), len(self._open)))

    @contextmanager
    def span(self, kind: Kind, step: int) -> Iterator[None]:
        """Records the block as a span of the rank's first stage in training step `step`, from 1."""
        self.begin(kind, self._stages[0], step - 1 - self._first_step)
        try:
            yield
        finally:
            self.end()

    def end_interval(self, first_step: int, last_step: int) -> None:
        """Ends an interval: the steps since the last call become one record of the summary.

        Call it between spans.
        """
        self._ended.append(_IntervalEnd(first_step, last_step))

    def utilization(self) -> dict[int, float]:
        """The fraction of the steps' time in the last interval in which each stage of this rank computed.

        On an accelerator it may be that of the interval before, whose timestamps are resolved.
        """
        self.flush()
        return {} if self._last_rows is None else utilization_of(self._last_rows)

    def flush(self) -> None:
        """Writes all spans whose timestamps are resolved."""
        with self._lock:
            self._attempt(self._write)

    def _attempt(self, write: Callable[[], None]) -> None:
        if self._enabled:
            try:
                write()
            except OSError as error:
                self._enabled = False
                self._failed(error)

    def close(self) -> None:
        """Writes the remaining spans and stops. Further calls have no effect."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._open.clear()
        self.flush()
        with self._lock:
            self._attempt(lambda: self._writer.write_state(np.zeros(1, RECORD), self._memory(), closed=True))
            self._enabled = False
            self._writer.close()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_SECONDS):
            self.flush()

    def _write(self) -> None:
        records: list[tuple[int, ...]] = []
        while self._ended:
            ended = self._ended[0]
            if isinstance(ended, _IntervalEnd):
                self._close_interval(ended)
            else:
                record = self._resolve(*ended)
                if record is None:
                    break
                records.append(record)
            self._ended.popleft()
            if len(records) == BURST:
                self._write_ring(records)
                records = []
        self._write_ring(records)

    def _write_ring(self, records: list[tuple[int, ...]]) -> None:
        if records:
            self._writer.write(np.array(records, RECORD))
        self._writer.write_state(self._current(), self._memory())

    def _current(self) -> np.ndarray:
        """The current span: the innermost open one, or on an accelerator the first that it has not ended."""
        spans = [(fields, begin, depth) for depth, (fields, begin) in enumerate(self._open)]
        if self._ended and not isinstance(self._ended[0], _IntervalEnd):
            fields, begin, _, depth = self._ended[0]
            spans.append((fields, begin, depth))
        current = np.zeros(1, RECORD)
        for fields, begin, depth in reversed(spans):
            start = self._clock.nanoseconds(begin)
            if start is not None:
                current[0] = self._record(fields, start, 0, depth)
                break
        return current

    def _record(self, fields: _Fields, start: int, end: int, depth: int) -> tuple[int, ...]:
        kind, stage, batch, microbatch, version = fields
        step = -1 if batch is None else batch + 1 + self._first_step
        updates = -1 if version is None else version + self._first_step
        return start, end, step, -1 if microbatch is None else microbatch, updates, stage, kind, depth

    def _resolve(self, fields: _Fields, begin: Mark, finish: Mark, depth: int) -> tuple[int, ...] | None:
        start, end = self._clock.nanoseconds(begin), self._clock.nanoseconds(finish)
        if start is None or end is None:
            return None
        self._count(fields[0], fields[1], start, end, depth)
        return self._record(fields, start, end, depth)

    def _count(self, kind: int, stage: int, start: int, end: int, depth: int) -> None:
        exclusive = end - start - self._nested[depth + 1]
        self._nested[depth + 1] = 0
        self._nested[depth] = self._nested[depth] + (end - start) if depth else 0
        self._seconds[stage, Kind.IDLE if kind == Kind.STEP else kind] += exclusive / 1e9
        self._interval_start = min(self._interval_start or start, start)
        self._interval_end = max(self._interval_end, end)

    def _close_interval(self, interval: _IntervalEnd) -> None:
        if self._interval_end > self._interval_start:
            rows = np.zeros(len(self._stages), SUMMARY)
            rows["first_step"], rows["last_step"] = interval
            rows["start"], rows["end"] = self._interval_start, self._interval_end
            rows["stage"] = self._stages
            rows["seconds"] = [[self._seconds[stage, kind] for kind in Kind] for stage in self._stages]
            self._writer.write_summary(rows)
            self._last_rows = rows
        self._seconds.clear()
        self._interval_start = self._interval_end = 0
