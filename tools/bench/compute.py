"""Throughput when the stages really compute: a transformer on two ranks of one thread each."""

import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from _pipelines import SCHEDULES, Pipeline, build_pipeline
from _pool import Pool
from _transformer import random_batch, transformer_stage

__all__ = ["Model", "Throughput", "measure_compute"]

RANKS = 2
COMPARED = ["1F1B", "Interleaved1F1B", "Async2BW"]


@dataclass(frozen=True)
class Model:
    """What one rank computes for one microbatch."""

    blocks: int = 2
    """Transformer blocks a rank, in all its stages together."""
    width: int = 256
    length: int = 320
    """Tokens in a microbatch, which is one sequence."""


@dataclass
class Throughput:
    """One schedule at one number of microbatches."""

    schedule: str
    microbatches: int
    step_seconds: list[float] = field(default_factory=list)
    pair_seconds: list[float] = field(default_factory=list)
    """A forward and backward of one microbatch with both ranks computing and none waiting."""

    @property
    def rate(self) -> float:
        """Microbatches a second, median."""
        return self.microbatches / statistics.median(self.step_seconds)

    @property
    def utilization(self) -> float:
        """Of what two ranks that never wait would do, median."""
        return statistics.median(self.pair_seconds) * self.rate


_kept: dict[tuple[str, int], Pipeline] = {}
"""In a worker: the pipelines that have been built and warmed up."""


def _prepare(rank: int, group: dist.ProcessGroup, schedule: str, microbatches: int, model: Model) -> None:
    torch.manual_seed(rank)
    blocks = model.blocks // SCHEDULES[schedule].stages_per_rank
    pipeline = build_pipeline(
        schedule,
        group,
        microbatches,
        lambda indices, _: [transformer_stage(blocks, model.width) for _ in indices],
        random_batch(microbatches, model.length, model.width),
    )
    assert pipeline is not None
    pipeline.warm_up()
    _kept[schedule, microbatches] = pipeline


def _repeat(rank: int, group: dist.ProcessGroup, schedule: str, microbatches: int, steps: int) -> float:
    """Seconds a step on this rank, after one step of warm-up and without the drain."""
    pipeline = _kept[schedule, microbatches]
    dist.barrier(group)
    pipeline.train_step()
    start = time.perf_counter()
    for _ in range(steps):
        pipeline.train_step()
    seconds = (time.perf_counter() - start) / steps
    pipeline.finish()
    return seconds


def _pair(rank: int, group: dist.ProcessGroup, model: Model, pairs: int) -> float:
    """Seconds of a forward and backward, without any pipeline but on all ranks at once."""
    stage = transformer_stage(model.blocks, model.width)
    inputs, targets = random_batch(1, model.length, model.width)
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(pairs):
        x = inputs.clone().requires_grad_()
        stage(x).backward(targets)
    return (time.perf_counter() - start) / pairs


def _forget(rank: int, group: dist.ProcessGroup) -> None:
    _kept.clear()


def measure_compute(
    pool: Pool, counts: list[int], repeats: int, model: Model, steps: int | None = None
) -> list[Throughput]:
    """Throughput of `COMPARED` at each number of microbatches in `counts`, by turns."""
    results = []
    for microbatches in counts:
        cases = [Throughput(schedule, microbatches) for schedule in COMPARED]
        for case in cases:
            pool.run(RANKS, _prepare, case.schedule, microbatches, model)
        for _ in range(repeats):
            pair = max(pool.run(RANKS, _pair, model, 4))
            for case in cases:
                count = steps or max(8 // microbatches, 1)
                seconds = pool.run(RANKS, _repeat, case.schedule, microbatches, count)
                case.step_seconds.append(max(seconds))
                case.pair_seconds.append(pair)
        results += cases
    pool.run(RANKS, _forget)
    return results
