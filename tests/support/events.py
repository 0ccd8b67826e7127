"""Event files of a simulated run."""

import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from titan_async.monitor.events import BURST, RECORD, SUMMARY, EventWriter
from titan_async.monitor.journal import Journal
from titan_async.monitor.run_folder import RunInfo, events_folder, write_info
from titan_async.pipelining.programs import schedule_programs, stages_of_ranks
from titan_async.pipelining.recording import Kind
from titan_async.pipelining.simulation import Task, Timing, simulate

__all__ = ["kind_of", "write_run"]

_KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
    "G": Kind.GATHER,
    "R": Kind.REDUCE,
    "U": Kind.OPTIMIZER,
}


def kind_of(task: Task) -> Kind:
    """The kind of event for a task."""
    return Kind.OVERLAP if task.overlapped else _KINDS[task.kind]


def write_run(
    run_dir: Path,
    run_id: str = "20260101-000000-aaaa",
    *,
    schedule: str = "Async2BW",
    overlap: bool = False,
    stages: int = 4,
    microbatches: int = 8,
    steps: int = 12,
    first_step: int = 0,
    forward: float = 0.02,
    slow_stage: int | None = None,
    losses: bool = True,
    closed: bool = True,
    started: float | None = None,
    synchronous_steps: int = 0,
) -> Path:
    """Writes a run's files and returns its folder of events.

    A forward takes `forward` seconds and a backward twice that; `slow_stage` takes 1.5 times as long. Ranks
    that are idle before a forward or backward in the simulation wait (RECEIVE). With `closed` false the files
    are those of a running run. With `synchronous_steps` every step drains the pipeline.
    """
    ranks = stages_of_ranks(schedule, stages)
    total = sum(map(len, ranks))
    scale = [1.5 if stage == slow_stage else 1.0 for stage in range(total)]
    timing = Timing(
        forward=[forward * s for s in scale],
        backward=[2 * forward * s for s in scale],
        latency=forward / 20,
        update=[forward / 2] * total,
        reduction=[forward / 10] * total,
        gather=[forward / 20] * total,
    )
    programs = schedule_programs(
        schedule, stages, microbatches, steps, overlap=overlap, drains=synchronous_steps > 0
    )
    run = simulate(programs, timing)
    started = time.time() - run.makespan if started is None else started
    folder = events_folder(run_dir, run_id)
    folder.mkdir(parents=True)
    info = RunInfo(
        run_id=run_id,
        model="llama3 tiny",
        started=started,
        host="localhost",
        pid=1,
        first_step=first_step,
        steps=first_step + steps,
        log_every=2,
        schedule=schedule,
        microbatches=microbatches,
        lookahead=0,
        overlap=overlap,
        stages=total,
        ranks=tuple(map(tuple, ranks)),
        synchronous_steps=synchronous_steps,
        tokens_per_step=2048,
        device="cpu",
        versions={"torch": "2.14.1"},
    )
    write_info(folder, info)

    def ns(seconds: float) -> int:
        return int((started + seconds) * 1e9)

    for rank, spans in enumerate(run.timelines):
        records, free = [], 0.0
        step_begins = 0.0
        for task, start, end in spans:
            version = max(first_step + task.batch - 1, 0)
            if schedule != "Async2BW":
                version = first_step + task.batch
            batch = first_step + task.batch + 1
            if task.kind in "FBIW" and start > free:
                records.append(
                    (ns(free), ns(start), batch, task.microbatch, version, task.stage, Kind.RECEIVE, 1)
                )
            micro = task.microbatch if task.kind in "FBIW" else -1
            records.append((ns(start), ns(end), batch, micro, version, task.stage, kind_of(task), 1))
            free = end
            if task.kind == "U" and task.stage == ranks[rank][-1]:
                records.append((ns(step_begins), ns(end), batch, -1, -1, ranks[rank][0], Kind.STEP, 0))
                step_begins = end
        array = np.array(records, RECORD)
        writer = EventWriter(folder, rank)
        for i in range(0, len(array), BURST):
            writer.write(array[i : i + BURST])
            writer.write_state(np.zeros(1, RECORD), (200 << 20, 300 << 20, 0))
        writer.write_summary(_summaries(array, info, rank))
        writer.write_state(np.zeros(1, RECORD), (200 << 20, 300 << 20, 0), closed=closed)
        writer.close()

    journal = Journal(folder)
    journal.write("log", text=f"training llama3 tiny on {stages} stages under {schedule}")
    for step in range(first_step + 2, first_step + steps + 1, 2):
        journal.write(
            "step", step=step, loss=6.0 / (1 + step / 20) if losses else float("nan"), grad_norm=1.0,
            tokens_per_second=2048 * steps / run.makespan, learning_rate=1e-3 * (1 - step / (2 * info.steps)),
            skipped=0, mfu=None, utilization=[busy / run.makespan for busy in run.busy],
        )  # fmt: skip
        journal.write("log", text=f"step {step}/{info.steps}  loss {6.0 / (1 + step / 20):7.4f}")
    journal.write("checkpoint", step=info.steps, seconds=0.5)
    if closed:
        journal.write("end", reason="finished")
    journal.close()
    return folder


def _summaries(records: np.ndarray, info: RunInfo, rank: int) -> np.ndarray:
    """Summaries of two steps each, computed from the records."""
    steps = records[records["kind"] == Kind.STEP]
    rows = []
    for i in range(0, len(steps), 2):
        pair = steps[i : i + 2]
        start, end = int(pair["start"][0]), int(pair["end"][-1])
        inside = records[
            (records["start"] >= start) & (records["end"] <= end) & (records["kind"] != Kind.STEP)
        ]
        for stage in info.ranks[rank]:
            seconds: dict[int, float] = defaultdict(float)
            for record in inside[inside["stage"] == stage]:
                seconds[int(record["kind"])] += (int(record["end"]) - int(record["start"])) / 1e9
            idle = sum(int(s["end"] - s["start"]) for s in pair) / 1e9 - sum(
                (int(r["end"]) - int(r["start"])) / 1e9 for r in inside
            )
            if stage == info.ranks[rank][0]:
                seconds[Kind.IDLE] = max(idle, 0.0)
            row = np.zeros(1, SUMMARY)
            row["first_step"], row["last_step"] = pair["batch"][0], pair["batch"][-1]
            row["start"], row["end"], row["stage"] = start, end, stage
            row["seconds"][0] = [seconds[kind] for kind in Kind]
            rows.append(row)
    return np.concatenate(rows) if rows else np.empty(0, SUMMARY)
