"""The state of runs that are finished, active, stalled or dead, and of incomplete files."""

import dataclasses
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support.events import write_run
from tests.support.watching import change_info, going_on, polled, with_copies, write_now
from titan_async.errors import UserError
from titan_async.monitor import events, snapshot
from titan_async.monitor.events import RECORD, EventWriter, ring_path
from titan_async.monitor.journal import journal_path
from titan_async.monitor.snapshot import RunMonitor, Snapshot
from titan_async.pipelining.programs import schedule_programs
from titan_async.pipelining.recording import Kind
from titan_async.pipelining.simulation import Timing, simulate


def look(folder: Path) -> Snapshot:
    return polled(folder).snapshot()


def test_finished_run(tmp_path: Path) -> None:
    seen = look(write_run(tmp_path, stages=3, microbatches=6, steps=8, slow_stage=1))
    assert (seen.status, seen.over, seen.step, seen.remaining, seen.stalls) == ("finished", True, 8, None, ())
    scale, forward = (1.0, 1.5, 1.0), 0.02
    timing = Timing(
        [forward * s for s in scale], [2 * forward * s for s in scale], latency=forward / 20,
        update=[forward / 2] * 3, reduction=[forward / 10] * 3, gather=[forward / 20] * 3,
    )  # fmt: skip
    run = simulate(schedule_programs("Async2BW", 3, 6, 8), timing)
    shares = [busy / spans[-1].end for busy, spans in zip(run.busy, run.timelines, strict=True)]
    assert [row.average_utilization for row in seen.rows] == pytest.approx(shares, abs=1e-5)
    assert seen.bubble == pytest.approx(1 - sum(shares) / 3, abs=1e-5)
    free = dataclasses.replace(timing, latency=0.0)
    for schedule, bubble in (
        ("Async2BW", seen.simulated_bubble), ("1F1B", seen.simulated_bubble_of_1f1b)
    ):  # fmt: skip
        assert bubble == pytest.approx(
            1 - simulate(schedule_programs(schedule, 3, 6, 8), free).utilization, abs=5e-3
        )
    assert [row.version for row in seen.rows] == [6, 6, 6]
    assert [row.in_flight for row in seen.rows] == [0, 0, 0]
    assert max(seen.rows, key=lambda row: row.busy_seconds).stage == 1
    assert all(row.memory == 200 << 20 and row.slowest_rank is None for row in seen.rows)


def test_active_run(tmp_path: Path) -> None:
    folder = going_on(tmp_path, steps=12)
    change_info(folder, steps=112)
    write_now(folder, 0, Kind.FORWARD, 0.01, microbatch=5)
    write_now(folder, 2, Kind.RECEIVE, 0.01)
    seen = look(folder)
    assert (seen.status, seen.over, seen.step) == ("running", False, 12)
    assert seen.rows[0].doing is Kind.FORWARD and seen.rows[0].microbatch == 5
    assert [row.in_flight for row in seen.rows] == [1, 0, 0, 0]  # the current one
    assert seen.rows[2].doing is Kind.RECEIVE and seen.rows[2].microbatch == -1
    assert seen.remaining is not None and seen.remaining >= 0


def test_resumed_run(tmp_path: Path) -> None:
    seen = look(write_run(tmp_path, first_step=100, steps=4))
    assert seen.step == 104 and seen.rows[0].version == 102
    folder = tmp_path / "events" / "20260101-000000-aaaa"
    for rank in range(4):
        ring_path(folder, rank).unlink()
    journal_path(folder).unlink()
    seen = look(folder)
    assert (seen.status, seen.step, seen.elapsed, seen.bubble) == ("starting", 100, None, None)


def test_remaining_time_follows_the_journal(tmp_path: Path) -> None:
    folder = going_on(tmp_path, steps=4)
    change_info(folder, steps=104)
    lines = [f'{{"time": {t}, "kind": "step", "step": {s}, "loss": 1.0}}' for s, t in ((2, 1000), (4, 1006))]
    journal_path(folder).write_text("\n".join(lines) + "\n")
    assert look(folder).remaining == 300


def test_stall_marks_waiting_stages_and_the_cause(tmp_path: Path) -> None:
    folder = going_on(tmp_path)
    for rank in range(4):
        write_now(folder, rank, Kind.RECEIVE if rank else Kind.BACKWARD, 20)
    seen = look(folder)
    assert seen.status == "stalled"
    assert [stall.stages for stall in seen.stalls] == [(0,), (1,), (2,), (3,)]
    assert "waits for the input of microbatch 3 of step 13 from stage 0" in seen.stalls[1].text
    assert [row.stalled for row in seen.rows] == [True] * 4


def test_rank_without_heartbeat(tmp_path: Path) -> None:
    folder = going_on(tmp_path)
    write_now(folder, 0, Kind.RECEIVE, 1)
    write_now(folder, 2, Kind.RECEIVE, 1)
    write_now(folder, 3, Kind.FORWARD, 1)
    write_now(folder, 1, Kind.FORWARD, 1, ago=20)
    seen = look(folder)
    assert re.fullmatch(r"rank 1 \(stage 1\) has sent no heartbeat for 2\d s", seen.stalls[0].text)
    assert [row.stalled for row in seen.rows] == [False, True, False, False] and not seen.over


def test_heartbeats_are_detected_with_a_clock_that_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = going_on(tmp_path, stages=2)
    now = 0.0
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: now)
    watch = RunMonitor(folder)
    for i in range(100):  # half a minute, with a clock that is an hour behind
        now = i * 0.3
        write_now(folder, 0, Kind.FORWARD, 0.1)
        write_now(folder, 1, Kind.FORWARD, 0.1, ago=3600 - now)
        watch.poll()
    assert watch.snapshot().stalls == ()
    for _ in range(3):
        now += 5
        write_now(folder, 0, Kind.FORWARD, 0.1)
        watch.poll()
    assert [stall.text for stall in watch.snapshot().stalls] == [
        "rank 1 (stage 1) has sent no heartbeat for 15 s"
    ]


def test_killed_process(tmp_path: Path) -> None:
    folder = going_on(tmp_path, stages=2)
    with subprocess.Popen(["true"]) as process:
        process.wait()
    change_info(folder, pid=process.pid)
    for rank in range(2):
        write_now(folder, rank, Kind.FORWARD, 1, ago=60)
    seen = look(folder)
    assert seen.over and seen.status == f"died (process {process.pid} does not exist)"
    change_info(folder, host="elsewhere.example")
    assert not look(folder).over


def test_replicated_stages(tmp_path: Path) -> None:
    folder = going_on(tmp_path, stages=2, microbatches=4)
    alone = look(folder)
    with_copies(folder, slow=3)
    seen = look(folder)
    assert len(seen.rows) == 2
    assert [row.slowest_rank for row in seen.rows] == [0, 3]
    assert seen.rows[0].average_utilization == alone.rows[0].average_utilization
    slow, mean = alone.rows[1].average_utilization, seen.rows[1].average_utilization
    assert slow is not None and mean is not None and mean > slow + 0.005
    assert (seen.rows[1].memory, seen.rows[1].memory_limit) == (3 << 30, 80 << 30)


def test_run_without_a_pipeline(tmp_path: Path) -> None:
    seen = look(write_run(tmp_path, schedule="GPipe", stages=1, microbatches=1))
    assert len(seen.rows) == 1 and seen.simulated_bubble is None and seen.bubble is not None
    assert seen.rows[0].average_utilization == pytest.approx(0.06 / 0.073, abs=1e-5)


def test_ring_overwritten_between_two_polls(tmp_path: Path) -> None:
    folder = going_on(tmp_path, stages=2)
    ring_path(folder, 0).unlink()
    writer = EventWriter(folder, 0)

    def write(step: int) -> None:
        begin = step * 10**9
        rows = [(begin + i, begin + i + 1, step, i, step - 1, 0, Kind.FORWARD, 1) for i in range(0, 8000, 2)]
        # Busy half of the time.
        rows.append((begin, begin + 8000, step, -1, -1, 0, Kind.STEP, 0))
        writer.write(np.array(rows, RECORD))
        writer.write_state(np.zeros(1, RECORD), (0, 0, 0))

    watch = RunMonitor(folder)
    write(1)
    watch.poll()
    for step in range(2, 22):  # 80,020 records; the ring holds 65,536
        write(step)
    watch.poll()
    row = watch.snapshot().rows[0]
    # The oldest step is incomplete, and must not be counted.
    assert row.steps[-1].step == 21 and row.average_utilization == pytest.approx(0.5)
    write(22)
    writer.close()
    watch.poll()
    assert watch.snapshot().rows[0].average_utilization == pytest.approx(0.5)


def test_missing_empty_and_incomplete_files(tmp_path: Path) -> None:
    folder = going_on(tmp_path, stages=3)
    ring_path(folder, 0).write_bytes(b"")
    ring_path(folder, 1).write_bytes(
        ring_path(folder, 2).read_bytes()[: events.STATE.itemsize - 8] + bytes(8)
    )
    journal_path(folder).write_bytes(b'{"time": 1, "kind": "log", "text": "hel')
    seen = look(folder)
    assert [row.average_utilization is None for row in seen.rows] == [True, True, False]
    assert seen.entries == 0
    (folder / "run.json").write_text('{"format": 1')
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        RunMonitor(folder)
