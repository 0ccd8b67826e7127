"""Traces of simulated runs, and of runs written by hand."""

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.events import write_run
from tests.support.watching import rewrite_ring
from titan_async.cli.main import main
from titan_async.errors import UserError
from titan_async.monitor.events import BURST, CAPACITY, RECORD, RankReader, ring_path
from titan_async.monitor.run_folder import read_info, write_info
from titan_async.monitor.spans import find_run, load_spans, select_steps
from titan_async.monitor.trace import trace_of
from titan_async.pipelining.programs import stages_of_ranks
from titan_async.pipelining.recording import Kind

STAGES, MICROBATCHES, STEPS, FORWARD = 4, 8, 6, 0.02

SCHEDULES = ("Async2BW", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for schedule in SCHEDULES:
        folders[schedule] = tmp_path_factory.mktemp(schedule)
        write_run(
            folders[schedule],
            schedule=schedule,
            stages=STAGES,
            microbatches=MICROBATCHES,
            steps=STEPS,
            forward=FORWARD,
        )
    return folders


def traced(run_dir: Path, *, first: int | None = None, last: int | None = None) -> dict[str, Any]:
    run = load_spans(find_run(run_dir))
    steps = range(first or run.steps[0], (last or run.steps[-1]) + 1)
    trace, lost = trace_of(select_steps(run, steps, include_following=True))
    assert lost == 0
    return json.loads(json.dumps(trace))


def slices(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The slices of each track, in the order of the file."""
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def names_of_tracks(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }


def check_format(trace: dict[str, Any]) -> None:
    """Requirements of the format, without which viewers fail silently."""
    required = {
        "X": {"name", "ts", "dur", "pid", "tid"},
        "s": {"name", "cat", "id", "ts", "pid", "tid"},
        "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
        "C": {"name", "ts", "pid", "args"},
        "M": {"name", "pid", "args"},
    }
    for event in trace["traceEvents"]:
        assert required[event["ph"]] <= set(event)
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "dur") if key in event)
    for of_track in slices(trace).values():
        open_ends: list[int] = []
        before = 0
        for event in of_track:
            assert event["ts"] >= before
            before = event["ts"]
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1], f"{event} begins within another and ends after it"
            open_ends.append(end)


def innermost(of_track: list[dict[str, Any]], ts: int) -> dict[str, Any]:
    return [event for event in of_track if event["ts"] <= ts < event["ts"] + event["dur"]][-1]


def arrows(trace: dict[str, Any]) -> list[tuple[str, tuple[int, int], tuple[int, int], dict, dict]]:
    """Name, tracks and slices at both ends of each arrow; checks that it leads forward in time."""
    tracks = slices(trace)
    ends = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]].append(event)
    found = []
    for (_, name, _), (start, finish) in ends.items():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] <= finish["ts"]
        from_track, to_track = (start["pid"], start["tid"]), (finish["pid"], finish["tid"])
        source, target = innermost(tracks[from_track], start["ts"]), innermost(tracks[to_track], finish["ts"])
        assert source["ts"] + source["dur"] - start["ts"] <= 1  # at its end
        assert target["ts"] == finish["ts"]
        found.append((name, from_track, to_track, source, target))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tracks_slices_and_arrows(schedule: str, run_dirs: dict[str, Path]) -> None:
    trace = traced(run_dirs[schedule])
    check_format(trace)
    ranks = stages_of_ranks(schedule, STAGES)
    total = sum(map(len, ranks))
    names = names_of_tracks(trace)
    expected = []
    for stage in range(total):
        [rank] = [rank for rank, stages in enumerate(ranks) if stage in stages]
        expected += [f"stage {stage} (rank {rank})", f"stage {stage} weights"]
    order = {
        (event["pid"], event["tid"]): event["args"]["sort_index"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_sort_index"
    }
    assert [names[track] for track in sorted(names, key=lambda track: order[track])] == expected

    of_track = {names[track]: events for track, events in slices(trace).items()}
    for stage in range(total):
        [of_stage] = [events for name, events in of_track.items() if name.startswith(f"stage {stage} (")]
        forwards = [event for event in of_stage if event["cat"] == "FORWARD"]
        wanted = {(step, m) for step in range(1, STEPS + 1) for m in range(MICROBATCHES)}
        assert {(event["args"]["step"], event["args"]["microbatch"]) for event in forwards} == wanted
        assert len(forwards) == len(wanted)
        assert all(abs(event["dur"] - FORWARD * 1e6) <= 1 for event in forwards)

    stage_of = {track: int(name.split()[1]) for track, name in names.items()}
    counts: Counter[tuple[str, int]] = Counter()
    pairs = set()
    for name, from_track, to_track, source, target in arrows(trace):
        kinds = {"activations": ("FORWARD",), "gradients": ("BACKWARD", "BACKWARD_INPUT")}[name]
        assert source["cat"] in kinds and target["cat"] in kinds
        about = source["args"]["step"], source["args"]["microbatch"]
        assert about == (target["args"]["step"], target["args"]["microbatch"])
        assert stage_of[to_track] - stage_of[from_track] == (1 if name == "activations" else -1)
        counts[name, about[0]] += 1
        pairs.add((name, stage_of[from_track], about))
    each = (total - 1) * MICROBATCHES
    assert counts == {
        (name, step): each for name in ("activations", "gradients") for step in range(1, STEPS + 1)
    }
    assert len(pairs) == 2 * each * STEPS


def test_names_of_waits(run_dirs: dict[str, Path]) -> None:
    found = set()
    for of_track in slices(traced(run_dirs["Async2BW"], first=3)).values():
        computing = [event for event in of_track if event["cat"] in ("RECEIVE", "FORWARD", "BACKWARD")]
        forwarded = {str(event["args"]) for event in computing if event["cat"] == "FORWARD"}
        for wait, follows in zip(computing, computing[1:], strict=False):
            if wait["cat"] == "RECEIVE":
                wanted = "activations" if follows["cat"] == "FORWARD" else "gradient"
                assert wait["name"] == f"wait for {wanted} {follows['args']['microbatch']}"
                found.add((wanted, str(wait["args"]) in forwarded))
    # The forwards of some backwards are in steps that are not selected.
    assert found == {("activations", True), ("gradient", True), ("gradient", False)}


def test_weight_versions_alternate(run_dirs: dict[str, Path]) -> None:
    trace = traced(run_dirs["Async2BW"])
    names = names_of_tracks(trace)
    of_track = {names[track]: events for track, events in slices(trace).items()}
    for stage in range(STAGES):
        lane = of_track[f"stage {stage} weights"]
        for event, following in zip(lane, lane[1:], strict=False):
            assert event["ts"] + event["dur"] <= following["ts"]
            # Viewers colour by the name without its number.
            assert event["name"].split()[0] != following["name"].split()[0]
            assert abs(event["args"]["updates"] - following["args"]["updates"]) == 1
        [computing] = [events for name, events in of_track.items() if name.startswith(f"stage {stage} (")]
        for event in computing:
            if event["cat"] in ("FORWARD", "BACKWARD"):
                [covering] = [e for e in lane if e["ts"] <= event["ts"] < e["ts"] + e["dur"]]
                assert covering["args"]["updates"] == event["args"]["version"]
    # The first stage alternates three times between forwards of a batch and backwards of the previous one.
    assert len(of_track["stage 0 weights"]) > 3 * STEPS
    assert len(of_track["stage 3 weights"]) == STEPS - 1  # batches 1 and 2 use the same version


@pytest.mark.parametrize("first", [1, 3])
def test_counter_of_microbatches_in_flight(first: int, run_dirs: dict[str, Path]) -> None:
    trace = traced(run_dirs["Async2BW"], first=first)
    values = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            values[event["name"]].append(event["args"]["microbatches"])
    # A stage holds one microbatch, and one more for each stage after it (PipeDream-2BW, section 3.1).
    assert {name: max(held) for name, held in values.items()} == {
        f"stage {stage} microbatches held": STAGES - stage for stage in range(STAGES)
    }
    assert all(min(held) == 0 and held[-1] == 0 for held in values.values())


def test_selected_steps(run_dirs: dict[str, Path]) -> None:
    trace = traced(run_dirs["1F1B"], first=2, last=3)
    check_format(trace)
    tracks = slices(trace).values()
    steps = [event["args"]["step"] for events in tracks for event in events if event["cat"] != "version"]
    assert set(steps) == {2, 3}
    assert trace["otherData"]["steps"] == [2, 3]


def by_hand(
    folder: Path, records_of_ranks: list[list[tuple[int, ...]]], ranks: list[tuple[int, ...]]
) -> None:
    """Writes a run whose records are (start, end, batch, microbatch, version, stage, kind, depth)."""
    for path in folder.glob("rank-*"):
        path.unlink()
    write_info(folder, replace(read_info(folder), ranks=tuple(ranks)))
    for rank, records in enumerate(records_of_ranks):
        rewrite_ring(folder, rank, np.array(records, RECORD))


def test_checkpoints_and_validations_between_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path, stages=2, microbatches=2, steps=2)

    def step(number: int, start: int) -> list[tuple[int, ...]]:
        return [
            (start, start + 5_000, number, 0, 0, 0, Kind.FORWARD, 1),
            (start, start + 9_000, number, -1, -1, 0, Kind.STEP, 0),
        ]

    save = (110_000, 115_000, 1, -1, -1, 0, Kind.SAVE, 0)
    validate = (116_000, 119_000, 1, -1, -1, 0, Kind.VALIDATE, 0)
    collection = (129_000, 130_000, 3, -1, -1, 0, Kind.GARBAGE_COLLECTION, 0)
    third = [collection, *step(3, 130_000)]
    by_hand(folder, [[*step(1, 100_000), save, validate, *step(2, 120_000), *third]], [(0,)])
    run = load_spans(folder)

    def kinds(first: int, last: int, include_following: bool) -> list[int]:
        selected = select_steps(run, range(first, last + 1), include_following=include_following)
        return list(selected.ranks[0].records["kind"])

    one = [Kind.FORWARD, Kind.STEP]
    assert kinds(1, 1, False) == one
    assert kinds(1, 1, True) == [*one, Kind.SAVE, Kind.VALIDATE]
    assert kinds(1, 2, False) == [*one, Kind.SAVE, Kind.VALIDATE, *one]
    assert kinds(2, 2, True) == one
    assert kinds(2, 3, False) == [*one, Kind.GARBAGE_COLLECTION, *one]
    assert "garbage collection" in [
        e["name"] for e in trace_of(select_steps(run, range(2, 4)))[0]["traceEvents"]
    ]
    trace = trace_of(select_steps(run, range(1, 2), include_following=True))[0]
    check_format(json.loads(json.dumps(trace)))
    assert [(e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"] == [
        ("step 1", 0, 9), ("forward 0", 0, 5), ("save", 10, 5), ("validate", 16, 3), ("even version 0", 0, 5),
    ]  # fmt: skip


def test_arrows_stay_within_a_replica(tmp_path: Path) -> None:
    folder = write_run(tmp_path, stages=2, microbatches=2, steps=2)

    def records(stage: int, start: int) -> list[tuple[int, ...]]:
        return [
            (start, start + 10_000, 1, 0, 0, stage, Kind.FORWARD, 1),
            (start, start + 10_000, 1, -1, -1, stage, Kind.STEP, 0),
        ]

    ranks = [records(0, 100_000), records(0, 200_000), records(1, 150_000), records(1, 250_000)]
    by_hand(folder, ranks, [(0,), (0,), (1,), (1,)])
    trace = traced(tmp_path)
    check_format(trace)
    assert sorted(
        (from_track, to_track, source["ts"], target["ts"])
        for _, from_track, to_track, source, target in arrows(trace)
    ) == [((0, 0), (0, 3), 0, 50), ((1, 0), (1, 3), 100, 150)]
    assert names_of_tracks(trace)[1, 3] == "stage 1 (rank 3)"


def test_backward_arrows_are_omitted_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, schedule="1F1B", stages=2, microbatches=2, steps=3)
    late = RankReader(folder, 1).new_records().copy()
    late["start"] -= 10**9
    late["end"] -= 10**9
    rewrite_ring(folder, 1, late)
    assert main(["trace", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "6 arrows are omitted: the clocks of the hosts differ\n"
    trace = json.loads((folder / "trace.json").read_text())
    check_format(trace)
    assert Counter(name for name, *_ in arrows(trace)) == {"gradients": 6}


def test_overwritten_steps_are_omitted(tmp_path: Path) -> None:
    folder = write_run(tmp_path, stages=2, microbatches=2, steps=2)

    def steps(count: int, spans: int) -> list[tuple[int, ...]]:
        records = []
        for step in range(1, count + 1):
            start = 1_000_000 * step
            records += [
                (start + 10 * i, start + 10 * i + 5, step, i, 0, 0, Kind.FORWARD, 1) for i in range(spans)
            ]
            records.append((start, start + 999_000, step, -1, -1, 0, Kind.STEP, 0))
        return records

    by_hand(folder, [steps(9000, 6), steps(8990, 2)], [(0,), (1,)])
    run = load_spans(folder)
    assert len(run.ranks[0].records) == CAPACITY - BURST
    # 63,000 - 61,440 records are lost: 222 whole steps of 7, and most of step 223.
    assert run.steps == range(224, 8991)
    inside = select_steps(run, run.steps)
    for spans, each in zip(inside.ranks, (7, 3), strict=True):
        assert len(spans.records) == each * len(run.steps)


def test_steps_before_a_gap_are_omitted(tmp_path: Path) -> None:
    folder = write_run(tmp_path, stages=2, microbatches=2, steps=2)
    records = [(1000 * step, 1000 * step + 999, step, -1, -1, 0, Kind.STEP, 0) for step in (1, 2, 5, 6, 7)]
    by_hand(folder, [records], [(0,)])
    assert load_spans(folder).steps == range(6, 8)


def test_trace_command_writes_files(run_dirs: dict[str, Path], tmp_path: Path, capsys) -> None:
    run_dir = run_dirs["Async2BW"]
    folder = find_run(run_dir)
    assert main(["trace", str(run_dir)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith(f"{folder / 'trace.json'}: steps 1 to 6 of run {folder.name}")
    plain = json.loads((folder / "trace.json").read_text())
    assert plain == traced(run_dir)
    assert main(["trace", str(run_dir), "--out", str(tmp_path / "new" / "t.json.gz")]) == 0
    with gzip.open(tmp_path / "new" / "t.json.gz") as file:
        assert json.load(file) == plain
    assert main(["trace", str(run_dir), "--steps=5-", "--out", str(tmp_path / "new" / "t.json")]) == 0
    assert json.loads((tmp_path / "new" / "t.json").read_text())["otherData"]["steps"] == [5, 6]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["t.json", "t.json.gz"]


def test_latest_run_is_the_default(tmp_path: Path) -> None:
    write_run(tmp_path, "20260101-000000-aaaa", stages=2, microbatches=2, steps=2)
    write_run(tmp_path, "20260102-000000-bbbb", stages=2, microbatches=2, steps=3, first_step=2, closed=False)
    assert find_run(tmp_path).name == "20260102-000000-bbbb"
    assert traced(tmp_path)["otherData"]["steps"] == [3, 5]
    assert main(["trace", str(tmp_path), "--run", "20260101-000000-aaaa"]) == 0
    assert (tmp_path / "events" / "20260101-000000-aaaa" / "trace.json").is_file()


def test_ranks_without_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, stages=3, microbatches=4, steps=2)
    ring_path(folder, 1).unlink()
    assert main(["trace", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "ranks without spans are omitted: 1\n"
    trace = json.loads((folder / "trace.json").read_text())
    check_format(trace)
    assert "stage 2 (rank 2)" in names_of_tracks(trace).values()


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, stages=2, microbatches=2, steps=2)
    (folder / "trace.json").write_text("old")
    before = sorted(folder.iterdir())

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["trace", str(tmp_path)]) == 2
    assert (folder / "trace.json").read_text() == "old"
    assert sorted(folder.iterdir()) == before


def test_run_without_a_complete_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path, stages=2, microbatches=2, steps=2)
    for rank in range(2):
        ring_path(folder, rank).unlink()
    with pytest.raises(UserError, match="has no step that all its ranks have finished"):
        select_steps(load_spans(folder), range(0))
