"""The figures of a logged step: taken when it ends, and reported a step later (see `transfer`).

What ranks know is summed up between their hosts. On the device the sum would be a barrier for all stages.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.metrics import MetricsProcessor

from titan_async.pipelining.gradient_norm import share_of_squares
from titan_async.training._titan_internals import stages_of
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.telemetry.metrics import AsyncMetrics
from titan_async.training.transfer import HostCopy

if TYPE_CHECKING:
    from titan_async.training.trainer import AsyncTrainer
from collections.abc import Mapping

__all__ = ["Trained", "pipeline_metrics", "take_figures"]


class Trained(NamedTuple):
    """What there is to report of a step."""

    loss: Tensor
    """This rank's share of the batch's, 0 where it has no last stage."""
    local_valid_tokens: int
    global_valid_tokens: Tensor
    learning_rates: dict[str, float]


class _Interval(NamedTuple):
    """What a metrics processor has counted since the last report."""

    seconds: float
    tokens: int
    loading: list[float]


def take_figures(trainer: "AsyncTrainer", trained: Trained) -> Callable[[], None]:
    """Take the figures of the step that has just ended.

    Returns:
        Reports them, once those of the step's updates are known. A collective over the hosts of all ranks.
    """
    step, dims, processor = trainer.step, trainer.parallel_dims, trainer.metrics_processor
    optimizers = trainer.optimizers
    histories = optimizers.feedback_histories() if isinstance(optimizers, AsyncOptimizers) else []
    squares = share_of_squares(histories, dist.get_world_size() // dims.pp, trainer.device)
    figures = HostCopy(
        torch.stack([trained.loss.double().sum(), trained.global_valid_tokens.double(), squares])
    )
    tokens_seen, interval = trainer.ntokens_seen, _end_interval(processor)
    delay = {"pipeline/delay": trainer.pp_schedule.delay} if trainer.delayed else {}
    trainer.recording.end_interval(step)

    def report() -> None:
        loss, valid_tokens, squares = figures.read().tolist()
        local_average = loss * valid_tokens / max(trained.local_valid_tokens, 1)
        average, largest, all_tokens_seen = _over_ranks(trainer, loss, local_average, tokens_seen)
        norm = trainer.grad_norm
        if norm is None and not isinstance(processor, AsyncMetrics):
            norm = math.nan  # torchtitan's processors take numbers alone
        metrics = pipeline_metrics(
            trainer.recording.utilization(),
            squares if histories else None,
            stages=stages_of(trainer.pp_schedule)[0].num_stages if dims.pp_enabled else 1,
            degree=dims.pp,
            group=trainer.preemption.group,
        )
        with _as_of(processor, interval):
            processor.log(
                step,
                average,
                largest,
                norm,
                extra_metrics={
                    "n_tokens_seen": all_tokens_seen,
                    "skipped_updates": trainer.skipped.total,
                    **trained.learning_rates,
                    **metrics,
                    **delay,
                },
            )

    return report


def _over_ranks(
    trainer: "AsyncTrainer", loss: float, local_average: float, tokens_seen: int
) -> tuple[float, float, float]:
    """The loss of the whole batch, the largest of a data-parallel rank, and the tokens seen by all."""
    group, dims = trainer.preemption.group, trainer.parallel_dims
    if group is None:
        return loss, loss, tokens_seen
    sums = torch.tensor([loss, tokens_seen], dtype=torch.float64)
    most = torch.tensor(local_average if trainer.has_last_stage else -math.inf, dtype=torch.float64)
    dist.all_reduce(sums, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    shares = dims.dp_replicate * dims.dp_shard * dims.cp
    ranks = dist.get_world_size() // shares  # that read the same data; of each stage a part of them
    average = float(sums[0]) / (ranks // dims.pp)
    return average, float(most) if shares > 1 else average, int(sums[1]) // ranks


def _end_interval(processor: MetricsProcessor) -> _Interval:
    now = time.perf_counter()
    interval = _Interval(
        now - processor.time_last_log, processor.ntokens_since_last_log, processor.data_loading_times
    )
    processor.time_last_log, processor.ntokens_since_last_log, processor.data_loading_times = now, 0, []
    return interval


@contextmanager
def _as_of(processor: MetricsProcessor, interval: _Interval) -> Iterator[None]:
    """Let `processor` log what it had counted when an interval ended, and go on counting."""
    now = processor.time_last_log, processor.ntokens_since_last_log, processor.data_loading_times
    processor.time_last_log = time.perf_counter() - interval.seconds
    processor.ntokens_since_last_log, processor.data_loading_times = interval.tokens, interval.loading
    yield
    processor.time_last_log, processor.ntokens_since_last_log, processor.data_loading_times = now


def pipeline_metrics(
    busy: Mapping[int, float],
    squares: float | None,
    *,
    stages: int,
    degree: int,
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Gather what the ranks know. A collective over the hosts of all of them, of a few numbers.

    Args:
        busy: the share of their time that stages of this rank computed.
        squares: this rank's share of the squares of what error feedback remembers; see
            `gradient_norm.share_of_squares`. None on all ranks where it is off.
        stages: of the pipeline.
        degree: ranks of the pipeline.
        group: of all ranks, on the CPU; None for what this rank knows.

    Returns:
        "pipeline/utilization/0" and so on for each stage, the mean over its ranks; "pipeline/bubble", the
        share of its time that a rank does not compute; "error_feedback/norm", that of the last uncorrected
        update. Without what no rank knows.
    """
    figures = torch.zeros(1 + 2 * stages, dtype=torch.float64)
    figures[0] = squares or 0.0
    for stage, share in busy.items():
        figures[1 + stage] = share
        figures[1 + stages + stage] = 1
    if group is not None:
        dist.all_reduce(figures, group=group)
    total, sums, counts = figures.tensor_split([1, 1 + stages])
    metrics: dict[str, float] = {}
    if bool(counts.all()):
        shares = (sums / counts).tolist()
        metrics = {f"pipeline/utilization/{stage}": share for stage, share in enumerate(shares)}
        metrics["pipeline/bubble"] = 1 - sum(shares) / degree
    if squares is not None:
        metrics["error_feedback/norm"] = float(total.sqrt())
    return metrics
