"""Peak bytes of each stage, and the formula that predicts them (docs/memory.md explains it).

The formula uses the sizes of a stage, measured with one microbatch without a pipeline, and the number of
times that the schedule holds each of them.
"""

import gc
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from _pipelines import build_pipeline, squared_error
from _pool import Pool
from _transformer import Model
from torch import Tensor, nn

from titan_async.planning.storage_tracker import StorageTracker

__all__ = ["Peak", "Sizes", "measure_memory", "peak_of_steps", "predict_peak", "sizes_of"]

SHAPES = [(4, 4), (4, 8)]
"""Ranks and microbatches."""

_MODEL = Model(2, 128, 128)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one stage."""

    parameters: int
    message: int
    """Input, output, and either gradient of a microbatch."""
    activations: int
    """Kept by a forward for its backward, with its output and without its input."""
    forward_extra: int
    """Peak of a forward beyond what it keeps."""
    backward_extra: int
    """Peak of a backward beyond the memory at its start, gradients included."""
    first_backward_extra: int
    """The same for the first backward of a batch, which allocates the gradients."""


@dataclass
class Peak:
    """One schedule on one stage; bytes."""

    schedule: str
    stage: int
    ranks: int
    microbatches: int
    lookahead: int | None
    """Of Async2BW, None for 1F1B."""
    sizes: Sizes
    predicted: int
    parts: dict[str, int] = field(default_factory=dict)
    """Breakdown of the last repetition's peak."""
    repetitions: list[int] = field(default_factory=list)

    @property
    def measured(self) -> float:
        return statistics.median(self.repetitions)

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measured peak."""
        return self.predicted / self.measured - 1


def predict_peak(sizes: Sizes, stage: int, ranks: int, microbatches: int, lookahead: int | None) -> int:
    """Peak bytes of stage r of d without optimizer state: of Async2BW, or of 1F1B if `lookahead` is None.

    1F1B holds the parameters, one gradient, a receive buffer for each microbatch and direction, and
    min(m, d - r) microbatches. Async2BW has w = d - 1 - r microbatches, plus its part of the lookahead, in
    flight between steps, and one more between a forward and a backward; a second version of the parameters if
    w > 0; the gradients of the previous and of the current batch; w + 2 inputs, two gradients of outputs, and
    w + 2 messages in flight to the previous stage.
    """
    downstream = ranks - 1 - stage
    if lookahead is None:
        in_flight = min(microbatches, downstream + 1)
        versions, gradients = 1, 1
        inputs, gradients_received, sent = microbatches, microbatches, 1
        refilled = microbatches > in_flight
    else:
        tail = downstream + (lookahead * downstream // (ranks - 1) if downstream else 0)
        in_flight = tail + 1
        versions, gradients = (2 if tail else 1), 2
        inputs, gradients_received, sent = tail + 2, 2, tail + 2
        refilled = microbatches - tail > 1
    # All but one of the outputs that are being sent are those of microbatches in flight.
    messages = (inputs + sent) * (stage > 0) + (gradients_received + 1) * (downstream > 0)
    # The first backward of a batch allocates its gradient, and frees activations.
    moments = [
        (gradients - 1) * sizes.parameters + in_flight * sizes.activations + sizes.first_backward_extra
    ]
    if refilled:  # a forward follows it, and then a backward that adds to the gradient
        moments.append(
            gradients * sizes.parameters
            + in_flight * sizes.activations
            + max(sizes.forward_extra, sizes.backward_extra)
        )
    elif lookahead is None and microbatches > 1:  # backwards follow it
        moments.append(
            gradients * sizes.parameters + (in_flight - 1) * sizes.activations + sizes.backward_extra
        )
    else:  # the update follows it
        moments.append(gradients * sizes.parameters + (in_flight - 1) * sizes.activations)
    return versions * sizes.parameters + messages * sizes.message + max(moments)


class AllocatorTracker:
    """Tracks allocations of CUDA's caching allocator, with the interface of `StorageTracker`."""

    peak_by_origin = property(lambda self: {"other": self.peak})

    def __enter__(self) -> "AllocatorTracker":
        gc.collect()
        self._before = torch.cuda.memory_allocated()
        self.reset_peak()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def exclude(self, *tensors: Tensor) -> None:
        pass  # they were made before

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        return 0  # origins are not tracked

    def attributed(self, origin: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


def _tracker(model: Model) -> Any:
    return StorageTracker() if model.device == "cpu" else AllocatorTracker()


def sizes_of(rank: int, group: dist.ProcessGroup, model: Model) -> Sizes:
    """The sizes of a rank's stage, measured with one microbatch without a pipeline."""
    last = rank == group.size() - 1
    inputs, targets = model.batch(1)
    inputs.requires_grad_(rank > 0)
    with _tracker(model) as tracker:
        tracker.exclude(inputs, targets)
        module = model.stage()
        parameters = tracker.live
        backward_extra = []
        for _ in range(2):  # the second time the parameters have gradients
            before = tracker.live
            tracker.reset_peak()
            output = module(inputs)
            if last:
                output = squared_error(output, targets)
            after, forward_peak = tracker.live, tracker.peak
            tracker.reset_peak()
            output.backward(None if last else targets)
            backward_extra.append(tracker.peak - after)
            inputs.grad = None
            del output
    return Sizes(
        parameters,
        inputs.untyped_storage().nbytes(),
        activations=after - before,
        forward_extra=forward_peak - after,
        backward_extra=backward_extra[1],
        first_backward_extra=backward_extra[0],
    )


def peak_of_steps(
    rank: int,
    group: dist.ProcessGroup,
    model: Model,
    schedule: str,
    microbatches: int,
    lookahead: int | None,
    steps: int,
) -> tuple[int, dict[str, int]]:
    """The peak of `steps` steps after a warm-up, and its breakdown."""
    torch.manual_seed(rank)
    batch = model.batch(microbatches)
    with _tracker(model) as tracker:
        tracker.exclude(*batch)
        pipeline = build_pipeline(
            schedule,
            group,
            microbatches,
            lambda indices, _: [model.stage() for _ in indices],
            batch,
            loss_fn=tracker.attributed("activations", squared_error),
            lookahead=lookahead,
        )
        assert pipeline is not None
        (stage,) = pipeline.stages
        stage.forward_maybe_with_nosync = tracker.attributed("activations", stage.forward_maybe_with_nosync)
        stage.backward_maybe_with_nosync = tracker.attributed("gradients", stage.backward_maybe_with_nosync)
        for _ in range(2):
            pipeline.train_step()
        tracker.reset_peak()
        for _ in range(steps):
            pipeline.train_step()
        peak, parts = tracker.peak, tracker.peak_by_origin
        every = [o for o in gc.get_objects() if type(o) is nn.Parameter]
        parameters = tracker.bytes_of(stage.submod.parameters())
        second = tracker.bytes_of(every) - parameters
        pipeline.finish()
    messages = parts.pop("other") - parameters - second
    return peak, {"parameters": parameters, "second version": second, "messages": messages, **parts}


def measure_memory(pool: Pool, shapes: list[tuple[int, int]], repeats: int, steps: int = 2) -> list[Peak]:
    """Measures 1F1B, and Async2BW with lookahead 0 and with at most d - 1, alternately."""
    results = []
    for ranks, microbatches in shapes:
        sizes = pool.run(ranks, sizes_of, _MODEL)
        lookaheads = {0, min(ranks - 1, microbatches - ranks)}
        rows: list[list[Peak]] = []
        for name, lookahead in [("1F1B", None), *(("Async2BW", value) for value in sorted(lookaheads))]:
            rows.append([
                Peak(
                    name, stage, ranks, microbatches, lookahead, sizes[stage],
                    predict_peak(sizes[stage], stage, ranks, microbatches, lookahead),
                )
                for stage in range(ranks)
            ])  # fmt: skip
        for _ in range(repeats):
            for row in rows:
                measured = pool.run(
                    ranks, peak_of_steps, _MODEL, row[0].schedule, microbatches, row[0].lookahead, steps
                )
                for case, (peak, parts) in zip(row, measured, strict=True):
                    case.repetitions.append(peak)
                    case.parts = parts
        results += [case for row in rows for case in row]
    return results
