"""The recordings of runs: spans of every rank, a journal, and consistent scalars."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.trainer_loop import Trainers, arguments
from tests.support.training import RECIPE, Run, train
from titan_async.config.device import ensure_device
from titan_async.monitor.events import RankReader, utilization_of
from titan_async.monitor.journal import JournalReader
from titan_async.monitor.run_folder import read_info, runs_in
from titan_async.monitor.spans import load_spans, select_steps, split_pairs
from titan_async.monitor.trace import trace_of
from titan_async.pipelining.recording import COMPUTE_KINDS, Kind

MICROBATCHES = 4


class Recorded(NamedTuple):
    folder: Path
    delayed: Run
    synchronous: Run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Eight delayed steps, then four synchronous ones from their checkpoint, in the same folder."""
    folder = tmp_path_factory.mktemp("recorded")
    common = ("--metrics.enable_tensorboard", "--metrics.log_freq", 2, "--checkpoint.interval", 4,
              "--training.gc_freq", 3)  # fmt: skip
    delayed = train(folder, "--training.steps", 8, "--validator.freq", 8, *common)
    synchronous = train(
        folder, "--training.steps", 12, "--validator.no-enable", *common,
        "--parallelism.pipeline_parallel_schedule", "1F1B", "--optimizer.error_feedback.no-enable",
    )  # fmt: skip
    assert (delayed.status, synchronous.status) == (0, 0), delayed.err + synchronous.err
    return Recorded(folder / "run", delayed, synchronous)


def records_of(folder: Path, rank: int) -> np.ndarray:
    return RankReader(folder, rank).new_records()


def of(records: np.ndarray, *kinds: Kind) -> np.ndarray:
    return records[np.isin(records["kind"], kinds)]


def test_each_run_has_its_own_record(recorded: Recorded) -> None:
    first, second = map(read_info, runs_in(recorded.folder))
    assert (first.schedule, first.first_step, first.steps) == ("Async2BW", 0, 8)
    assert (second.schedule, second.first_step, second.steps) == ("1F1B", 8, 12)
    for info in (first, second):
        assert (info.stages, info.ranks, info.microbatches) == (2, ((0,), (1,)), MICROBATCHES)
        assert (info.device, info.log_every, info.tokens_per_step) == ("cpu", 2, 8 * 64)
        assert {"torch", "torchtitan", "titan_async"} == set(info.versions)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_spans_of_a_delayed_run(recorded: Recorded, rank: int) -> None:
    records = records_of(runs_in(recorded.folder)[0], rank)
    steps = [(step, micro) for step in range(1, 9) for micro in range(MICROBATCHES)]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        spans = of(records, kind)
        assert list(zip(spans["batch"], spans["microbatch"], strict=True)) == steps
        # Step b + 1 trains on batch b, which reads the weights of max(b - 1, 0) updates.
        assert spans["version"].tolist() == [max(step - 2, 0) for step, _ in steps]
    assert of(records, Kind.STEP)["batch"].tolist() == list(range(1, 9))
    # Eight updates for eight batches: two in steps 4 and 8, for a checkpoint, and none in step 1.
    assert of(records, Kind.OPTIMIZER)["batch"].tolist() == [2, 3, 4, 4, 6, 7, 8, 8]
    assert of(records, Kind.SAVE)["batch"].tolist() == [4, 8]
    assert of(records, Kind.VALIDATE)["batch"].tolist() == [8]
    for kind in (Kind.DATA, Kind.GATHER, Kind.REDUCE):
        assert len(of(records, kind)) == 8, kind
    assert len(of(records, Kind.RECEIVE)) == 8 * MICROBATCHES


@pytest.mark.parametrize("rank", [0, 1])
def test_garbage_collection_is_recorded(recorded: Recorded, rank: int) -> None:
    records = records_of(runs_in(recorded.folder)[0], rank)
    collections, steps = of(records, Kind.GARBAGE_COLLECTION), of(records, Kind.STEP)
    assert collections["batch"].tolist() == [3, 6] and set(collections["depth"]) == {0}
    for span in collections:
        before, after = (steps[steps["batch"] == span["batch"] + n][0] for n in (-1, 0))
        assert before["end"] <= span["start"] < span["end"] <= after["start"]
    # A resumed run records from its first step on, which is step 9 here.
    later = records_of(runs_in(recorded.folder)[1], rank)
    assert of(later, Kind.GARBAGE_COLLECTION)["batch"].tolist() == [12]


@pytest.mark.parametrize("run", [0, 1], ids=["delayed", "synchronous"])
@pytest.mark.parametrize("rank", [0, 1])
def test_spans_lie_within_their_step_and_beside_each_other(recorded: Recorded, run: int, rank: int) -> None:
    records = records_of(runs_in(recorded.folder)[run], rank)
    assert (records["end"] >= records["start"]).all()
    inner, steps = records[records["depth"] == 1], of(records, Kind.STEP)
    assert (steps["depth"] == 0).all()
    assert (inner["end"][:-1] <= inner["start"][1:]).all()
    owner = np.searchsorted(steps["start"], inner["start"], side="right") - 1
    assert (inner["end"] <= steps["end"][owner]).all()
    in_step = np.isin(inner["kind"], [*COMPUTE_KINDS, Kind.CLIP, Kind.DATA])
    # A step runs the rest of the batch before too.
    assert ((steps["batch"][owner] - inner["batch"])[in_step] <= 1).all()


def test_a_wait_ends_after_the_message_was_sent(recorded: Recorded) -> None:
    folder = runs_in(recorded.folder)[0]
    first, last = records_of(folder, 0), records_of(folder, 1)
    sent, waited = of(first, Kind.FORWARD), of(last, Kind.RECEIVE)
    # Ranks of a host share its clock: no forward's input arrives before it was computed.
    assert (waited["end"] > sent["end"]).all()
    returned = of(last, Kind.BACKWARD)
    assert (of(first, Kind.RECEIVE)["end"] > returned["end"]).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_spans_of_torchs_own_schedule(recorded: Recorded, rank: int) -> None:
    records = records_of(runs_in(recorded.folder)[1], rank)
    steps = [(step, micro) for step in range(9, 13) for micro in range(MICROBATCHES)]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        spans = of(records, kind)
        assert list(zip(spans["batch"], spans["microbatch"], strict=True)) == steps
        assert spans["version"].tolist() == [step - 1 for step, _ in steps]
    assert of(records, Kind.OPTIMIZER)["batch"].tolist() == [9, 10, 11, 12]
    assert len(of(records, Kind.RECEIVE)) >= 4 * MICROBATCHES
    if rank == 0:  # 1F1B on two stages: two forwards before the first backward
        order = of(records, Kind.FORWARD, Kind.BACKWARD)["kind"][: 2 * MICROBATCHES].tolist()
        assert order == [2, 2, 3, 2, 3, 2, 3, 3]


def test_the_journal_has_the_lines_of_the_terminal(recorded: Recorded) -> None:
    entries = JournalReader(runs_in(recorded.folder)[0]).new_entries()
    of_kind = lambda kind: [entry for entry in entries if entry["kind"] == kind]  # noqa: E731
    assert [entry["text"] for entry in of_kind("log")] == recorded.delayed.out.splitlines()
    steps = of_kind("step")
    assert [entry["step"] for entry in steps] == [1, 2, 4, 6, 8] == recorded.delayed.steps
    assert [entry["loss"] for entry in steps] == pytest.approx(recorded.delayed.losses, abs=1e-4)
    assert steps[0]["grad_norm"] is None and steps[1]["grad_norm"] > 0
    assert all(entry["mfu"] is None and entry["skipped"] == 0 for entry in steps)
    assert [entry["loss"] for entry in of_kind("validation")] == pytest.approx(
        recorded.delayed.validation_losses, abs=1e-4
    )
    assert [entry["step"] for entry in of_kind("checkpoint")] == [4, 8]
    assert entries[-1]["kind"] == "end" and entries[-1]["reason"] == "finished"


@pytest.mark.parametrize("run", [0, 1], ids=["delayed", "synchronous"])
def test_summaries_agree_with_spans_and_scalars(recorded: Recorded, run: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = runs_in(recorded.folder)[run]
    info = read_info(folder)
    entries = [e for e in JournalReader(folder).new_entries() if e["kind"] == "step"]
    assert len(entries) == len(RankReader(folder, 0).summaries()) > 1
    for rank in (0, 1):
        records = records_of(folder, rank)
        for row, entry in zip(RankReader(folder, rank).summaries(), entries, strict=True):
            assert row["last_step"] == entry["step"]
            steps = of(records, Kind.STEP)
            steps = steps[(steps["batch"] >= row["first_step"]) & (steps["batch"] <= row["last_step"])]
            compute = of(records, *COMPUTE_KINDS)
            inside = sum(
                int(span["end"] - span["start"])
                for span in compute
                if any(step["start"] <= span["start"] <= step["end"] for step in steps)
            )
            share = inside / int((steps["end"] - steps["start"]).sum())
            assert utilization_of(np.array([row]))[rank] == pytest.approx(share, abs=1e-4)
            assert entry["utilization"][rank] == pytest.approx(share, abs=1e-4)
    boards = [EventAccumulator(str(path)).Reload() for path in (recorded.folder / "tb").rglob("events.out.*")]
    (board,) = (board for board in boards if board.Scalars("grad_norm")[-1].step == info.steps)
    scalars = {tag: [each.value for each in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    for stage in (0, 1):
        assert scalars[f"pipeline/utilization/{stage}"] == pytest.approx(
            [entry["utilization"][stage] for entry in entries]
        )
    assert scalars["pipeline/bubble"] == pytest.approx([1 - sum(e["utilization"]) / 2 for e in entries])
    assert set(scalars["skipped_updates"]) == {0}
    if info.schedule == "Async2BW":
        assert scalars["pipeline/delay"] == [0, 0, 1, 1, 1]
        assert min(scalars["error_feedback/norm"][1:]) > 0
    else:
        assert not {"pipeline/delay", "error_feedback/norm"} & scalars.keys()


def test_the_spans_of_overlapped_pairs(runs: Trainers, tmp_path: Path) -> None:
    """Of six steps, whose pipeline drains three times."""
    runs(2, arguments(tmp_path, "tiny_llama", "--pipeline.overlap"))
    (folder,) = runs_in(tmp_path)
    run = load_spans(folder)
    assert run.info.overlap and not (tmp_path / "measured.json").exists()
    steps = [(step, micro) for step in range(1, run.info.steps + 1) for micro in range(MICROBATCHES)]
    for spans, in_flight in zip(run.ranks, (3, 1), strict=True):
        pairs = spans.of_kind(Kind.OVERLAP)
        assert len(pairs) == len(steps) - 3 * in_flight
        split, _ = split_pairs(spans.records, run.info)
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            found = of(split, kind)
            assert list(zip(found["batch"], found["microbatch"], strict=True)) == steps
            assert found["version"].tolist() == [max(step - 2, 0) for step, _ in steps]
        rows = RankReader(folder, spans.rank).summaries()
        assert rows["seconds"][:, Kind.OVERLAP].sum() == pytest.approx(
            (pairs["end"] - pairs["start"]).sum() / 1e9, rel=1e-4
        )
        assert all(0 < utilization_of(row)[spans.rank] <= 1 for row in np.split(rows, len(rows)))
    assert trace_of(select_steps(run, run.steps))[1] == 0  # no arrow leads back in time


@pytest.mark.slow
def test_one_stage_records_whole_passes(tmp_path: Path) -> None:
    run = train(
        tmp_path, "--training.steps", 3, "--parallelism.pipeline_parallel_degree", 1,
        "--validator.no-enable", "--checkpoint.no-enable", "--training.global_batch_size", 16,
    )  # fmt: skip
    assert run.status == 0, run.err
    (folder,) = runs_in(tmp_path / "run")
    info, records = read_info(folder), records_of(folder, 0)
    assert (info.schedule, info.stages, info.microbatches) == ("none", 1, 2)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        spans = of(records, kind)
        assert spans["batch"].tolist() == [1, 1, 2, 2, 3, 3]
        assert spans["microbatch"].tolist() == [0, 1] * 3


def test_a_run_continues_if_recording_fails(tmp_path: Path) -> None:
    """A folder that cannot be made is a line on stderr; a model that cannot be exported one on stdout."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events").write_text("no folder")
    (tmp_path / "mixed.toml").write_text('recipe = "tiny_mixed"')
    blocked = train(
        tmp_path, "--training.steps", 1, "--parallelism.pipeline_parallel_degree", 1,
        "--validator.no-enable", "--module", "tests.support.recipes", recipe="mixed.toml",
    )  # fmt: skip
    assert (blocked.status, blocked.steps) == (0, [1]), blocked.err
    lines = blocked.out.splitlines()
    assert re.match("the model .* cannot be written .*; titan-async convert will refuse its", lines[1])
    assert lines[2].startswith("one stage: no delay, no feedback")
    assert any(line.startswith("step 1/1") for line in lines[3:])
    assert blocked.err.count("rank 0 no longer records events") == 1
    assert (tmp_path / "run" / "events").is_file()


def test_no_events_turns_recording_off(tmp_path: Path) -> None:
    from titan_async.config.recipe_file import resolve

    config = resolve([str(RECIPE), "--monitor.no-events", "--dump_folder", str(tmp_path)])
    ensure_device()
    from titan_async.training.telemetry.recording import Recording

    recording, trainer = Recording(), SimpleNamespace(config=config)
    recording.before_first_step(trainer)
    with recording.record_pass(0, 0), recording.span(Kind.STEP, 1):
        pass
    recording.end_interval(1)
    assert recording.utilization() == {}
    recording.after_training(trainer, "finished")
    assert list(tmp_path.iterdir()) == []
