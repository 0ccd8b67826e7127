"""Records the spans of a rank: kept in memory as they end, written by a thread a few times a second.

What a training process pays is two calls a span, about a microsecond each. The thread works while the process
waits for others, also where it waits for ever: so a reader sees what it waits for.
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
        """Now."""

    def nanoseconds(self, mark: Mark) -> int | None:
        """The mark in nanoseconds since the epoch; None as long as it is unresolved.

        Marks are resolved roughly in the order in which they were made.
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
    """The clock of an accelerator's current stream: what it has executed, not what has been enqueued.

    A mark is an event in the stream. Nothing waits for it: it is resolved once the stream has passed it. The
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


_PERIOD_SECONDS = 0.25

_Fields = tuple[int, int, int | None, int | None, int | None]  # kind, stage, batch, microbatch, version
_Span = tuple[_Fields, Mark, Mark, int]  # with its begin, its end and its depth


class _Cut(NamedTuple):
    """Stands between the spans of one interval and those of the next."""

    first_step: int
    last_step: int


class EventRecorder:
    """A `titan_async.pipelining.recording.Recorder` that writes event files.

    A schedule counts batches and updates since it was made; they are recorded as those after `first_step`.

    Args:
        writer: of this rank's files.
        clock: of the device on which the rank computes.
        stages: of this rank; what is no stage's own is recorded for the first.
        first_step: steps done before.
        memory: returns bytes in use, the peak and the total; called by the writing thread.
        failed: called by that thread, once, with the error that ends the recording.
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
        # Where writing cannot keep up, the oldest spans are lost, as they would be in the ring.
        self._ended: deque[_Span | _Cut] = deque(maxlen=CAPACITY)
        self._within = [0] * 16  # nanoseconds of spans that ended at each depth, inside one still open
        # Since the last summary: seconds by stage and kind, and when its spans began and ended.
        self._seconds: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._interval_start = self._interval_end = 0
        self._last_rows: np.ndarray | None = None
        self._lock = threading.Lock()  # around writing
        self._works = True
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
        """Record what happens inside, for the rank's first stage, as part of training step `step`, from 1."""
        self.begin(kind, self._stages[0], step - 1 - self._first_step)
        try:
            yield
        finally:
            self.end()

    def end_interval(self, first_step: int, last_step: int) -> None:
        """Let the steps since the last call be one line of the summary. Call it between spans."""
        self._ended.append(_Cut(first_step, last_step))

    def utilization(self) -> dict[int, float]:
        """The share of the steps' time in the last interval that each stage of this rank was busy.

        As far as it is known: on an accelerator the last interval may be one before.
        """
        self.flush()
        return {} if self._last_rows is None else utilization_of(self._last_rows)

    def flush(self) -> None:
        """Write what is known."""
        with self._lock:
            self._attempt(self._write)

    def _attempt(self, write: Callable[[], None]) -> None:
        if self._works:
            try:
                write()
            except OSError as error:
                self._works = False
                self._failed(error)

    def close(self) -> None:
        """Write the rest and stop. Harmless to call again."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._open.clear()
        self.flush()
        with self._lock:
            self._attempt(lambda: self._writer.write_state(np.zeros(1, RECORD), self._memory(), closed=True))
            self._works = False
            self._writer.close()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_SECONDS):
            self.flush()

    def _write(self) -> None:
        records: list[tuple[int, ...]] = []
        while self._ended:
            ended = self._ended[0]
            if isinstance(ended, _Cut):
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
        """The span under way; an accelerator is behind the process, with the first that it has not ended."""
        spans = [(fields, begin, depth) for depth, (fields, begin) in enumerate(self._open)]
        if self._ended and not isinstance(self._ended[0], _Cut):
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
        own = end - start - self._within[depth + 1]
        self._within[depth + 1] = 0
        self._within[depth] = self._within[depth] + (end - start) if depth else 0
        self._seconds[stage, Kind.IDLE if kind == Kind.STEP else kind] += own / 1e9
        self._interval_start = min(self._interval_start or start, start)
        self._interval_end = max(self._interval_end, end)

    def _close_interval(self, cut: _Cut) -> None:
        if self._interval_end > self._interval_start:
            rows = np.zeros(len(self._stages), SUMMARY)
            rows["first_step"], rows["last_step"] = cut
            rows["start"], rows["end"] = self._interval_start, self._interval_end
            rows["stage"] = self._stages
            rows["seconds"] = [[self._seconds[stage, kind] for kind in Kind] for stage in self._stages]
            self._writer.write_summary(rows)
            self._last_rows = rows
        self._seconds.clear()
        self._interval_start = self._interval_end = 0
