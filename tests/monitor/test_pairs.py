"""Overlapped pairs are recorded as one span and shown as a forward and a backward."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.monitor.test_frame import draw, look, plain
from tests.monitor.test_stage_stats import FORWARD, stats_of, timing
from tests.monitor.test_trace import arrows, check_format, names_of_tracks, slices, traced
from tests.support.events import kind_of, write_run
from tests.support.watching import going_on, rewrite_ring, write_now
from titan_async.monitor import snapshot
from titan_async.monitor.events import RECORD, RankReader, utilization_of
from titan_async.monitor.figures import draw_timelines, style
from titan_async.monitor.run_folder import read_info
from titan_async.monitor.spans import find_run, load_spans, select_steps, split_pairs
from titan_async.monitor.stage_stats import StageSeconds, simulated_bubble, stage_seconds
from titan_async.pipelining.programs import async_programs, schedule_programs
from titan_async.pipelining.recording import FORWARD_KINDS, GRADIENT_KINDS, Kind
from titan_async.pipelining.simulation import Timing, simulate

STAGES, MICROBATCHES, STEPS = 3, 6, 5
HELD = (6, 4, 2)
"""Microbatches in flight on a stage during a pair: 2 (d - 1 - r) + 2."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    write_run(folder, overlap=True, stages=STAGES, microbatches=MICROBATCHES, steps=STEPS)
    return folder


@pytest.mark.parametrize(("stages", "microbatches", "lookahead"), [(2, 3, 0), (3, 6, 1), (4, 9, 2)])
def test_backward_of_a_pair_follows_the_schedule(
    tmp_path: Path, stages: int, microbatches: int, lookahead: int
) -> None:
    folder = write_run(tmp_path, overlap=True, stages=stages, microbatches=microbatches)
    shape = read_info(folder)
    object.__setattr__(shape, "lookahead", lookahead)
    for stage in range(stages):
        wanted, rows = [], []
        for task in async_programs(stages, microbatches, 4, lookahead, overlap=True)[stage]:
            row = (8 * len(rows), 8 * len(rows) + 5, task.batch + 11, task.microbatch)
            rows.append((*row, max(task.batch - 1, 0), stage, kind_of(task), 1))
            for half, each in enumerate(task.halves, start=1 if task.overlapped else 0):
                wanted.append((each, half, row[:2], max(each.batch - 1, 0)))
        split, halves = split_pairs(np.array(rows, RECORD), shape)
        found = [
            (
                Kind(r["kind"]),
                r["batch"] - 11,
                r["microbatch"],
                r["stage"],
                (r["start"], r["end"]),
                r["version"],
            )
            for r in split
        ]
        assert found == [
            (kind_of(task), task.batch, task.microbatch, stage, times, version)
            for task, _, times, version in wanted
        ]
        assert halves.tolist() == [half for _, half, *_ in wanted] and 2 in halves


def test_backward_without_a_recorded_forward_has_no_version(run_dir: Path) -> None:
    [records] = [
        spans.records for spans in select_steps(load_spans(find_run(run_dir)), range(3, 4)).ranks[:1]
    ]
    split, halves = split_pairs(records, read_info(find_run(run_dir)))
    before = split[(halves == 2) & (split["batch"] < records["batch"][records["kind"] == Kind.OVERLAP].min())]
    assert len(before) and set(before["version"].tolist()) == {-1}


def test_pair_is_counted_once(run_dir: Path) -> None:
    folder = find_run(run_dir)
    run = simulate(schedule_programs("Async2BW", STAGES, MICROBATCHES, STEPS, overlap=True), timing(STAGES))
    for rank, spans in enumerate(run.timelines):
        share = run.busy[rank] / spans[-1].end
        assert utilization_of(RankReader(folder, rank).summaries())[rank] == pytest.approx(share, abs=1e-4)
        stage = stats_of(folder, rank, (rank,)).stages[rank]
        assert stage.average_utilization == pytest.approx(share, abs=1e-4)
        assert sum(step.count(FORWARD_KINDS) for step in stage.steps) == MICROBATCHES * STEPS
        assert sum(step.count(GRADIENT_KINDS) for step in stage.steps) == MICROBATCHES * STEPS


def test_time_of_a_pair_is_split(run_dir: Path) -> None:
    found = stage_seconds([stats_of(find_run(run_dir), 0, (0,)).stages[0]])
    assert found is not None
    assert (found.forward, found.backward) == pytest.approx((FORWARD, 2 * FORWARD), rel=1e-4)


def test_simulated_bubble_of_pairs(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs wait for two inputs: the second stage gathers for longer than the first reduces."""
    first = StageSeconds(forward=3, backward=2, gather=0, reduction=3, update=0, swap=0)
    second = StageSeconds(forward=1, backward=4, gather=5, reduction=0, update=0, swap=0)
    times = Timing([3, 1], [2, 4], gather=[0, 5], reduction=[3, 0])
    bubbles = []
    for overlap in (False, True):
        run = simulate(schedule_programs("Async2BW", 2, 4, 8, overlap=overlap), times)
        bubbles.append(simulated_bubble("Async2BW", [first, second], 4, 0, overlap))
        assert bubbles[-1] == pytest.approx(1 - run.utilization, abs=1e-3)
    assert bubbles == pytest.approx([1 / 5, 2 / 7])
    asked: list[tuple] = []
    monkeypatch.setattr(snapshot, "simulated_bubble", lambda *about: asked.append(about))
    look(find_run(run_dir))
    assert [(about[0], *about[2:]) for about in asked] == [
        ("Async2BW", MICROBATCHES, 0, True, False),
        ("1F1B", MICROBATCHES),
    ]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_microbatches_in_flight(run_dir: Path, chunk: int) -> None:
    folder = find_run(run_dir)
    for rank, held in enumerate(HELD):
        figures = stats_of(folder, rank, (rank,), chunk, read_info(folder))
        stage = figures.stages[rank]
        assert max(step.most_in_flight for step in stage.steps) == held
        assert stage.in_flight == 0  # each pair has released the right microbatch


def test_trace_has_two_tracks_for_pairs(run_dir: Path) -> None:
    trace = traced(run_dir)
    check_format(trace)
    names = names_of_tracks(trace)
    assert list(names.values())[:3] == ["stage 0 (rank 0)", "stage 0 backwards of pairs", "stage 0 weights"]
    tracks = {names[track]: events for track, events in slices(trace).items()}
    every = {(step, m) for step in range(1, STEPS + 1) for m in range(MICROBATCHES)}
    for stage, held in enumerate(HELD):
        own, paired = tracks[f"stage {stage} (rank {stage})"], tracks[f"stage {stage} backwards of pairs"]
        forwards = [event for event in own if event["cat"] == "FORWARD"]
        alone = [event for event in own if event["cat"] == "BACKWARD"]
        assert len(alone) == held - 1  # those of the drain
        for events in (forwards, alone + paired):
            about = [(event["args"]["step"], event["args"]["microbatch"]) for event in events]
            assert len(about) == len(every) and set(about) == every
        assert {(e["cat"], re.sub(r"\d+", "N", e["name"])) for e in paired} == {("BACKWARD", "backward N")}
        # Each has the times of a forward, that of the microbatch `held - 1` after it.
        number = {e["ts"]: e["args"]["step"] * MICROBATCHES + e["args"]["microbatch"] for e in forwards}
        ends = {e["ts"]: e["dur"] for e in forwards}
        for event in paired:
            of_backward = event["args"]["step"] * MICROBATCHES + event["args"]["microbatch"]
            assert number[event["ts"]] - of_backward == held - 1 and ends[event["ts"]] == event["dur"]
    messages = [(name, source["args"], target["args"]) for name, _, _, source, target in arrows(trace)]
    assert all(source["microbatch"] == target["microbatch"] for _, source, target in messages)
    assert len(messages) == 2 * (STAGES - 1) * MICROBATCHES * STEPS
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    for stage, held in enumerate(HELD):
        values = [e["args"]["microbatches"] for e in counters if e["name"].startswith(f"stage {stage} ")]
        assert (min(values), max(values), values[-1]) == (0, held, 0)


def test_timeline_draws_the_forward_of_a_pair_above_the_backward(run_dir: Path) -> None:
    run = select_steps(load_spans(find_run(run_dir)), range(3, 4))
    with style():
        figure = Figure((30, 4), layout="constrained")
        draw_timelines(figure, [("one", run)])
    [axes] = figure.axes
    for row, held in enumerate(HELD):
        found: dict[str, dict[float, int]] = {"above": {}, "below": {}}
        for text in axes.texts:
            x, y = text.get_position()
            if abs(y - row) < 0.4 and text.get_text().isdecimal():
                found["above" if y < row else "below"][round(x, 6)] = int(text.get_text())
        assert len(found["above"]) == MICROBATCHES and found["above"].keys() == found["below"].keys()
        for x, forward in found["above"].items():
            assert (forward - found["below"][x]) % MICROBATCHES == (held - 1) % MICROBATCHES
    assert "overlapped pair" not in [text.get_text() for text in figure.legends[0].get_texts()]


def test_live_view_shows_pairs(tmp_path: Path) -> None:
    folder = going_on(tmp_path, overlap=True, stages=STAGES, microbatches=MICROBATCHES, steps=STEPS)
    records = RankReader(folder, 1).new_records()
    # All but the last pair.
    rewrite_ring(folder, 1, records[: np.flatnonzero(records["kind"] == Kind.OVERLAP)[-1]])
    write_now(folder, 1, Kind.OVERLAP, 0.01, batch=5, microbatch=5)
    seen = look(folder)
    assert seen[0].rows[1].doing is Kind.OVERLAP and seen[0].rows[1].in_flight == HELD[1]
    lines = plain(draw(seen, 80, 24))
    assert [len(line) for line in lines] == [80] * 24
    assert "F B P U . " in lines[4] and "forward backward pair update wait" in plain(draw(seen, 100, 24))[4]
    assert "pair 5" in next(line for line in lines if line.startswith(" 1 "))
    written = plain(draw(seen, 100, 24, environ={"TERM": "xterm-256color", "NO_COLOR": "1"}))
    assert "Forward Backward Pair Update .wait" in "\n".join(written)
    strips = [line.split()[3] for line in written if re.match(r" \d ", line)]
    assert len(strips) == STAGES and all(set(strip) <= set("FBPU.") and "PPP" in strip for strip in strips)
