"""The metrics of a logged step: taken when the step ends, and reported a step later (see `transfer`).

They are summed between the hosts of all ranks. A collective on the device would be a barrier for all stages.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.trainer import Trainer

from titan_async.pipelining.gradient_norm import share_of_squares
from titan_async.training._titan_internals import stages_of
from titan_async.training.callbacks import Callback, StepResult
from titan_async.training.optimizer.container import AsyncOptimizers, learning_rates
from titan_async.training.pipeline.schedule import delays_gradients, has_last_stage
from titan_async.training.telemetry.metrics import AsyncMetrics
from titan_async.training.telemetry.not_finite import GradientCheck
from titan_async.training.telemetry.recording import Recording
from titan_async.training.transfer import Deferred, HostCopy

__all__ = ["StepMetrics", "pipeline_metrics"]


class _Interval(NamedTuple):
    """The counts of a metrics processor since the last report."""

    seconds: float
    tokens: int
    loading: list[float]


class StepMetrics(Callback):
    """Logs the metrics of a step.

    Args:
        recording: has the utilization of this rank's stages.
        gradients: has the norm of the gradient, and the number of skipped updates.
        deferred: runs the report once the values are on the host.
        group: of all ranks, on the CPU; None if this rank is alone.
    """

    def __init__(
        self,
        recording: Recording,
        gradients: GradientCheck,
        deferred: Deferred,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._recording, self._gradients, self._deferred, self._group = recording, gradients, deferred, group
        self._rates: dict[str, float] = {}

    def before_batch(self, trainer: Trainer) -> None:
        """Note the learning rates of the step."""
        self._rates = learning_rates(trainer)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Take the metrics of the step, if it is to be logged."""
        step = trainer.step
        if trainer.metrics_processor.should_log(step) or step == trainer.config.training.steps:
            self._deferred.add(step, self._take(trainer, result))

    def _take(self, trainer: Trainer, result: StepResult) -> Callable[[], None]:
        """Returns a function that reports the metrics; a collective over the hosts of all ranks."""
        step, dims, processor = trainer.step, trainer.parallel_dims, trainer.metrics_processor
        optimizers, rates = trainer.optimizers, self._rates
        histories = optimizers.feedback_histories() if isinstance(optimizers, AsyncOptimizers) else []
        squares = share_of_squares(histories, dist.get_world_size() // dims.pp, trainer.device)
        values = HostCopy(
            torch.stack([result.loss.double().sum(), result.global_valid_tokens.double(), squares])
        )
        tokens_seen, interval = trainer.ntokens_seen, _end_interval(processor)
        delayed = delays_gradients(trainer.config.parallelism)
        delay = {"pipeline/delay": trainer.pp_schedule.delay} if delayed else {}
        self._recording.end_interval(step)

        def report() -> None:
            loss, valid_tokens, squares = values.read().tolist()
            local_average = loss * valid_tokens / max(result.local_valid_tokens, 1)
            average, largest, all_tokens_seen = self._reduce(trainer, loss, local_average, tokens_seen)
            norm = self._gradients.grad_norm
            if norm is None and not isinstance(processor, AsyncMetrics):
                norm = math.nan  # torchtitan's processors take only numbers
            metrics = pipeline_metrics(
                self._recording.utilization(),
                squares if histories else None,
                stages=stages_of(trainer.pp_schedule)[0].num_stages if dims.pp_enabled else 1,
                degree=dims.pp,
                group=self._group,
            )
            with _as_of(processor, interval):
                processor.log(
                    step,
                    average,
                    largest,
                    norm,
                    extra_metrics={
                        "n_tokens_seen": all_tokens_seen,
                        "skipped_updates": self._gradients.skipped.total,
                        **rates,
                        **metrics,
                        **delay,
                    },
                )

        return report

    def _reduce(
        self, trainer: Trainer, loss: float, local_average: float, tokens_seen: int
    ) -> tuple[float, float, float]:
        """The loss of the whole batch, the largest of a data-parallel rank, and the tokens seen by all."""
        dims = trainer.parallel_dims
        if self._group is None:
            return loss, loss, tokens_seen
        sums = torch.tensor([loss, tokens_seen], dtype=torch.float64)
        largest = torch.tensor(local_average if has_last_stage(trainer) else -math.inf, dtype=torch.float64)
        dist.all_reduce(sums, group=self._group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        shares = dims.dp_replicate * dims.dp_shard * dims.cp
        ranks = dist.get_world_size() // shares  # that read the same data, on all stages
        average = float(sums[0]) / (ranks // dims.pp)
        return average, float(largest) if shares > 1 else average, int(sums[1]) // ranks


def _end_interval(processor: MetricsProcessor) -> _Interval:
    now = time.perf_counter()
    interval = _Interval(
        now - processor.time_last_log, processor.ntokens_since_last_log, processor.data_loading_times
    )
    processor.time_last_log, processor.ntokens_since_last_log, processor.data_loading_times = now, 0, []
    return interval


@contextmanager
def _as_of(processor: MetricsProcessor, interval: _Interval) -> Iterator[None]:
    """Let `processor` log what it had counted when an interval ended, and then continue to count."""
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
    """Reduce the metrics of the pipeline over all ranks: a collective between their hosts.

    Args:
        busy: the share of their time that stages of this rank computed.
        squares: this rank's share of the sum of squares of error feedback's history; see
            `gradient_norm.share_of_squares`. None on all ranks without error feedback.
        stages: of the pipeline.
        degree: ranks of the pipeline.
        group: of all ranks, on the CPU; None if this rank is alone.

    Returns:
        "pipeline/utilization/0" and so on for each stage, the mean over its ranks; "pipeline/bubble", the
        share of its time in which a rank does not compute; "error_feedback/norm", the norm of the last
        uncorrected update. Metrics without a value are left out.
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
