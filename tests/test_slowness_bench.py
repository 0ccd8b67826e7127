"""What the table of faults says of slow ranks and of long runs follows from what it is given."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "bench"))

from _faults import inject_slowness, slowness, soak
from _faults.slowness import BACKWARD, FORWARD, UNDISTURBED, Shape, Slowness

from titan_async.monitor.events import RECORD
from titan_async.monitor.spans import RankSpans
from titan_async.pipelining.messages import Messages
from titan_async.pipelining.recording import Kind

PAIR = FORWARD + BACKWARD


def test_predictions_are_those_of_closed_forms() -> None:
    shape, nothing = Shape(2, 4, 20), [0.0, 0.0]
    assert slowness.predict(shape, UNDISTURBED, nothing) == pytest.approx(1)
    # The slow rank sets the pace, and the other one is busy for a third of it.
    assert slowness.predict(shape, Slowness("", factors=(1.0, 3.0)), nothing) == pytest.approx(
        (1 + 1 / 3) / 2
    )
    # d microbatches in flight, each on its way for d pairs and 2 (d - 1) messages.
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


def test_shares_of_time_are_counted_over_whole_batches() -> None:
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


def test_late_messages_leave_in_their_order_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[tuple[str, float]] = []

    def send(tensor: str, peer: int, group: object) -> SimpleNamespace:
        left.append((tensor, time.perf_counter()))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "isend", send)
    monkeypatch.setattr(Messages, "_start", Messages._start)  # is put back at the end
    inject_slowness._delay_messages(0.05)
    messages = SimpleNamespace(_lanes=SimpleNamespace(groups={("F", 1): object()}))
    begin = time.perf_counter()
    works = []
    for name in ("first", "second"):
        op = SimpleNamespace(op=send, tensor=name, peer=1)
        works += Messages._start(messages, SimpleNamespace(kind="F"), [op])  # type: ignore[arg-type]
    assert time.perf_counter() - begin < 0.05 and not left
    for work in works:
        work.wait()
    assert [name for name, _ in left] == ["first", "second"]
    assert all(when - begin >= 0.05 for _, when in left)


def test_a_computation_is_padded_and_not_cut() -> None:
    begin = time.perf_counter()
    assert inject_slowness._padded(lambda: 7, lambda: 0.05)() == 7
    assert time.perf_counter() - begin >= 0.05
    assert inject_slowness._padded(lambda: time.sleep(0.01) or 8, lambda: 0.0)() == 8


@pytest.mark.parametrize(
    ("growth", "files", "survives"),
    [(0.0, 0, True), (40.0, 0, False), (0.0, 1, False)],
)
@pytest.mark.parametrize("held", [0.0, 40.0])
def test_a_soak_tells_growth_from_a_level(growth: float, files: int, survives: bool, held: float) -> None:
    series = [
        soak.Sample(seconds, 500 + growth * seconds / 3600, 40 + files * (seconds > 1500), 33)
        for seconds in range(0, 1800, 5)
    ]
    # A checkpoint is being written.
    series[-5] = replace(series[-5], files=series[-5].files + 1)
    # What it takes to get going does not count.
    series[:20] = [soak.Sample(sample.seconds, 100, 3, 1) for sample in series[:20]]
    in_use = [(seconds, 300 + held * seconds / 3600) for seconds in range(0, 1800, 5)]
    result = soak._judge("rank 0", series, in_use, minutes=30)
    assert (result.survived == 1) == (survives and not held)
