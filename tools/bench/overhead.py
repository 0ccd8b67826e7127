"""Overhead of the schedule: time of the main thread in `step` outside of forwards and backwards.

This is CPU time of the thread, without waiting for neighbours: Python, swapping of weight versions, and
starting messages. The stages have as many parameters as a real one, because a swap iterates over them, but
few elements.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from _pipelines import KEPT, build_pipeline, forget, squared_error
from _pool import Pool
from _transformer import random_batch, transformer_stage

__all__ = ["PAIR_SECONDS", "Overhead", "measure_overhead"]

RANKS = 2
COMPARED = ["1F1B", "Async2BW"]
PAIR_SECONDS = 0.060
"""A forward and backward to which the overhead is compared."""

_BLOCKS, _WIDTH, _LENGTH = 12, 8, 4


@dataclass
class Overhead:
    """One schedule on one stage."""

    schedule: str
    stage: int
    microbatches: int
    parameters: int = 0
    """Parameters of the stage: tensors, not elements."""
    pair_seconds: list[float] = field(default_factory=list)
    """CPU seconds per microbatch, outside of its forward and backward."""

    @property
    def median(self) -> float:
        return statistics.median(self.pair_seconds)


class _Meter:
    """Accumulates the thread's CPU time in functions."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **kwargs)
            self.seconds += time.thread_time() - start
            self.calls += 1
            return result

        return call


def _prepare(rank: int, group: dist.ProcessGroup, schedule: str, microbatches: int) -> int:
    compute, whole = _Meter(), _Meter()
    pipeline = build_pipeline(
        schedule,
        group,
        microbatches,
        lambda indices, _: [transformer_stage(_BLOCKS, _WIDTH) for _ in indices],
        random_batch(microbatches, _LENGTH, _WIDTH),
        loss_fn=compute.metered(squared_error),
    )
    assert pipeline is not None
    (stage,) = pipeline.stages
    stage.forward_maybe_with_nosync = compute.metered(stage.forward_maybe_with_nosync)
    stage.backward_maybe_with_nosync = compute.metered(stage.backward_maybe_with_nosync)
    pipeline.schedule.step = whole.metered(pipeline.schedule.step)
    pipeline.warm_up()
    KEPT[schedule] = pipeline, compute, whole
    return len(pipeline.parameters)


def _repeat(rank: int, group: dist.ProcessGroup, schedule: str, microbatches: int, steps: int) -> float:
    """CPU seconds per microbatch outside of forward and backward, on this rank."""
    pipeline, compute, whole = KEPT[schedule]
    dist.barrier(group)
    pipeline.train_step()
    compute.seconds = whole.seconds = 0.0
    compute.calls = 0
    for _ in range(steps):
        pipeline.train_step()
    seconds = whole.seconds - compute.seconds
    # Forwards and backwards outside of the wrapped methods would count as overhead.
    assert compute.calls == steps * microbatches * (3 if pipeline.stages[0].is_last else 2)
    pipeline.finish()
    return seconds / (steps * microbatches)


def measure_overhead(pool: Pool, repeats: int, microbatches: int = 8, steps: int = 10) -> list[Overhead]:
    """Measures the overhead of `COMPARED` on each stage, alternately."""
    cases = {name: [Overhead(name, stage, microbatches) for stage in range(RANKS)] for name in COMPARED}
    for name, stages in cases.items():
        counts = pool.run(RANKS, _prepare, name, microbatches)
        for case, count in zip(stages, counts, strict=True):
            case.parameters = count
    for _ in range(repeats):
        for name, stages in cases.items():
            seconds = pool.run(RANKS, _repeat, name, microbatches, steps)
            for case, value in zip(stages, seconds, strict=True):
                case.pair_seconds.append(value)
    pool.run(RANKS, forget)
    return [case for stages in cases.values() for case in stages]
