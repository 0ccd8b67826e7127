"""AdamW's update and its correction by error feedback, compiled into one pass over memory.

AdamW alone moves 28 bytes per float32 parameter between memory and processor: it reads weight, gradient and
two moments, and writes all but the gradient. In one pass, the correction adds 8 bytes, for reading and
writing the history.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from titan_async.local_tensors import local_part

__all__ = ["supports_compiled_update", "update_and_correct_"]


def supports_compiled_update(optimizer: Optimizer, moving: Sequence[Tensor]) -> bool:
    """Whether `update_and_correct_` supports the next update of these parameters by an AdamW."""
    return (
        len({param.device for param in moving}) == 1
        and not any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups)
        and all(
            param.dtype in (torch.float32, torch.float64)
            and param.grad is not None
            and param.grad.layout == torch.strided
            and "exp_avg" in optimizer.state.get(param, {})
            for param in moving
        )
    )


@torch.no_grad()
def update_and_correct_(
    optimizer: Optimizer, history: Mapping[Tensor, Tensor], strength: float, skip: Tensor | None
) -> None:
    """Update the parameters that have a gradient as AdamW does, and correct the update.

    Args:
        optimizer: the AdamW that has the groups, parameters and state.
        history: for each parameter, its displacement in the last update; overwritten by that of this one.
        strength: of the correction.
        skip: a bool scalar on the device, true to change nothing.
    """
    compiled = _compiled()
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            continue
        states = [optimizer.state[param] for param in params]
        steps = [state["step"] for state in states]
        # As tensors: torch.compile would recompile for each new value of a constant.
        count = torch.stack(steps).to(params[0].device, torch.float64) + 1
        (beta1, beta2), lr = group["betas"], group["lr"]
        columns = (
            1 - beta1,
            1 - beta2,
            group["eps"],
            1 - lr * group["weight_decay"],
            lr / (1 - beta1**count),
            (1 - beta2**count).rsqrt(),
            strength,
        )
        factors = torch.stack([column * torch.ones_like(count) for column in columns], dim=1)
        # All views before the first kernel, which evicts the cache.
        inputs = [
            _flat(param, param.grad, state["exp_avg"], state["exp_avg_sq"], history[param], row)
            for param, state, row in zip(params, states, factors.unbind(), strict=True)
        ]
        for tensors in inputs:
            if tensors[0].numel():  # a shard may have none
                compiled(*tensors, skip)
        # Last: a missing compiler raises above, before any change.
        increment = 1.0 if skip is None else 1.0 - skip.float()
        for step in steps:
            step.add_(increment)


def _flat(*tensors: Tensor) -> list[Tensor]:
    """The local parts, flat if they are contiguous, so that one kernel serves any number of dimensions."""
    parts = [local_part(tensor) for tensor in tensors]
    if all(part.is_contiguous() for part in parts):
        parts = [part.view(-1) for part in parts]
    return [part.detach() for part in parts]  # otherwise the compiler tracks the bases of the views


@functools.cache
def _compiled() -> Callable[..., None]:
    # On first use: importing the compiler takes seconds.
    return torch.compile(_update_and_correct_, dynamic=True)


def _update_and_correct_(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    history: Tensor,
    factors: Tensor,
    skip: Tensor | None,
) -> None:
    rate1, rate2, eps, decay, size, root, strength = factors.unbind()
    new_mean = mean + rate1 * (grad - mean)
    new_square = square + rate2 * (grad * grad - square)
    proposed = decay * weight - size * new_mean / (root * new_square.sqrt() + eps)
    displacement = proposed - weight
    corrected = proposed + strength * (displacement - history)
    for old, new in ((weight, corrected), (mean, new_mean), (square, new_square), (history, displacement)):
        old.copy_(new if skip is None else torch.where(skip, old, new))
