"""The measurements of slow ranks and long runs in tools/bench/faults.py, with known inputs."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from _faults import inject_slowness, slowness, soak
from _faults.slowness import BACKWARD, FORWARD, UNDISTURBED, Shape, Slowness

from tests.support.waiting import MOST_SECONDS
from titan_async.monitor.events import RECORD
from titan_async.monitor.spans import RankSpans
from titan_async.pipelining.actions import Action
from titan_async.pipelining.p2p_channels import P2PChannels
from titan_async.pipelining.recording import Kind

PAIR = FORWARD + BACKWARD


def test_predictions_are_those_of_closed_forms() -> None:
    shape, nothing = Shape(2, 4, 20), [0.0, 0.0]
    assert slowness.predict(shape, UNDISTURBED, nothing) == pytest.approx(1)
    # The slow rank determines the time, of which the other computes for a third.
    assert slowness.predict(shape, Slowness("", factors=(1.0, 3.0)), nothing) == pytest.approx(
        (1 + 1 / 3) / 2
    )
    # d microbatches in flight, each of which takes d pairs and 2 (d - 1) messages.
    late = slowness.predict(shape, Slowness("", latency=0.005), nothing)
    assert late == pytest.approx(2 * PAIR / (2 * PAIR + 2 * 0.005))
    updates = slowness.predict(shape, UNDISTURBED, [PAIR, PAIR])
    assert updates == pytest.approx(4 / 5)


def spans(*rows: tuple[Kind, int, float, float, int]) -> RankSpans:
    records = np.zeros(len(rows), RECORD)
    for record, (kind, batch, start, end, version) in zip(records, rows, strict=True):
        record["kind"], record["batch"], record["version"] = kind, batch, version
        record["start"], record["end"] = round(start * 1e9), round(end * 1e9)
    return RankSpans(0, (0,), 0, records)


def test_shares_of_time_are_those_of_whole_batches() -> None:
    rows = []
    for batch in range(1, 9):
        at = 10.0 * batch
        rows += [
            (Kind.FORWARD, batch, at, at + 2, max(batch - 2, 0)),
            (Kind.RECEIVE, batch, at + 2, at + 5, max(batch - 2, 0)),
            (Kind.BACKWARD, batch, at + 5, at + 9, max(batch - 2, 0)),
        ]
    rank = spans(*rows)
    assert slowness._utilization(rank) == pytest.approx(0.6)
    assert slowness._overhead(rank) == pytest.approx(1.0)
    assert slowness._delays_are_one(rank)
    rank.records["version"][-1] += 1
    assert not slowness._delays_are_one(rank)


class Clock:
    """A clock that only `advance` changes, which also wakes sleeping threads."""

    def __init__(self) -> None:
        self._now, self._passed = 0.0, threading.Condition()

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        until = self._now + seconds
        with self._passed:
            assert self._passed.wait_for(lambda: self._now >= until, MOST_SECONDS), (
                "the clock is not advanced"
            )

    def advance(self, seconds: float) -> None:
        with self._passed:
            self._now += seconds
            self._passed.notify_all()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(inject_slowness, "time", clock)
    return clock


def test_delayed_messages_keep_their_order_and_do_not_block(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[tuple[str, float]] = []

    def send(messages: object, call: str, action: object, tensors: list[str]) -> list[SimpleNamespace]:
        left.extend((tensor, clock.perf_counter()) for tensor in tensors)
        return [SimpleNamespace(wait=lambda: None) for _ in tensors]

    monkeypatch.setattr(P2PChannels, "_start", send)
    inject_slowness._delay_messages(0.05)
    messages: Any = SimpleNamespace(_edges=SimpleNamespace(groups={("send", "F"): object()}))
    works: list[Any] = []
    for name in ("first", "second"):
        works += P2PChannels._start(messages, "send", Action("F", 0, 0), [name])  # type: ignore[list-item]
        clock.advance(0.01)
    # The rank continues before its messages are sent.
    assert not left
    clock.advance(0.03)
    works[0].wait()
    assert left == [("first", pytest.approx(0.05))]
    clock.advance(0.01)
    works[1].wait()
    assert left[1:] == [("second", pytest.approx(0.06))]


@pytest.mark.parametrize(
    ("takes", "to_last", "lasts"),
    [(0.0, 0.05, 0.05), (0.02, 0.05, 0.05), (0.05, 0.02, 0.05), (0.01, 0.0, 0.01)],
)
def test_a_computation_is_padded_and_not_cut(
    takes: float, to_last: float, lasts: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "sleep", clock.advance)

    def compute(number: int) -> int:
        clock.advance(takes)
        return number + 1

    assert inject_slowness._padded(compute, lambda: to_last)(7) == 8
    assert clock.perf_counter() == pytest.approx(lasts)


@pytest.mark.parametrize(
    ("growth", "files", "survives"),
    [(0.0, 0, True), (40.0, 0, False), (0.0, 1, False)],
)
@pytest.mark.parametrize("held", [0.0, 40.0])
def test_soak_detects_growth(growth: float, files: int, survives: bool, held: float) -> None:
    series = [
        soak.Sample(seconds, 500 + growth * seconds / 3600, 40 + files * (seconds > 1500), 33)
        for seconds in range(0, 1800, 5)
    ]
    # A checkpoint is being written.
    series[-5] = replace(series[-5], files=series[-5].files + 1)
    # The start does not count.
    series[:20] = [soak.Sample(sample.seconds, 100, 3, 1) for sample in series[:20]]
    in_use = [(seconds, 300 + held * seconds / 3600) for seconds in range(0, 1800, 5)]
    result = soak._judge("rank 0", series, in_use, minutes=30)
    assert (result.survived == 1) == (survives and not held)
