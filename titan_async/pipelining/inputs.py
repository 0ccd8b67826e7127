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
from torch.utils._pytree import keystr, tree_flatten_with_path

from titan_async.pipelining.gradient_norm import connect_ranks

__all__ = ["Agreement", "Signature", "check_alike", "signature_of"]

Signature = dict[str, str]
"""What a microbatch consists of: the name of each part, and its shape and dtype, or its type."""


def signature_of(args: tuple, kwargs: dict[str, Any], target: Any, free_sizes: bool) -> Signature:
    """The signature of one microbatch.

    Args:
        args: positional inputs.
        kwargs: keyword inputs, without whose sizes their number of dimensions counts if `free_sizes`:
            cumulative sequence lengths have as many entries as there are documents.
        target: of the microbatch.
        free_sizes: see `kwargs`.
    """
    parts = _describe("args", args) | _describe("kwargs", kwargs, free_sizes)
    return parts if target is None else parts | _describe("target", target)


def check_alike(microbatches: Sequence[Signature], expected: Signature, hint: str) -> None:
    """Refuse the first microbatch that is not as expected.

    Args:
        microbatches: the signatures of a batch.
        expected: of each of them.
        hint: what to do about it.

    Raises:
        ValueError: naming the argument, the microbatch, what came and what was expected.
    """
    for index, found in enumerate(microbatches):
        for name in expected | found:
            came, wanted = found.get(name, "missing"), expected.get(name, "no such input")
            if came != wanted:
                raise ValueError(f"{name} of microbatch {index} is {came}, but expected was {wanted}: {hint}")


class Agreement:
    """Tells all ranks what one of them knows. Making one is a collective of the ranks of the pipeline.

    Args:
        stage: the stage of this rank.
    """

    def __init__(self, stage: _PipelineStageBase) -> None:
        self._device = stage.device
        self._group, _ = connect_ranks(stage)

    def any(self, answer: bool) -> bool:
        """Whether any rank's answer is yes. A collective that waits for the slowest."""
        yes = torch.tensor(int(answer), device=self._device)
        dist.all_reduce(yes, dist.ReduceOp.MAX, self._group)
        return bool(yes.item())


def _describe(name: str, value: Any, free_sizes: bool = False) -> Signature:
    leaves, _ = tree_flatten_with_path(value, is_leaf=lambda each: isinstance(each, Tensor))
    return {name + keystr(path): _description(leaf, free_sizes) for path, leaf in leaves}


def _description(leaf: Any, free_sizes: bool) -> str:
    if not isinstance(leaf, Tensor):
        return f"of type {type(leaf).__name__}"
    if free_sizes:
        return f"a tensor of {leaf.ndim} dimensions and {leaf.dtype}"
    return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"
