"""Statistics of stages, compared with simulated schedules and with spans written by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.support.events import write_run
from titan_async.monitor.events import RECORD, RankReader
from titan_async.monitor.kinds import Activity
from titan_async.monitor.run_folder import RunShape
from titan_async.monitor.stage_stats import (
    RankStats,
    StageSeconds,
    exclusive_seconds,
    simulated_bubble,
    stage_seconds,
)
from titan_async.monitor.view.stage_table import strip
from titan_async.pipelining.programs import schedule_programs
from titan_async.pipelining.recording import Kind
from titan_async.pipelining.simulation import COMPUTE, Timing, simulate

FORWARD = 0.02


def records(*rows: tuple[int, ...]) -> np.ndarray:
    """start, end, batch, microbatch, version, stage, kind, depth; in seconds."""
    return np.array([(int(a * 1e9), int(b * 1e9), *rest) for a, b, *rest in rows], RECORD)


def stats_of(
    folder: Path, rank: int, stages: tuple[int, ...], chunk: int = 1 << 20, shape: RunShape | None = None
) -> RankStats:
    stats, all_records = RankStats(stages, shape), RankReader(folder, rank).new_records()
    for begin in range(0, len(all_records), chunk):
        stats.add(all_records[begin : begin + chunk])
    return stats


def timing(stages: int, slow: int | None = None) -> Timing:
    """The timing of `write_run`."""
    scale = [1.5 if stage == slow else 1.0 for stage in range(stages)]
    return Timing(
        forward=[FORWARD * s for s in scale],
        backward=[2 * FORWARD * s for s in scale],
        latency=FORWARD / 20,
        update=[FORWARD / 2] * stages,
        reduction=[FORWARD / 10] * stages,
        gather=[FORWARD / 20] * stages,
    )


@pytest.mark.parametrize("schedule", ["Async2BW", "1F1B", "GPipe"])
def test_utilization_equals_the_simulation(tmp_path: Path, schedule: str) -> None:
    folder = write_run(tmp_path, schedule=schedule, stages=3, microbatches=6, steps=9)
    run = simulate(schedule_programs(schedule, 3, 6, 9), timing(3))
    for rank, spans in enumerate(run.timelines):
        stage = stats_of(folder, rank, (rank,)).stages[rank]
        # Files hold nanoseconds.
        assert stage.average_utilization == pytest.approx(run.busy[rank] / spans[-1].end, abs=1e-5)
        begin, end = (next(s.end for s in spans if s.task.kind == "U" and s.task.batch == b) for b in (3, 4))
        busy = sum(s.end - s.start for s in spans if s.task.kind in COMPUTE and begin <= s.start < end)
        [step] = [step for step in stage.steps if step.step == 5]
        assert step.seconds == pytest.approx(end - begin, abs=1e-6)
        assert step.busy == pytest.approx(busy, abs=1e-6)


def test_utilization_of_the_last_and_of_twenty_steps(tmp_path: Path) -> None:
    rows = []
    for step in range(1, 31):
        busy = 0.25 if step < 30 else 0.5
        rows += [
            (step, step + busy, step, 0, 0, 0, Kind.FORWARD, 1),
            (step, step + 1, step, -1, -1, 0, Kind.STEP, 0),
        ]
    stats = RankStats((0,))
    stats.add(records(*rows))
    stage = stats.stages[0]
    assert stage.utilization == pytest.approx(0.5)
    assert stage.average_utilization == pytest.approx((19 * 0.25 + 0.5) / 20)
    assert stats.step == 30 and stats.step_seconds == pytest.approx(1.0)


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_result_does_not_depend_on_the_chunks_of_records(tmp_path: Path, chunk: int) -> None:
    folder = write_run(tmp_path, stages=3, microbatches=6, steps=8)
    whole, portions = (stats_of(folder, 1, (1,), size).stages[1] for size in (1 << 20, chunk))
    assert [step.busy for step in portions.steps] == pytest.approx([step.busy for step in whole.steps])
    # Both include microbatches in flight before the first step that is kept.
    assert [step.most_in_flight for step in portions.steps] == [step.most_in_flight for step in whole.steps]
    assert portions.in_flight == whole.in_flight


def test_microbatches_in_flight_equal_the_simulation(tmp_path: Path) -> None:
    folder = write_run(tmp_path, stages=4, microbatches=8, steps=8)
    run = simulate(schedule_programs("Async2BW", 4, 8, 8), timing(4))
    for rank in range(4):
        stats = stats_of(folder, rank, (rank,)).stages[rank]
        assert max(step.most_in_flight for step in stats.steps) == run.peak_in_flight()[rank] == 4 - rank
        assert stats.in_flight == 0


def test_microbatches_in_flight_after_some_spans() -> None:
    stats = RankStats((0,))
    stats.add(records(*((i, i + 1, 1, i, 4, 0, Kind.FORWARD, 1) for i in range(3))))
    stage = stats.stages[0]
    assert stage.in_flight == 3 and stage.holds(1, 2) and not stage.holds(1, 3) and stage.version == 4
    stats.add(records((3, 4, 1, 0, 4, 0, Kind.BACKWARD_INPUT, 1)))
    assert stage.in_flight == 3  # the weights' gradients need its activations
    stats.add(records((4, 5, 1, 0, 4, 0, Kind.BACKWARD_WEIGHT, 1), (5, 6, 1, 1, 3, 0, Kind.BACKWARD, 1)))
    assert stage.in_flight == 1 and not stage.holds(1, 0) and stage.version == 3
    # A backward whose forward was not recorded, and a validation's forward.
    stats.add(records((6, 7, 0, 7, 3, 0, Kind.BACKWARD, 1), (7, 8, -1, 0, 4, 0, Kind.FORWARD, 1)))
    assert stage.in_flight == 1
    stats.add(records((0, 8, 1, -1, -1, 0, Kind.STEP, 0)))
    stats.add(records((8, 9, 0, 6, 3, 0, Kind.BACKWARD, 1), (9, 10, 2, 0, 4, 0, Kind.FORWARD, 1)))
    stats.add(records((8, 11, 2, -1, -1, 0, Kind.STEP, 0)))
    stats.add(records((11, 12, 2, 0, 4, 0, Kind.BACKWARD, 1), (11, 13, 3, -1, -1, 0, Kind.STEP, 0)))
    assert [step.most_in_flight for step in stage.steps] == [3, 2, 2] and stage.in_flight == 0


def test_incomplete_steps_are_omitted() -> None:
    stats = RankStats((0,))
    stats.add(records((0, 1, 1, 0, 0, 0, Kind.FORWARD, 1), (0, 1, 1, -1, -1, 0, Kind.STEP, 0)))
    stats.add(records((3, 4, 3, -1, -1, 0, Kind.STEP, 0)), lost=True)
    assert [step.step for step in stats.stages[0].steps] == [1] and stats.step == 3
    stats.add(records((4, 5, 4, 0, 0, 0, Kind.FORWARD, 1), (4, 5, 4, -1, -1, 0, Kind.STEP, 0)))
    assert [step.step for step in stats.stages[0].steps] == [1, 4]


def test_spans_between_steps_are_omitted() -> None:
    stats = RankStats((0,))
    stats.add(
        records(
            (0, 1, 1, -1, -1, 0, Kind.STEP, 0),
            (1, 2, 1, 5, 0, 0, Kind.BACKWARD, 1),  # a pipeline that empties before it saves
            (1, 9, -1, -1, -1, 0, Kind.SAVE, 0),
            (9, 9.5, 2, 0, 0, 0, Kind.FORWARD, 1),
            (9, 10, 2, -1, -1, 0, Kind.STEP, 0),
        )
    )
    assert stats.stages[0].utilization == pytest.approx(0.5)
    assert stats.step_seconds == pytest.approx(1.0)


def test_nested_spans_are_counted_once() -> None:
    rows = records(
        (0, 1, 1, 0, 0, 0, Kind.RECEIVE, 2),
        (1, 2, 1, 0, 0, 0, Kind.GATHER, 3),
        (1, 3, 1, 0, 0, 0, Kind.SEND, 2),
        (0, 4, 1, 0, 0, 0, Kind.FORWARD, 1),
        (4, 6, 1, 0, 0, 0, Kind.BACKWARD, 1),
        (0, 10, 1, -1, -1, 0, Kind.STEP, 0),
    )
    assert exclusive_seconds(rows).tolist() == pytest.approx([1, 1, 1, 1, 2, 4])
    stats = RankStats((0,))
    stats.add(rows)
    assert stats.stages[0].utilization == pytest.approx(0.3)


def test_stages_of_one_rank_are_separate(tmp_path: Path) -> None:
    folder = write_run(tmp_path, schedule="Interleaved1F1B", stages=2, microbatches=4, steps=4)
    stats = stats_of(folder, 0, (0, 2))
    run = simulate(schedule_programs("Interleaved1F1B", 2, 4, 4), timing(4))
    shares = [stats.stages[stage].average_utilization for stage in (0, 2)]
    assert sum(share for share in shares if share) == pytest.approx(
        run.busy[0] / run.timelines[0][-1].end, abs=1e-5
    )
    assert shares[0] == pytest.approx(shares[1], abs=1e-5)  # times are rounded to nanoseconds


@pytest.mark.parametrize("cells", [10, 37, 120])
def test_strip_shows_the_main_activity_of_each_cell(tmp_path: Path, cells: int) -> None:
    folder = write_run(tmp_path, stages=3, microbatches=6, steps=6)
    kinds = {
        Kind.FORWARD: Activity.FORWARD,
        Kind.BACKWARD: Activity.BACKWARD,
        Kind.GATHER: Activity.UPDATE,
        Kind.REDUCE: Activity.UPDATE,
        Kind.OPTIMIZER: Activity.UPDATE,
    }
    for rank in range(3):
        steps = list(stats_of(folder, rank, (rank,)).stages[rank].steps)[-2:]
        drawn = strip(steps, cells)
        assert len(drawn) == cells
        begin, end = steps[0].start, steps[-1].end
        clear = 0
        for cell, doing in enumerate(drawn):
            low, high = begin + (end - begin) * cell / cells, begin + (end - begin) * (cell + 1) / cells
            seconds = dict.fromkeys(Activity, 0.0)
            seconds[Activity.WAIT] = high - low
            for record in np.concatenate([step.records for step in steps]):
                inside = min(high, int(record["end"])) - max(low, int(record["start"]))
                if inside > 0 and Kind(record["kind"]) in kinds:
                    seconds[kinds[Kind(record["kind"])]] += inside
                    seconds[Activity.WAIT] -= inside
            first, second = sorted(seconds.values(), reverse=True)[:2]
            if first - second > (high - low) / 4:  # not a tie
                clear += 1
                assert seconds[doing] == first
        assert clear > cells / 3


def test_strip_omits_time_between_steps() -> None:
    stats = RankStats((0,))
    stats.add(
        records(
            (0, 1, 1, 0, 0, 0, Kind.FORWARD, 1),
            (0, 1, 1, -1, -1, 0, Kind.STEP, 0),
            (1, 99, -1, -1, -1, 0, Kind.SAVE, 0),
            (99, 100, 2, 0, 0, 0, Kind.OPTIMIZER, 1),
            (99, 100, 2, -1, -1, 0, Kind.STEP, 0),
        )
    )
    assert strip(list(stats.stages[0].steps), 4) == (Activity.FORWARD,) * 2 + (Activity.UPDATE,) * 2
    assert strip([], 4) == () and strip(list(stats.stages[0].steps), 0) == ()


@pytest.mark.parametrize(("schedule", "least", "most"), [("1F1B", 0.3, 0.5), ("Async2BW", 0.2, 0.3)])
def test_simulated_bubble_equals_that_of_a_run(
    tmp_path: Path, schedule: str, least: float, most: float
) -> None:
    """Measured under one schedule and simulated under both, with a slow stage."""
    folder = write_run(tmp_path, schedule="Async2BW", stages=4, microbatches=8, slow_stage=2)
    seconds = [stage_seconds([stats_of(folder, rank, (rank,)).stages[rank]]) for rank in range(4)]
    assert [each.forward for each in seconds if each] == pytest.approx([0.02, 0.02, 0.03, 0.02], rel=1e-4)
    assert [each.backward for each in seconds if each] == pytest.approx([0.04, 0.04, 0.06, 0.04], rel=1e-4)
    truth = timing(4, slow=2)
    free = Timing(
        truth.forward, truth.backward, gather=truth.gather, reduction=truth.reduction, update=truth.update
    )
    run = simulate(schedule_programs(schedule, 4, 8, 12), free)
    found = simulated_bubble(schedule, [each for each in seconds if each], 8)
    assert found == pytest.approx(1 - run.utilization, abs=0.005)
    assert least < 1 - run.utilization < most


def test_simulated_bubble_excludes_other_load() -> None:
    """Two ranks that compute during half of each step, and are preempted during the other half."""
    seconds = []
    for rank in range(2):
        stats = RankStats((rank,))
        for step in range(1, 4):
            begin = step * 2000
            stats.add(
                records(
                    *(
                        (begin + 500 * i, begin + 500 * i + 100, step, i, 0, rank, Kind.FORWARD, 1)
                        for i in range(4)
                    ),
                    *(
                        (begin + 500 * i + 200, begin + 500 * i + 350, step, i, 0, rank, Kind.BACKWARD, 1)
                        for i in range(4)
                    ),
                    (begin, begin + 2000, step, -1, -1, rank, Kind.STEP, 0),
                )
            )
        assert stats.stages[rank].average_utilization == 0.5
        seconds.append(stage_seconds([stats.stages[rank]]))
    known = [each for each in seconds if each]
    assert simulated_bubble("Async2BW", known, 4) == pytest.approx(0, abs=1e-9)
    assert simulated_bubble("1F1B", known, 4) == pytest.approx(0.2, abs=1e-9)  # (2 - 1) / (4 + 2 - 1)


def test_simulated_bubble_includes_swaps() -> None:
    swapping = StageSeconds(forward=1, backward=1, gather=0, reduction=0, update=0, swap=2)
    assert simulated_bubble("Async2BW", [swapping] * 2, 4) == pytest.approx(0.2)
    assert simulated_bubble("1F1B", [swapping] * 2, 4) == simulated_bubble(
        "1F1B", [dataclasses.replace(swapping, swap=0)] * 2, 4
    )


def test_unsupported_schedules_have_no_simulated_bubble() -> None:
    stats = RankStats((0,))
    assert stage_seconds([stats.stages[0]]) is None
    stats.add(
        records(
            (0, 1, 1, 0, 0, 0, Kind.FORWARD, 1),
            (1, 2, 1, 0, 0, 0, Kind.BACKWARD, 1),
            (0, 2, 1, -1, -1, 0, Kind.STEP, 0),
        )
    )
    seconds = stage_seconds([stats.stages[0]])
    assert seconds is not None and (seconds.forward, seconds.backward) == (1, 1)
    assert simulated_bubble("1F1B", [seconds] * 4, 3) is None
    assert simulated_bubble("1F1B", [seconds] * 64, 1024) is None
    assert simulated_bubble("Interleaved1F1B", [seconds] * 4, 8) is None
    assert simulated_bubble("none", [seconds], 8) is None
