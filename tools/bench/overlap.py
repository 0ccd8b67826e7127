"""How much of the experts' messages overlapped pairs hide, and what a pair costs where there is none to hide.

    python tools/bench/overlap.py [--quick] [--only sleeping,computing] [--experts 1] [--json results.json]

A rank has two layers like those of a mixture of experts, each with two all-to-alls.

- "sleeping": layers sleep, and each message takes a set time over gloo between the expert-parallel ranks of a
  stage, of which there are two. Sleeping takes no processor, so that there may be more processes than cores;
  `--experts 1` leaves out the work of the messages themselves.
- "computing": matrix products, and messages that take what they take. On few cores they compete with the
  computation for the processor; what is hidden is reported, whatever it is.

All schedules are measured in one run, by turns; figures are medians of the repetitions. The exit status is 1
if a floor is missed, as it is on busy cores: of messages that take half as long as the computation at least
80 % hidden at every shape, and without latency at most 3 % lost, both against Async2BW without overlap.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# In the workers too, which inherit it: one thread each, before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from _dualpipe import overlap_pairs
from _experts import DelayedExchange, computing_stage, sleeping_stage
from _pipelines import SCHEDULES, Pipeline, build_pipeline
from _pool import Pool
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from sleeping import BACKWARD_SECONDS, FORWARD_SECONDS, Clock

import titan_async

PARTS = ["sleeping", "computing"]
SHAPES = [(2, 4), (4, 8)]
"""Stages and microbatches."""
COMPUTING_SHAPES = [(1, 4), (2, 4)]
COMPARED = {
    "1F1B": "1F1B",
    "ZBVZeroBubble": "ZBVZeroBubble",
    "DualPipeV": "DualPipeV",
    "DualPipeV, overlapped": "DualPipeV",
    "Async2BW": "Async2BW",
    "Async2BW, overlapped": "Async2BW",
}
"""What is compared, and its name in `SCHEDULES`. torch itself runs DualPipeV's pairs one after the other."""

LAYERS = 2
"""Of a rank, in all its stages together."""
SCALE = 0.5
"""Of the sleeps of `SleepingStage`, of which a layer has two: 10 ms forward, 20 ms backward."""
COMPUTATION = 2 * LAYERS * SCALE * (FORWARD_SECONDS + BACKWARD_SECONDS)
"""Seconds that a rank sleeps for a microbatch."""
MESSAGES = 4 * LAYERS
"""All-to-alls of a rank for a microbatch, forward and backward."""
HALF = COMPUTATION / 2 / MESSAGES
"""Seconds of a message if all messages together take half as long as the computation."""
HIDDEN, LOST = 0.80, 0.03

_SLEEPING_WIDTH, _WIDTH, _ROWS = 8, 256, 1024
_WARMUP_MICROBATCHES = 8


@dataclass
class Case:
    """One schedule at one shape."""

    schedule: str
    stages: int
    microbatches: int
    experts: int
    """Ranks over which a stage's experts are spread."""
    latency: float | None
    """Seconds of each message; None if the layers really compute and send."""
    seconds: list[float] = field(default_factory=list)
    """For a microbatch; empty where the schedule cannot run."""

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def key(self) -> tuple:
        """Of its pipeline, which delays messages by any latency."""
        return self.schedule, self.stages, self.microbatches, self.latency is None


_kept: dict[tuple, Pipeline] = {}
"""In a worker: the pipelines that have been built and warmed up."""
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""In a worker, by their ranks."""


def _connect(rank: int, group: dist.ProcessGroup, shapes: list[tuple[int, int]], experts: int) -> None:
    """Make the groups of all pipelines and stages, on all ranks."""
    for stages, _ in shapes:
        of_pipelines = [tuple(range(each, experts * stages, experts)) for each in range(experts)]
        of_stages = [tuple(range(experts * each, experts * (each + 1))) for each in range(stages)]
        for ranks in (*of_pipelines, *of_stages):
            if ranks not in _groups:
                _groups[ranks] = dist.new_group(list(ranks))


def _groups_of(rank: int, case: Case) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of a rank's pipeline, and of its stage."""
    first, experts = rank - rank % case.experts, case.experts
    of_pipeline = tuple(range(rank % experts, experts * case.stages, experts))
    return _groups[of_pipeline], _groups[tuple(range(first, first + experts))]


def _prepare(rank: int, group: dist.ProcessGroup, case: Case) -> bool:
    """Build a pipeline and warm it up; whether it can run."""
    pipeline_group, stage_group = _groups_of(rank, case)
    name = COMPARED[case.schedule]
    layers = LAYERS // SCHEDULES[name].stages_per_rank
    if case.latency is None:
        rows, width = _ROWS, _WIDTH
    else:
        rows, width = case.experts, _SLEEPING_WIDTH
    batch = (torch.ones(case.microbatches * rows, width), torch.zeros(case.microbatches * rows, width))

    def make_modules(indices: list[int], _: int) -> Iterator[torch.nn.Module]:
        for index in indices:
            torch.manual_seed(index)
            if case.latency is None:
                yield computing_stage(layers, width, stage_group)
            else:
                yield sleeping_stage(layers, Clock(SCALE), stage_group, 0.0)

    overlapped = case.schedule.endswith("overlapped")
    options = {"overlap": True} if overlapped and name == "Async2BW" else {}
    pipeline = build_pipeline(name, pipeline_group, case.microbatches, make_modules, batch, **options)
    if pipeline is None:
        return False
    if overlapped and name == "DualPipeV":
        overlap_pairs(pipeline.schedule)
    pipeline.warm_up()
    _kept[case.key] = pipeline
    return True


def _repeat(rank: int, group: dist.ProcessGroup, case: Case, microbatches: int) -> float:
    """Seconds for a microbatch on this rank, of so many or more after the warm-up.

    A barrier comes before the warm-up only: in a steady state Async2BW's stages are at different points of
    the batch, and one in the middle would empty the pipeline.
    """
    pipeline = _kept[case.key]
    for stage in pipeline.stages:
        for module in stage.submod.modules():
            if isinstance(module, DelayedExchange):
                module.latency = case.latency
    dist.barrier(group)
    if case.schedule.startswith("Async2BW"):
        for _ in range(-(-_WARMUP_MICROBATCHES // case.microbatches)):
            pipeline.train_step()
    steps = -(-microbatches // case.microbatches)
    start = time.perf_counter()
    for _ in range(steps):
        pipeline.train_step()
    seconds = time.perf_counter() - start
    pipeline.finish()
    return seconds / steps / case.microbatches


def _messages(rank: int, group: dist.ProcessGroup, case: Case, count: int) -> float:
    """Seconds for the messages of a microbatch that nothing overlaps, where all ranks send at once."""
    _, stage_group = _groups_of(rank, case)
    stage = computing_stage(1, _WIDTH, stage_group)
    x = torch.ones(_ROWS, _WIDTH)
    exchange = stage[0].exchange
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(count * MESSAGES):
        exchange(x)
    return (time.perf_counter() - start) / count


def _forget(rank: int, group: dist.ProcessGroup) -> None:
    _kept.clear()


def _measure(pool: Pool, cases: list[Case], arguments: argparse.Namespace) -> None:
    """Fill in the repetitions of `cases`, which share ranks, by turns."""
    ranks = cases[0].stages * cases[0].experts
    prepared = {case.key: case for case in cases}
    runnable = {key for key, case in prepared.items() if all(pool.run(ranks, _prepare, case))}
    for repetition in range(arguments.repeats):
        for case in cases:
            has_floor = case.schedule.startswith("Async2BW")
            if case.key in runnable and (has_floor or not (arguments.quick and repetition)):
                case.seconds.append(max(pool.run(ranks, _repeat, case, 16)))
    pool.run(ranks, _forget)


def _by_schedule(cases: list[Case], **of_case: Any) -> dict[str, float | None]:
    chosen = [case for case in cases if all(getattr(case, name) == value for name, value in of_case.items())]
    return {case.schedule: case.median for case in chosen}


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def _sleeping(pool: Pool, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Table], bool]:
    cases: list[Case] = []
    for stages, microbatches in SHAPES:
        of_shape = [
            Case(name, stages, microbatches, arguments.experts, latency)
            for latency in (0.0, HALF)
            for name in COMPARED
        ]
        _measure(pool, of_shape, arguments)
        cases += of_shape
    table = Table(
        title=f"ms a microbatch, of which {_milliseconds(COMPUTATION)} asleep; messages after the colon",
        box=SIMPLE_HEAD,
    )
    floors = Table("stages, m", "hidden", "at least", "lost without latency", "at most", box=SIMPLE_HEAD)
    columns = []
    floors_of, met = [], True
    table.add_column("schedule")
    for stages, microbatches in SHAPES:
        shape = f"{stages}, {microbatches}"
        free = _by_schedule(cases, stages=stages, latency=0.0)
        delayed = _by_schedule(cases, stages=stages, latency=HALF)
        columns += [free, delayed]
        for latency in (0.0, HALF):
            table.add_column(f"{shape}: {_milliseconds(MESSAGES * latency)}", justify="right")
        hidden = (delayed["Async2BW"] - delayed["Async2BW, overlapped"]) / (MESSAGES * HALF)
        lost = free["Async2BW, overlapped"] / free["Async2BW"] - 1
        floors.add_row(shape, f"{hidden:.1%}", f"{HIDDEN:.0%}", f"{lost:+.1%}", f"{LOST:.0%}")
        floors_of.append({"stages": stages, "microbatches": microbatches, "hidden": hidden, "lost": lost})
        met = met and hidden >= HIDDEN and lost <= LOST
    for name in COMPARED:
        table.add_row(name, *(_milliseconds(column[name]) for column in columns))
    return {"cases": _records(cases), "floors": floors_of}, [table, floors], met


def _computing(pool: Pool, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Table], bool]:
    size = _ROWS * _WIDTH * 4 / 2**20
    table = Table(
        "stages, m", "Async2BW", "overlapped", "its messages alone", "hidden", box=SIMPLE_HEAD,
        title=f"ms a microbatch that is computed, with {MESSAGES} real messages of {size:.0f} MiB",
    )  # fmt: skip
    cases: list[Case] = []
    shares = []
    for stages, microbatches in COMPUTING_SHAPES:
        names = ("Async2BW", "Async2BW, overlapped")
        of_shape = [Case(name, stages, microbatches, arguments.experts, None) for name in names]
        _measure(pool, of_shape, arguments)
        alone = max(pool.run(stages * arguments.experts, _messages, of_shape[0], 8))
        one_by_one, together = (case.median or 0.0 for case in of_shape)
        hidden = (one_by_one - together) / alone
        table.add_row(
            f"{stages}, {microbatches}",
            *(f"{1e3 * seconds:.1f}" for seconds in (one_by_one, together, alone)),
            f"{hidden:.0%}",
        )
        cases += of_shape
        shares.append({"stages": stages, "microbatches": microbatches, "messages": alone, "hidden": hidden})
    return {"cases": _records(cases), "shares": shares}, [table], True


def _records(cases: list[Case]) -> list[dict[str, Any]]:
    return [{**asdict(case), "median": case.median} for case in cases]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    parser.add_argument("--repeats", type=int, help="repetitions of each case (default: 5; 3 if --quick)")
    parser.add_argument("--experts", type=int, default=2, help="ranks of a stage (default: 2)")
    parser.add_argument("--quick", action="store_true", help="schedules without a floor only once")
    parser.add_argument("--json", type=Path, help="file for every repetition and median")
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    unknown = sorted(set(arguments.only) - set(PARTS))
    if unknown:
        parser.error(f"--only {','.join(unknown)}: the parts are {', '.join(PARTS)}")
    arguments.repeats = arguments.repeats or (3 if arguments.quick else 5)
    return arguments


def main() -> int:
    arguments = _arguments()
    shapes = {"sleeping": SHAPES, "computing": COMPUTING_SHAPES}
    measured = sorted({shape for part in arguments.only for shape in shapes[part]})
    sizes = sorted({stages * arguments.experts for stages, _ in measured})
    record: dict[str, Any] = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "titan_async": titan_async.__version__},
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(),
                    "load_before": os.getloadavg()},
        "repeats": arguments.repeats,
        "experts": arguments.experts,
        "parts": {},
    }  # fmt: skip
    console = Console(width=max(Console().width, 140))  # also into a file
    start = time.monotonic()
    met = True
    with Pool(sizes) as pool:
        pool.run(sizes[-1], _connect, measured, arguments.experts)
        for part, measure in (("sleeping", _sleeping), ("computing", _computing)):
            if part in arguments.only:
                record["parts"][part], tables, fine = measure(pool, arguments)
                for table in tables:
                    console.print(table)
                met = met and fine
    load = record["machine"]["load_before"][0]
    console.print(f"{time.monotonic() - start:.0f} s, load average before {load:.1f}")
    if not met:
        console.print("a floor is missed")
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
