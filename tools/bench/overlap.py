"""The fraction of experts' messages that overlapped pairs hide, and their overhead without latency.

    python tools/bench/overlap.py [--quick] [--only sleeping,computing] [--experts 1] [--json results.json]

A rank has two layers like those of an MoE model, each with two all-to-alls.

- "sleeping": layers sleep, and each message over gloo between the two expert-parallel ranks of a stage has a
  fixed latency. Sleeping needs no processor, so there can be more processes than cores; `--experts 1` removes
  the work of the messages themselves.
- "computing": matrix products and real messages. On few cores they compete for the processor; the hidden
  fraction is only reported.

All schedules are measured alternately in one run; figures are medians of the repetitions. The exit status is
1 if a bound is missed, as it may be on busy cores: relative to Async2BW without overlap, at least 80 % of
messages that take half as long as the computation are hidden, and without latency at most 3 % is lost.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from _dualpipe import overlap_pairs
from _experts import DelayedExchange, computing_stage, sleeping_stage
from _harness import Bench, Measured, median, record_of, table
from _pipelines import KEPT, SCHEDULES, build_pipeline, forget, time_steps
from _pool import Pool
from sleeping import BACKWARD_SECONDS, FORWARD_SECONDS, Clock, warm_up_steps

BENCH = Bench(__doc__, repeats=5, quick="schedules without a bound only once", quick_repeats=3)
BENCH.add_argument("--experts", type=int, default=2, help="ranks per stage (default: 2)")
BENCH.add_argument("--stages", type=int, choices=(2, 4), help="stages per pipeline (default: all shapes)")

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
"""Schedules and their names in `SCHEDULES`. torch itself runs DualPipeV's pairs one after the other."""

LAYERS = 2
"""Per rank, over all its stages."""
SCALE = 0.5
"""Scale of the sleeps of `SleepingStage`: a layer has two, of 10 ms forward and 20 ms backward."""
COMPUTATION = 2 * LAYERS * SCALE * (FORWARD_SECONDS + BACKWARD_SECONDS)
"""Seconds that a rank sleeps for a microbatch."""
MESSAGES = 4 * LAYERS
"""All-to-alls of a rank for a microbatch, forward and backward."""
HALF = COMPUTATION / 2 / MESSAGES
"""Seconds of a message if all messages together take half as long as the computation."""
HIDDEN, LOST = 0.80, 0.03

_SLEEPING_WIDTH, _WIDTH, _ROWS = 8, 256, 1024


@dataclass
class Case:
    """One schedule at one shape."""

    schedule: str
    stages: int
    microbatches: int
    experts: int
    """Expert-parallel degree."""
    latency: float | None
    """Seconds of each message; None for layers that compute and send real messages."""
    seconds: list[float] = field(default_factory=list)
    """Per microbatch; empty if the schedule cannot run."""

    @property
    def median(self) -> float | None:
        return median(self.seconds)

    def key(self) -> tuple:
        """The key of its pipeline, which is the same for all latencies."""
        return self.schedule, self.stages, self.microbatches, self.latency is None


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""In a worker: process groups by their ranks."""


def _connect(rank: int, group: dist.ProcessGroup, shapes: list[tuple[int, int]], experts: int) -> None:
    """Creates the groups of all pipelines and stages, on all ranks."""
    for stages, _ in shapes:
        of_pipelines = [tuple(range(each, experts * stages, experts)) for each in range(experts)]
        of_stages = [tuple(range(experts * each, experts * (each + 1))) for each in range(stages)]
        for ranks in (*of_pipelines, *of_stages):
            if ranks not in _groups:
                _groups[ranks] = dist.new_group(list(ranks))


def _groups_of(rank: int, case: Case) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups of a rank's pipeline and of its stage."""
    first, experts = rank - rank % case.experts, case.experts
    of_pipeline = tuple(range(rank % experts, experts * case.stages, experts))
    return _groups[of_pipeline], _groups[tuple(range(first, first + experts))]


def _prepare(rank: int, group: dist.ProcessGroup, case: Case) -> bool:
    """Builds a pipeline and warms it up; returns whether it can run."""
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
    KEPT[case.key()] = pipeline
    return True


def _repeat(rank: int, group: dist.ProcessGroup, case: Case, microbatches: int) -> float:
    """Seconds per microbatch on this rank, over at least `microbatches` after the warm-up."""
    pipeline = KEPT[case.key()]
    for stage in pipeline.stages:
        for module in stage.submod.modules():
            if isinstance(module, DelayedExchange):
                module.latency = case.latency
    dist.barrier(group)
    warm_up = warm_up_steps(case.microbatches) if case.schedule.startswith("Async2BW") else 0
    return time_steps(pipeline, -(-microbatches // case.microbatches), warm_up) / case.microbatches


def _messages(rank: int, group: dist.ProcessGroup, case: Case, count: int) -> float:
    """Seconds per microbatch of its messages alone, while all ranks send."""
    _, stage_group = _groups_of(rank, case)
    stage = computing_stage(1, _WIDTH, stage_group)
    x = torch.ones(_ROWS, _WIDTH)
    exchange = stage[0].exchange
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(count * MESSAGES):
        exchange(x)
    return (time.perf_counter() - start) / count


def _chosen(bench: Bench, shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    only = bench.arguments.stages
    return [shape for shape in shapes if only in (None, shape[0])]


def _connected(bench: Bench, shapes: list[tuple[int, int]]) -> Pool:
    """The processes, with the groups of all pipelines and stages."""
    bench.pool.run(bench.pool.ranks, _connect, shapes, bench.arguments.experts)
    return bench.pool


def _sizes(bench: Bench, shapes: list[tuple[int, int]]) -> set[int]:
    return {stages * bench.arguments.experts for stages, _ in _chosen(bench, shapes)}


def _measure(pool: Pool, cases: list[Case], bench: Bench) -> None:
    """Measures `cases`, which have the same ranks, alternately."""
    ranks = cases[0].stages * cases[0].experts
    prepared = {case.key(): case for case in cases}
    runnable = {key for key, case in prepared.items() if all(pool.run(ranks, _prepare, case))}
    for repetition in range(bench.repeats):
        for case in cases:
            has_bound = case.schedule.startswith("Async2BW")
            if case.key() in runnable and (has_bound or not (bench.quick and repetition)):
                case.seconds.append(max(pool.run(ranks, _repeat, case, 16)))
    pool.run(ranks, forget)


def _by_schedule(cases: list[Case], **of_case: Any) -> dict[str, float | None]:
    chosen = [case for case in cases if all(getattr(case, name) == value for name, value in of_case.items())]
    return {case.schedule: case.median for case in chosen}


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


@BENCH.part("sleeping", lambda bench: _sizes(bench, SHAPES))
def _sleeping(bench: Bench) -> Measured:
    shapes, cases, columns, floors = _chosen(bench, SHAPES), [], {}, []
    pool = _connected(bench, shapes)
    for stages, m in shapes:
        of_shape = [
            Case(name, stages, m, bench.arguments.experts, latency)
            for latency in (0.0, HALF)
            for name in COMPARED
        ]
        _measure(pool, of_shape, bench)
        cases += of_shape
        free, delayed = (_by_schedule(of_shape, latency=latency) for latency in (0.0, HALF))
        columns[f"{stages}, {m}: 0"] = free
        columns[f"{stages}, {m}: {_milliseconds(MESSAGES * HALF)}"] = delayed
        hidden = (delayed["Async2BW"] - delayed["Async2BW, overlapped"]) / (MESSAGES * HALF)
        lost = free["Async2BW, overlapped"] / free["Async2BW"] - 1
        floors.append({"stages": stages, "microbatches": m, "hidden": hidden, "lost": lost})
    times = table(
        f"ms per microbatch, including {_milliseconds(COMPUTATION)} of sleep; after the colon: messages",
        {
            "schedule": str,
            **{
                heading: lambda name, found=found: _milliseconds(found[name])
                for heading, found in columns.items()
            },
        },
        COMPARED,
    )
    bounds = table(
        "Bounds",
        {
            "stages, m": lambda floor: f"{floor['stages']}, {floor['microbatches']}",
            "hidden": lambda floor: f"{floor['hidden']:.1%}",
            "at least": lambda floor: f"{HIDDEN:.0%}",
            "lost without latency": lambda floor: f"{floor['lost']:+.1%}",
            "at most": lambda floor: f"{LOST:.0%}",
        },
        floors,
    )
    met = all(floor["hidden"] >= HIDDEN and floor["lost"] <= LOST for floor in floors)
    record = {"cases": [record_of(case) for case in cases], "floors": floors}
    return Measured(record, [times, bounds], "" if met else "a bound is missed")


@BENCH.part("computing", lambda bench: _sizes(bench, COMPUTING_SHAPES))
def _computing(bench: Bench) -> Measured:
    shapes, cases, shares = _chosen(bench, COMPUTING_SHAPES), [], []
    pool = _connected(bench, shapes)
    for stages, m in shapes:
        names = ("Async2BW", "Async2BW, overlapped")
        of_shape = [Case(name, stages, m, bench.arguments.experts, None) for name in names]
        _measure(pool, of_shape, bench)
        alone = max(pool.run(stages * bench.arguments.experts, _messages, of_shape[0], 8))
        one_by_one, together = (case.median or 0.0 for case in of_shape)
        hidden = (one_by_one - together) / alone
        cases += of_shape
        shares.append({"stages": stages, "microbatches": m, "messages": alone, "hidden": hidden})
    found = {(case.schedule, case.stages, case.microbatches): case.median for case in cases}
    columns = {
        "stages, m": lambda share: f"{share['stages']}, {share['microbatches']}",
        **{
            heading: lambda share, name=name: (
                f"{1e3 * found[name, share['stages'], share['microbatches']]:.1f}"
            )
            for heading, name in (("Async2BW", "Async2BW"), ("overlapped", "Async2BW, overlapped"))
        },
        "messages alone": lambda share: f"{1e3 * share['messages']:.1f}",
        "hidden": lambda share: f"{share['hidden']:.0%}",
    }
    size = _ROWS * _WIDTH * 4 / 2**20
    title = f"ms per microbatch, with {MESSAGES} real messages of {size:.0f} MiB"
    record = {"cases": [record_of(case) for case in cases], "shares": shares}
    return Measured(record, [table(title, columns, shares)])


if __name__ == "__main__":
    BENCH.main()
