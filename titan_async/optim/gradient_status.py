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
from titan_async.optim.feedback_history import correct_gradients_
from titan_async.optim.tensors import at_least_float32

__all__ = ["Agreement", "agree", "gradients_are_zero", "presume"]

_LARGE = 1e18
"""Above it the squares in a norm may overflow in float32, and entries be near the largest of its numbers."""


class Agreement(NamedTuple):
    """What all ranks have found."""

    moving: list[bool]
    """For each parameter, whether it has a gradient on every rank that shares it."""
    finite: bool
    """Whether all gradients are, on every rank."""
    zero: bool
    """Whether all of them are zero; False if that was not asked for."""
    large: bool
    """Whether any of them may be so large that a difference of two such numbers overflows, or rounding."""
    placed: dict[Tensor, Tensor]
    """The local gradients of moving parameters whose gradients were placed in another way than they are."""


def agree(
    params: Sequence[Tensor],
    *,
    corrections: Mapping[Tensor, tuple[Tensor, float]] | None = None,
    ask_for_zero: bool = False,
) -> Agreement:
    """Agree with all ranks that share any of the parameters; they call it with the same sequence.

    One all-reduce of an integer a parameter for each dimension of the mesh. Waits for the device. Gradients
    that are placed unlike their parameters are then placed like them, for their sums may overflow.

    Args:
        corrections: the history and the strength with which error feedback at level "gradient" corrects a
            parameter's gradient, which then has to be finite after that as well.
    """
    corrections = corrections or {}
    groups = list(_groups(params))
    device = params[0].device if params else torch.device("cpu")
    given = {param: local_part(param.grad) for param in params if param.grad is not None}
    misplaced = {param for param in given if _is_misplaced(param)}
    nonzero = not _are_zero(list(given.values())) if ask_for_zero else True
    flags = [*(param.grad is None for param in params), nonzero, bool(misplaced)]
    # What is not summed up yet cannot be corrected yet.
    settled = {param: each for param, each in corrections.items() if param not in misplaced}
    found, finite, large = _agree_on_size(given, settled, flags, groups, device)
    *absent, moved, any_misplaced = found
    moving = [not flag for flag in absent]
    placed: dict[Tensor, Tensor] = {}
    if finite and any_misplaced:
        placed = {
            param: _placed_like(param)
            for param, moves in zip(params, moving, strict=True)
            if moves and param in misplaced  # in the order that all ranks share
        }
        _, finite, larger = _agree_on_size(placed, corrections, [], groups, device)
        large = large or larger
    return Agreement(moving, finite, not moved, large, placed)


def presume(params: Sequence[Tensor]) -> Agreement:
    """What `agree` finds where all ranks have the same gradients and all are finite. Waits for no device.

    Ranks that share parameters communicate only if gradients are placed unlike them.
    """
    moving = [param.grad is not None for param in params]
    placed = {param: _placed_like(param) for param in params if _is_misplaced(param)}
    return Agreement(moving, finite=True, zero=False, large=True, placed=placed)


def _agree_on_size(
    grads: Mapping[Tensor, Tensor],
    corrections: Mapping[Tensor, tuple[Tensor, float]],
    flags: Sequence[bool],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> tuple[list[Any], bool, bool]:
    """``flags`` that are true on any rank, whether all gradients are finite, and whether any may be large."""
    corrected = [(grad, *corrections[param]) for param, grad in grads.items() if param in corrections]
    # Norms take one pass, but overflow for entries that are finite.
    norms = _norms(list(grads.values())).to(device)
    doubts, large = [], [~(norms < _LARGE).all()]
    for grad, history, strength in corrected:
        bounds = _norms([grad, history]) * torch.tensor([1 + strength, strength], device=device)
        doubts.append(~(bounds.sum() <= torch.finfo(grad.dtype).max))
        large.append(~(bounds.sum() < _LARGE))
    verdicts = torch.stack([torch.stack(large + doubts).any(), torch.stack(large).any()])
    known = torch.tensor(flags, dtype=torch.int32).to(device)
    *found, doubtful, is_large = _maximum(torch.cat([known, verdicts.to(torch.int32)]), groups)
    finite = True
    if doubtful:
        finite = all(bool(grad.isfinite().all()) for grad in grads.values()) and all(
            _is_finite_corrected(*each) for each in corrected
        )
        [not_finite] = _maximum(torch.tensor([not finite], dtype=torch.int32, device=device), groups)
        finite = not not_finite
    return found, finite, bool(is_large)


def _is_misplaced(param: Tensor) -> bool:
    """Whether a parameter's gradient is placed in another way than the parameter."""
    dtensor, grad = as_dtensor(param), None if param.grad is None else as_dtensor(param.grad)
    return dtensor is not None and grad is not None and grad.placements != dtensor.placements


def _placed_like(param: Tensor) -> Tensor:
    """The local part of a parameter's gradient, after placing it like the parameter."""
    dtensor, grad = as_dtensor(param), param.grad
    assert grad is not None
    return local_part(as_dtensor(grad).redistribute(dtensor.device_mesh, dtensor.placements))


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
    return torch.stack(norms) if norms else torch.zeros(0)


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
