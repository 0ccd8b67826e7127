"""Agreement of the ranks that share parameters on which gradients exist, and whether they are finite.

Otherwise a gradient that is missing or not finite on one rank only would lead to different weights, or to a
deadlock.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_async.local_tensors import as_dtensor, local_part
from titan_async.optim.elementwise import at_least_float32
from titan_async.optim.feedback_history import correct_gradients_

__all__ = ["GradientStatus", "assume_finite", "gradients_are_zero", "reduce_gradient_status"]

_LARGE = 1e18
"""Above it the squares in a norm may overflow in float32, and entries may be near its largest number."""


class GradientStatus(NamedTuple):
    """The status of all gradients, the same on all ranks."""

    has_grad: list[bool]
    """For each parameter, whether it has a gradient on every rank that shares it."""
    finite: bool
    """Whether all gradients are finite on every rank."""
    zero: bool
    """Whether all of them are zero; False if that was not checked."""
    large: bool
    """Whether any may be so large that a difference of two such numbers, or rounding, overflows."""
    redistributed: dict[Tensor, Tensor]
    """The local gradients of parameters with a gradient whose placements differed from the parameter's."""


def reduce_gradient_status(
    params: Sequence[Tensor],
    *,
    corrections: Mapping[Tensor, tuple[Tensor, float]] | None = None,
    check_zero: bool = False,
) -> GradientStatus:
    """Agree with all ranks that share any of the parameters; all call it with the same sequence.

    Needs one all-reduce of an integer per parameter along each mesh dimension, and waits for the device.
    Gradients whose placements differ from the parameter's are then redistributed, because sums of partial
    gradients may overflow.

    Args:
        corrections: the history and the strength by which error feedback at level "gradient" corrects a
            parameter's gradient, which must be finite after the correction too.
    """
    corrections = corrections or {}
    groups = list(_process_groups(params))
    device = params[0].device if params else torch.device("cpu")
    given = {param: local_part(param.grad) for param in params if param.grad is not None}
    misplaced = {param for param in given if _is_misplaced(param)}
    nonzero = not _are_zero(list(given.values())) if check_zero else True
    flags = [*(param.grad is None for param in params), nonzero, bool(misplaced)]
    # Partial gradients are corrected after their reduction.
    complete = {param: each for param, each in corrections.items() if param not in misplaced}
    reduced, finite, large = _reduce_magnitude(given, complete, flags, groups, device)
    *missing, any_nonzero, any_misplaced = reduced
    has_grad = [not flag for flag in missing]
    redistributed: dict[Tensor, Tensor] = {}
    if finite and any_misplaced:
        redistributed = {
            param: _redistributed(param)
            for param, has in zip(params, has_grad, strict=True)
            if has and param in misplaced  # in the same order on all ranks
        }
        _, finite, larger = _reduce_magnitude(redistributed, corrections, [], groups, device)
        large = large or larger
    return GradientStatus(has_grad, finite, not any_nonzero, large, redistributed)


def assume_finite(params: Sequence[Tensor]) -> GradientStatus:
    """The status if all ranks have the same gradients and all are finite. Does not wait for the device.

    Ranks communicate only to redistribute gradients.
    """
    has_grad = [param.grad is not None for param in params]
    redistributed = {param: _redistributed(param) for param in params if _is_misplaced(param)}
    return GradientStatus(has_grad, finite=True, zero=False, large=True, redistributed=redistributed)


def gradients_are_zero(params: Sequence[Tensor]) -> bool:
    """Whether all gradients are zero or missing, on all ranks that share any of the parameters."""
    zero = _are_zero([local_part(param.grad) for param in params if param.grad is not None])
    device = params[0].device if params else torch.device("cpu")
    flag = torch.tensor([not zero], dtype=torch.int32, device=device)
    [nonzero] = _all_reduce_max(flag, list(_process_groups(params)))
    return not nonzero


def _reduce_magnitude(
    grads: Mapping[Tensor, Tensor],
    corrections: Mapping[Tensor, tuple[Tensor, float]],
    flags: Sequence[bool],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> tuple[list[Any], bool, bool]:
    """``flags`` that are true on any rank, whether all gradients are finite, and whether any may be large."""
    corrected = [(grad, *corrections[param]) for param, grad in grads.items() if param in corrections]
    # Norms need one pass, but overflow for some finite entries.
    norms = _norms(list(grads.values())).to(device)
    maybe_infinite, large = [], [~(norms < _LARGE).all()]
    for grad, history, strength in corrected:
        bounds = _norms([grad, history]) * torch.tensor([1 + strength, strength], device=device)
        maybe_infinite.append(~(bounds.sum() <= torch.finfo(grad.dtype).max))
        large.append(~(bounds.sum() < _LARGE))
    magnitudes = torch.stack([torch.stack(large + maybe_infinite).any(), torch.stack(large).any()])
    host_flags = torch.tensor(flags, dtype=torch.int32).to(device)
    *reduced, any_doubt, any_large = _all_reduce_max(
        torch.cat([host_flags, magnitudes.to(torch.int32)]), groups
    )
    finite = True
    if any_doubt:
        finite = all(bool(grad.isfinite().all()) for grad in grads.values()) and all(
            _is_finite_corrected(*each) for each in corrected
        )
        flag = torch.tensor([not finite], dtype=torch.int32, device=device)
        [not_finite] = _all_reduce_max(flag, groups)
        finite = not not_finite
    return reduced, finite, bool(any_large)


def _is_misplaced(param: Tensor) -> bool:
    """Whether the placements of a parameter's gradient differ from the parameter's."""
    dtensor, grad = as_dtensor(param), None if param.grad is None else as_dtensor(param.grad)
    return dtensor is not None and grad is not None and grad.placements != dtensor.placements


def _redistributed(param: Tensor) -> Tensor:
    """The local part of a parameter's gradient, redistributed to the parameter's placements."""
    dtensor, grad = as_dtensor(param), param.grad
    assert grad is not None
    return local_part(as_dtensor(grad).redistribute(dtensor.device_mesh, dtensor.placements))


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
    return torch.stack(norms) if norms else torch.zeros(0)


def _is_finite_corrected(grad: Tensor, history: Tensor, strength: float) -> bool:
    corrected = grad.clone()
    correct_gradients_([corrected], [grad], [history], [True], strength)
    return bool(corrected.isfinite().all())


def _all_reduce_max(values: Tensor, groups: Sequence[dist.ProcessGroup]) -> list[Any]:
    for group in groups:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values.tolist()


def _process_groups(params: Sequence[Tensor]) -> Iterator[dist.ProcessGroup]:
    """The process groups along the dimensions of the parameters' meshes, each set of ranks once."""
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
