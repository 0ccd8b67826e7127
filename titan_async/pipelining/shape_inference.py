"""Shape inference before the first message, and the check that later microbatches have the same shapes.

torch infers the shapes between stages one stage after another, with a real forward and backward. If stages
were compiled there, their compilation times would add up along the pipeline. So shapes are inferred eagerly,
and then all stages run a warm-up microbatch of generated inputs at the same time. On an accelerator the
warm-up also loads kernels, autotunes and fills the allocator: all of them may wait for the whole device, and
would deadlock once a receive is posted whose message depends on what this stage sends.

Messages carry no shapes, so a microbatch of another shape would be read into a buffer of the wrong size.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async.pipelining._torch_internals import (
    WithoutFlexKernels,
    clear_chunks,
    generated_inputs,
    has_compiled_parts,
    initialize_stage,
    is_initialized,
    keystr,
    reset_shape_inference,
    tree_flatten_with_path,
)
from titan_async.pipelining.gradient_norm import connect_ranks

__all__ = ["ShapeInference", "Signature", "infer_eagerly", "needs_warmup", "run_warmup", "signatures_of"]

Signature = dict[str, str]
"""The structure of a microbatch: the name of each leaf, and its shape and dtype, or its type."""


def signatures_of(args: list, kwargs: list, targets: list | None, free_sizes: bool) -> list[Signature]:
    """The signature of each microbatch of a batch.

    Args:
        args: positional inputs, a tuple per microbatch.
        kwargs: keyword inputs, a dict per microbatch.
        targets: one per microbatch, or None.
        free_sizes: leave out the sizes of keyword inputs, but not their number of dimensions: cumulative
            sequence lengths have as many entries as there are documents.
    """
    batch = [
        _describe("args", mine) | _describe("kwargs", named, free_sizes)
        for mine, named in zip(args, kwargs, strict=True)
    ]
    for signature, target in zip(batch, targets or (), strict=False):
        signature |= _describe("target", target)
    return batch


class ShapeInference:
    """The shapes, dtypes and structure of this rank's microbatches.

    Args:
        stage: the stage of this rank.
    """

    def __init__(self, stage: _PipelineStageBase) -> None:
        self._stage = stage
        self._inferred_for: tuple[int, Signature] = (0, {})  # number of microbatches, and their signature
        self._warmed_up: set[bool] = set()  # with backward or without, for these shapes
        self._group: dist.ProcessGroup | None = None

    def check(self, batch: Sequence[Signature], in_flight: bool) -> None:
        """Compare microbatches with those in flight, or with the first one of their batch.

        Raises:
            ValueError: naming the argument, the microbatch, its shape and the expected one.
        """
        expected = self._inferred_for[1] if in_flight else batch[0]
        hint = (
            "drain() before a batch of other shapes"
            if in_flight
            else "all microbatches of a batch must be alike"
        )
        for index, found in enumerate(batch):
            for name in expected | found:
                came, wanted = found.get(name, "missing"), expected.get(name, "no such input")
                if came != wanted:
                    raise ValueError(f"{name} of microbatch {index} is {came}, expected {wanted}: {hint}")

    def infer(
        self,
        schedule: PipelineScheduleSingle,
        batch: Sequence[Signature],
        args: tuple,
        kwargs: dict,
        target: Any,
        loss_kwargs: dict[str, Any] | None,
    ) -> bool:
        """Infer the shapes between stages, unless they are known for this batch.

        Args:
            schedule: of the stage. No microbatch may be in flight.
            batch: the signatures of its microbatches.
            args: positional inputs of the first one.
            kwargs: keyword inputs of the first one.
            target: of the first one, on the last stage.
            loss_kwargs: further arguments of the loss.

        Returns:
            Whether to run a warm-up microbatch next.
        """
        if self._changed(batch, is_initialized(schedule)):
            reset_shape_inference(schedule)
            self._warmed_up.clear()
        trains = self._stage.has_backward
        warms_up = trains not in self._warmed_up and needs_warmup(self._stage)
        with infer_eagerly() if warms_up else nullcontext():
            initialize_stage(schedule, args, kwargs, target, loss_kwargs)
        self._warmed_up.add(trains)
        return warms_up

    def _changed(self, batch: Sequence[Signature], is_initialized: bool) -> bool:
        """Whether shapes must be inferred again: on any rank the inputs differ from those before.

        A rank's own inputs do not determine its activations, and under FSDP all ranks infer together. So this
        is a collective of all ranks, except at the first call.
        """
        before, self._inferred_for = self._inferred_for, (len(batch), batch[0])
        if not is_initialized:
            return False
        if self._group is None:
            self._group, _ = connect_ranks(self._stage)
        changed = torch.tensor(int(before != self._inferred_for), device=self._stage.device)
        dist.all_reduce(changed, dist.ReduceOp.MAX, self._group)
        return bool(changed.item())


def needs_warmup(stage: _PipelineStageBase) -> bool:
    """Whether a stage's first microbatch does one-time work, such as compilation."""
    return stage.device.type != "cpu" or has_compiled_parts(stage.submod)


@contextmanager
def infer_eagerly() -> Iterator[None]:
    """Compile nothing inside, and skip operators that fit into memory only where they are compiled."""
    with torch.compiler.set_stance("force_eager"), WithoutFlexKernels(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without")
        yield


def run_warmup(
    stage: _PipelineStageBase, forward: Callable[[int, int], Callable[[], None]], losses: list[Tensor]
) -> None:
    """Run forward and, if the stage trains, backward of one microbatch without messages.

    Activations are random, so that routers spread them; the user's inputs (of the first stage, keyword
    arguments, the target) are those of the first microbatch. The RNG state is restored; gradients and buffers
    are not.

    Args:
        stage: a stage that torch has initialized.
        forward: runs microbatch 0 in slot 0.
        losses: the list that `forward` appends its loss to, on the last stage.

    Raises:
        RuntimeError: naming the stage, if it fails.
    """
    devices = [] if stage.device.type == "cpu" else [stage.device]
    try:
        with torch.random.fork_rng(devices, device_type=stage.device.type), generated_inputs(stage, slot=0):
            forward(0, 0)()
            if stage.has_backward:
                stage.backward_one_chunk(0, losses[0] if stage.is_last else None)
    except Exception as error:
        cause = error.__cause__ or error
        raise RuntimeError(
            f"stage {stage.stage_index} failed on a first microbatch, before any message: "
            f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        ) from error
    clear_chunks(stage)


def _describe(name: str, value: Any, free_sizes: bool = False) -> Signature:
    if isinstance(value, tuple | dict) and not value:  # the inputs of most stages, for each microbatch
        return {}
    leaves, _ = tree_flatten_with_path(value, is_leaf=lambda each: isinstance(each, Tensor))
    return {name + keystr(path): _description(leaf, free_sizes) for path, leaf in leaves}


def _description(leaf: Any, free_sizes: bool) -> str:
    if not isinstance(leaf, Tensor):
        return f"of type {type(leaf).__name__}"
    if free_sizes:
        return f"a tensor of {leaf.ndim} dimensions and {leaf.dtype}"
    return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"
