"""What the ranks that share parameters must agree on before an update.

A gradient that is missing or not finite on one rank only would otherwise leave the ranks with different
weights, or waiting for each other for ever.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_async.local_tensors import as_dtensor, local_part
from titan_async.optim.correction import correct_gradients_
from titan_async.optim.tensors import at_least_float32

__all__ = ["Agreement", "agree", "gradients_are_zero"]


class Agreement(NamedTuple):
    """What all ranks have found."""

    moving: list[bool]
    """For each parameter, whether it has a gradient on every rank that shares it."""
    finite: bool
    """Whether all gradients are, on every rank."""
    zero: bool
    """Whether all of them are zero; False if that was not asked for."""


def agree(
    params: Sequence[Tensor],
    *,
    corrections: Mapping[Tensor, tuple[Tensor, float]] | None = None,
    ask_for_zero: bool = False,
) -> Agreement:
    """Agree with all ranks that share any of the parameters; they call it with the same sequence.

    One all-reduce of an integer a parameter for each dimension of the mesh. Waits for the device.

    Args:
        corrections: the history and the strength with which error feedback at level "gradient" corrects a
            parameter's gradient, which then has to be finite after that as well.
    """
    groups = list(_groups(params))
    grads = [local_part(param.grad) for param in params if param.grad is not None]
    corrected = [
        (local_part(param.grad), *corrections[param])
        for param in params
        if param.grad is not None
        and corrections
        and param in corrections
        # A gradient that is placed in another way is not summed up yet.
        and local_part(param.grad).shape == corrections[param][0].shape
    ]
    device = params[0].device if params else torch.device("cpu")
    missing = torch.tensor([param.grad is None for param in params], dtype=torch.int32).to(device)
    nonzero = not _are_zero(grads) if ask_for_zero else True
    # Norms take one pass, but overflow for entries that are finite.
    fine = [_norms(grads).isfinite().all().to(device)] if grads else []
    for grad, history, strength in corrected:
        bounds = _norms([grad, history]) * torch.tensor([1 + strength, strength], device=device)
        fine.append(bounds.sum() <= torch.finfo(grad.dtype).max)
    doubtful = ~torch.stack(fine).all() if fine else torch.tensor(False, device=device)
    verdicts = torch.stack([doubtful, torch.tensor(nonzero, device=device)])
    *absent, not_finite, moved = _maximum(torch.cat([missing, verdicts.to(torch.int32)]), groups)
    if not_finite:
        finite = all(bool(grad.isfinite().all()) for grad in grads) and all(
            _is_finite_corrected(*each) for each in corrected
        )
        [not_finite] = _maximum(torch.tensor([not finite], dtype=torch.int32, device=device), groups)
    return Agreement([not flag for flag in absent], not not_finite, not moved)


def gradients_are_zero(params: Sequence[Tensor]) -> bool:
    """Whether all gradients are zero or missing, on all ranks that share any of the parameters."""
    zero = _are_zero([local_part(param.grad) for param in params if param.grad is not None])
    device = params[0].device if params else torch.device("cpu")
    [nonzero] = _maximum(torch.tensor([not zero], dtype=torch.int32, device=device), list(_groups(params)))
    return not nonzero


def _are_zero(grads: Sequence[Tensor]) -> bool:
    return not any(bool(grad.any()) for grad in grads)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(at_least_float32(tensor.dtype), []).append(tensor)
    norms = [
        norm.double()
        for dtype, each in by_dtype.items()
        for norm in torch._foreach_norm(each, 2, dtype=dtype)
    ]
    return torch.stack(norms)


def _is_finite_corrected(grad: Tensor, history: Tensor, strength: float) -> bool:
    corrected = grad.clone()
    correct_gradients_([corrected], [grad], [history], [True], strength)
    return bool(corrected.isfinite().all())


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
