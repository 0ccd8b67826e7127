"""What the ranks that share parameters must agree on before an update.

A gradient that is missing or not finite on one rank only would otherwise leave the ranks with different
weights, or waiting for each other for ever.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_async.optim.local_tensors import as_dtensor, at_least_float32, local_part

__all__ = ["Agreement", "agree"]


class Agreement(NamedTuple):
    """Args:
    moving: for each parameter, whether it has a gradient on every rank that shares it.
    finite: whether all gradients are, on every rank.
    zero: whether all of them are zero; False if that was not asked for.
    """

    moving: list[bool]
    finite: bool
    zero: bool


def agree(params: Sequence[Tensor], *, ask_for_zero: bool) -> Agreement:
    """Agree with all ranks that share any of the parameters; they call it with the same sequence.

    One all-reduce of an integer a parameter for each dimension of the mesh. Waits for the device.
    """
    groups = list(_groups(params))
    grads = [local_part(param.grad) for param in params if param.grad is not None]
    device = params[0].device if params else torch.device("cpu")
    missing = torch.tensor([param.grad is None for param in params], dtype=torch.int32).to(device)
    nonzero = any(bool(grad.any()) for grad in grads) if ask_for_zero else True
    # The norm takes one pass, but overflows for entries that are finite.
    verdicts = torch.stack([~_norms_are_finite(grads, device), torch.tensor(nonzero, device=device)])
    *absent, not_finite, moved = _maximum(torch.cat([missing, verdicts.to(torch.int32)]), groups)
    if not_finite:
        exact = not all(bool(grad.isfinite().all()) for grad in grads)
        [not_finite] = _maximum(torch.tensor([exact], dtype=torch.int32, device=device), groups)
    return Agreement([not flag for flag in absent], not not_finite, not moved)


def _norms_are_finite(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.layout == torch.strided and grad.numel():
            by_dtype.setdefault(at_least_float32(grad.dtype), []).append(grad)
    norms = [
        norm.double()
        for dtype, each in by_dtype.items()
        for norm in torch._foreach_norm(each, 2, dtype=dtype)
    ]
    return torch.stack(norms).isfinite().all() if norms else torch.tensor(True, device=device)


def _maximum(values: Tensor, groups: Sequence[dist.ProcessGroup]) -> list[Any]:
    for group in groups:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values.tolist()


def _groups(params: Sequence[Tensor]) -> Iterator[dist.ProcessGroup]:
    """The groups along the dimensions of the parameters' meshes, each set of ranks once."""
    seen = set()
    for param in params:
        dtensor = as_dtensor(param)
        if dtensor is None:
            continue
        mesh = dtensor.device_mesh
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                group = mesh.get_group(dim)
                ranks = tuple(dist.get_process_group_ranks(group))
                if ranks not in seen:
                    seen.add(ranks)
                    yield group
