"""What each microbatch of a batch brings, compared with what the pipeline was made for.

Shapes are inferred from one microbatch, and messages carry none: one of another shape would be read into a
buffer that it does not fill, or that is too small for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async.pipelining._torch_internals import keystr, tree_flatten_with_path
from titan_async.pipelining.gradient_norm import connect_ranks

__all__ = ["Shapes", "Signature", "signatures_of"]

Signature = dict[str, str]
"""What a microbatch consists of: the name of each part, and its shape and dtype, or its type."""


def signatures_of(args: list, kwargs: list, targets: list | None, free_sizes: bool) -> list[Signature]:
    """The signature of each microbatch of a batch.

    Args:
        args: positional inputs, a tuple a microbatch.
        kwargs: keyword inputs, a dict a microbatch.
        targets: one a microbatch, or None.
        free_sizes: leave out the sizes of keyword inputs, but not their number of dimensions: cumulative
            sequence lengths have as many entries as there are documents.
    """
    batch = [
        _describe("args", mine) | _describe("kwargs", named, free_sizes)
        for mine, named in zip(args, kwargs, strict=True)
    ]
    for parts, target in zip(batch, targets or (), strict=False):
        parts |= _describe("target", target)
    return batch


class Shapes:
    """The shapes, dtypes and structure of the microbatches that this rank is given.

    Args:
        stage: the stage of this rank.
    """

    def __init__(self, stage: _PipelineStageBase) -> None:
        self._stage = stage
        self._made_for: tuple[int, Signature] = (0, {})  # microbatches, and each of them
        self._group: dist.ProcessGroup | None = None

    def check(self, batch: Sequence[Signature], in_flight: bool) -> None:
        """Refuse a microbatch that is not like those before: those in flight, or the first of its batch.

        Raises:
            ValueError: naming the argument, the microbatch, what came and what was expected.
        """
        expected = self._made_for[1] if in_flight else batch[0]
        hint = (
            "drain() before a batch of other shapes"
            if in_flight
            else "all microbatches of a batch must be alike"
        )
        for index, found in enumerate(batch):
            for name in expected | found:
                came, wanted = found.get(name, "missing"), expected.get(name, "no such input")
                if came != wanted:
                    raise ValueError(
                        f"{name} of microbatch {index} is {came}, but expected was {wanted}: {hint}"
                    )

    def note(self, batch: Sequence[Signature], is_initialized: bool) -> bool:
        """Note what the pipeline is filled with, and return whether shapes must be inferred anew for it.

        They must if any rank is given something else than before: what a rank is given does not tell what
        reaches it, and under FSDP all ranks infer together. So this is a collective of all ranks, unless
        nothing was inferred yet.
        """
        before, self._made_for = self._made_for, (len(batch), batch[0])
        if not is_initialized:
            return False
        if self._group is None:
            self._group, _ = connect_ranks(self._stage)
        changed = torch.tensor(int(before != self._made_for), device=self._stage.device)
        dist.all_reduce(changed, dist.ReduceOp.MAX, self._group)
        return bool(changed.item())


def _describe(name: str, value: Any, free_sizes: bool = False) -> Signature:
    if isinstance(value, tuple | dict) and not value:  # what most stages are given, for each microbatch
        return {}
    leaves, _ = tree_flatten_with_path(value, is_leaf=lambda each: isinstance(each, Tensor))
    return {name + keystr(path): _description(leaf, free_sizes) for path, leaf in leaves}


def _description(leaf: Any, free_sizes: bool) -> str:
    if not isinstance(leaf, Tensor):
        return f"of type {type(leaf).__name__}"
    if free_sizes:
        return f"a tensor of {leaf.ndim} dimensions and {leaf.dtype}"
    return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"
