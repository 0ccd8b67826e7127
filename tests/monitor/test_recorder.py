"""A recorder writes each span once with its times, and never stops training."""

import errno
import itertools
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.waiting import until
from titan_async.monitor import recorder as recording
from titan_async.monitor.events import CAPACITY, EventWriter, RankReader, RankState
from titan_async.monitor.recorder import EventRecorder, HostClock, StreamClock
from titan_async.pipelining.recording import Kind


class TickClock:
    """Each mark is a second after the one before; marks from `known` on are unresolved."""

    def __init__(self) -> None:
        self._ticks = itertools.count(1)
        self.known = 10**9

    def mark(self) -> int:
        return next(self._ticks)

    def nanoseconds(self, mark: int) -> int | None:
        return mark * 10**9 if mark < self.known else None


def start(folder: Path, clock, stages=(0,), first_step=0, failed=lambda error: None) -> EventRecorder:
    return EventRecorder(
        EventWriter(folder, 0), clock, stages, first_step=first_step, memory=lambda: (1, 2, 3), failed=failed
    )


def test_spans_become_records(tmp_path: Path) -> None:
    recorder = start(tmp_path, TickClock(), stages=(2,), first_step=100)
    with recorder.span(Kind.STEP, step=103):
        recorder.begin(Kind.FORWARD, 2, batch=2, microbatch=1, version=-1)
        recorder.end()
        recorder.begin(Kind.REDUCE, 2, batch=1)
        recorder.end()
    recorder.close()
    records = RankReader(tmp_path, 0).new_records()
    assert records.tolist() == [
        (2 * 10**9, 3 * 10**9, 103, 1, 99, 2, Kind.FORWARD, 1),
        (4 * 10**9, 5 * 10**9, 102, -1, -1, 2, Kind.REDUCE, 1),
        (1 * 10**9, 6 * 10**9, 103, -1, -1, 2, Kind.STEP, 0),
    ]
    state = RankReader(tmp_path, 0).state()
    assert (state.count, state.memory, state.memory_peak, state.memory_limit) == (3, 1, 2, 3)
    assert state.closed == state.beat > 0


def test_summaries_count_nested_spans_once(tmp_path: Path) -> None:
    clock = TickClock()
    recorder = start(tmp_path, clock, stages=(0, 4))
    for step in (1, 2):
        with recorder.span(Kind.STEP, step):  # takes 11 seconds
            recorder.begin(Kind.SWAP, 0, 0)
            recorder.begin(Kind.GATHER, 0, 0)
            recorder.end()
            recorder.end()
            for stage in (0, 4):
                recorder.begin(Kind.FORWARD, stage, 0, 0)
                recorder.end()
            clock.mark()
            clock.mark()
    recorder.end_interval(1, 2)
    with recorder.span(Kind.SAVE, 2):
        pass
    with recorder.span(Kind.STEP, 3):
        pass
    assert recorder.utilization() == pytest.approx({0: 1 / 11, 4: 1 / 11})
    recorder.end_interval(3, 3)
    assert recorder.utilization() == {0: 0.0, 4: 0.0}
    recorder.close()
    first, other, second, _ = RankReader(tmp_path, 0).summaries()
    assert (first["first_step"], first["last_step"], first["stage"], other["stage"]) == (1, 2, 0, 4)
    assert (first["end"] - first["start"]) / 1e9 == 23
    spent = {kind: float(first["seconds"][kind]) for kind in Kind if first["seconds"][kind]}
    assert spent == {Kind.IDLE: 12, Kind.FORWARD: 2, Kind.SWAP: 4, Kind.GATHER: 2}
    assert other["seconds"].sum() == other["seconds"][Kind.FORWARD] == 2
    assert second["seconds"][Kind.SAVE] == 1 and second["seconds"][Kind.IDLE] == 1


def test_unresolved_spans_are_written_later(tmp_path: Path) -> None:
    clock, reader = TickClock(), RankReader(tmp_path, 0)
    clock.known = 4
    recorder = start(tmp_path, clock)
    for microbatch in range(3):
        recorder.begin(Kind.FORWARD, 0, 0, microbatch)
        recorder.end()
    recorder.begin(Kind.CLIP, 0)
    recorder.flush()
    assert reader.new_records()["microbatch"].tolist() == [0]
    # The device has started the second forward; the process has already enqueued later spans.
    current = reader.state().current
    assert (current["kind"], current["microbatch"], current["start"]) == (Kind.FORWARD, 1, 3 * 10**9)
    clock.known = 100
    recorder.flush()
    assert reader.new_records()["microbatch"].tolist() == [1, 2]
    assert reader.state().current["kind"] == Kind.CLIP
    recorder.close()


def test_current_span_of_a_waiting_process_is_written(tmp_path: Path) -> None:
    clock = HostClock()
    recorder, reader = start(tmp_path, clock), RankReader(tmp_path, 0)
    before = clock.nanoseconds(clock.mark())
    recorder.begin(Kind.RECEIVE, 0, 4, 2, 3)
    after = clock.nanoseconds(clock.mark())

    def written_after(beat: int) -> RankState | None:
        state = reader.state()
        return state if state is not None and state.beat > beat and state.current["kind"] else None

    first = until(lambda: written_after(0), "the wait is not recorded")
    # Heartbeats continue while it waits.
    state = until(lambda: written_after(first.beat), "there is no further heartbeat")
    for seen in (first, state):
        waits = (seen.current["kind"], seen.current["batch"], seen.current["microbatch"])
        assert waits == (Kind.RECEIVE, 5, 2)
        assert before <= seen.current["start"] <= after
    recorder.end()
    recorder.close()


def test_write_error_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    recorder = start(tmp_path, HostClock(), failed=errors.append)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(EventWriter, "write", full)
    for _ in range(3):
        with recorder.span(Kind.STEP, 1):
            pass
        recorder.flush()
    assert recorder.utilization() == {}
    recorder.close()
    recorder.close()
    assert [error.errno for error in errors] == [errno.ENOSPC]


def test_write_error_at_close_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    recorder = start(tmp_path, HostClock(), failed=errors.append)
    write = EventWriter.write_state

    def full(self, current, memory, closed=False):
        if closed:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, current, memory)

    monkeypatch.setattr(EventWriter, "write_state", full)
    recorder.close()
    assert [error.errno for error in errors] == [errno.ENOSPC]


def test_oldest_spans_are_dropped(tmp_path: Path) -> None:
    recorder = start(tmp_path, HostClock())
    with recorder._lock:  # as if writing were slow
        for microbatch in range(CAPACITY + 10):
            recorder.begin(Kind.FORWARD, 0, 0, microbatch)
            recorder.end()
    recorder.close()
    assert RankReader(tmp_path, 0).new_records()["microbatch"][-1] == CAPACITY + 9


class Stream:
    """A device whose events are times, resolved when `now` reaches them."""

    def __init__(self) -> None:
        self.now, self.queued = 0.0, 0.0

    def event(self, *args, **kwargs):
        stream = self

        class Event:
            def record(self, _) -> None:
                self.at = stream.queued

            def query(self) -> bool:
                return self.at <= stream.now

            def elapsed_time(self, other) -> float:
                return float(np.float32(1e3 * (other.at - self.at)))  # as in CUDA

        return Event()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(recording.torch, "Event", stream.event)
    monkeypatch.setattr(recording.torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(recording.torch.accelerator, "current_stream", lambda device: None)
    return stream


def test_stream_clock_does_not_synchronize(stream: Stream) -> None:
    clock = StreamClock(torch.device("cuda"))
    origin = clock.nanoseconds(clock.mark())
    stream.queued = 0.5
    mark = clock.mark()
    assert clock.nanoseconds(mark) is None
    stream.now = 0.5
    assert clock.nanoseconds(mark) - origin == 500_000_000


def test_stream_clock_is_accurate_for_days(stream: Stream) -> None:
    clock = StreamClock(torch.device("cuda"))
    origin = clock.nanoseconds(clock.mark())
    for mark in range(1, 10_000):
        stream.now = stream.queued = mark * 30.0
        found = clock.nanoseconds(clock.mark()) - origin
    assert abs(found - stream.now * 1e9) < 1e6  # a millisecond in three and a half days


def test_clocks_start_at_the_current_time() -> None:
    before = time.time_ns()
    clock = HostClock()
    found = clock.nanoseconds(clock.mark())
    # A tolerance of a millisecond, because the system clock may be adjusted.
    assert before <= found <= time.time_ns() + 10**6


def test_host_clock_is_accurate_despite_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, the clocks of ranks on a loaded host would differ by milliseconds."""
    now, offset, delays = 10**18, 77, iter([8, 2, 0, 5] * 3)

    def late() -> int:
        nonlocal now
        now += next(delays) * 10**6
        return now - offset

    monkeypatch.setattr(time, "time_ns", lambda: now)
    monkeypatch.setattr(time, "perf_counter_ns", late)
    assert HostClock().nanoseconds(0) == offset
