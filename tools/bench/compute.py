"""Throughput of stages that compute: a transformer on two ranks of one thread each.

`tools/gpu/check.py` measures it on GPUs.
"""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from _pipelines import KEPT, SCHEDULES, build_pipeline, forget, time_steps
from _pool import Pool
from _transformer import Model

__all__ = ["RANKS", "Throughput", "measure_compute", "pair", "prepare", "repeat"]

RANKS = 2
COMPARED = ["1F1B", "Interleaved1F1B", "Async2BW"]


@dataclass
class Throughput:
    """One schedule at one number of microbatches."""

    schedule: str
    microbatches: int
    step_seconds: list[float] = field(default_factory=list)
    pair_seconds: list[float] = field(default_factory=list)
    """A forward and backward of one microbatch, while both ranks compute and none waits."""

    @property
    def rate(self) -> float:
        """Median of microbatches per second."""
        return self.microbatches / statistics.median(self.step_seconds)

    @property
    def utilization(self) -> float:
        """Median of the rate relative to that of ranks that never wait."""
        return statistics.median(self.pair_seconds) * self.rate


def _synchronize(model: Model) -> None:
    """Waits for the current stream only: on others, receives may wait for the next step."""
    if model.device != "cpu":
        torch.accelerator.current_stream().synchronize()


def prepare(
    rank: int, group: dist.ProcessGroup, schedule: str, microbatches: int, model: Model, **options: Any
) -> None:
    """Builds a pipeline with `options` of its schedule, and warms it up."""
    torch.manual_seed(rank)
    pipeline = build_pipeline(
        schedule,
        group,
        microbatches,
        lambda indices, _: [model.stage(SCHEDULES[schedule].stages_per_rank) for _ in indices],
        model.batch(microbatches),
        **options,
    )
    assert pipeline is not None
    pipeline.warm_up()
    KEPT[schedule, microbatches] = pipeline


def repeat(
    rank: int, group: dist.ProcessGroup, schedule: str, microbatches: int, model: Model, steps: int
) -> float:
    """Seconds per step on this rank."""
    dist.barrier(group)
    return time_steps(KEPT[schedule, microbatches], steps, synchronize=lambda: _synchronize(model))


def pair(rank: int, group: dist.ProcessGroup, model: Model, pairs: int) -> float:
    """Seconds of a forward and backward without a pipeline, on all ranks at the same time."""
    stage = model.stage()
    inputs, targets = model.batch(1)
    for count in (1, pairs) if model.device != "cpu" else (pairs,):  # an accelerator loads its kernels first
        dist.barrier(group)
        _synchronize(model)
        start = time.perf_counter()
        for _ in range(count):
            x = inputs.clone().requires_grad_()
            stage(x).backward(targets)
        _synchronize(model)
    return (time.perf_counter() - start) / pairs


def measure_compute(
    pool: Pool, counts: list[int], repeats: int, model: Model, steps: int | None = None
) -> list[Throughput]:
    """Throughput of `COMPARED` at each number of microbatches in `counts`, alternately."""
    results = []
    for microbatches in counts:
        cases = [Throughput(schedule, microbatches) for schedule in COMPARED]
        for case in cases:
            pool.run(RANKS, prepare, case.schedule, microbatches, model)
        for _ in range(repeats):
            alone = max(pool.run(RANKS, pair, model, 4))
            for case in cases:
                count = steps or max(8 // microbatches, 1)
                seconds = pool.run(RANKS, repeat, case.schedule, microbatches, model, count)
                case.step_seconds.append(max(seconds))
                case.pair_seconds.append(alone)
        results += cases
    pool.run(RANKS, forget)
    return results
