"""Lion: the update is the sign of a momentum, so that every entry moves by the learning rate.

Source: arXiv 2302.06675 ("Symbolic Discovery of Optimization Algorithms"), Algorithm 2. The sign is the
linear minimization oracle of the maximum norm, as Muon's orthogonalization is that of the spectral norm: the
magnitude of an update does not depend on that of the gradient.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from titan_async.local_tensors import local_part
from titan_async.optim.base import BaseOptimizer, check_lr_and_weight_decay, describe
from titan_async.optim.elementwise import at_least_float32, copy_unless_, should_skip

__all__ = ["Lion"]


class Lion(BaseOptimizer):
    """Sign of an interpolated momentum, with decoupled weight decay.

    For a gradient G of a parameter W, with betas (b1, b2) and learning rate lr (arXiv 2302.06675,
    Algorithm 2):

        U <- sign(b1 M + (1 - b1) G)
        W <- (1 - lr weight_decay) W - lr U
        M <- b2 M + (1 - b2) G

    With betas (0, 0) it is signSGD, with b1 = b2 Signum. An entry whose interpolation is zero only decays. A
    parameter without a gradient is skipped: it does not decay, and its momentum does not change.

    Parameters are real, of any number of dimensions and elements. They may be DTensors of any placements,
    with gradients of the same placements: the update is elementwise, without communication.

    State: ``momentum_buffer``, of the parameter's shape and placements, in its dtype but at least float32,
    created for every trainable parameter when it is added to the optimizer. Loading keeps that dtype, while
    torch's optimizers would cast it to the parameter's.

    Args:
        params: parameters, named parameters, or groups. Unknown keys of a group are kept.
        lr: learning rate, a number or a tensor with one element. About a tenth of AdamW's.
        betas: coefficients b1 of the update and b2 of the momentum.
        weight_decay: decoupled weight decay. About ten times AdamW's, so that the product with lr is similar.

    Raises:
        ValueError: a parameter that is not real and floating-point, or that is given twice, or an option out
            of its range.
        RuntimeError: a sparse gradient, or one whose placements differ from its parameter's, in `step`,
            before any change.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> weight.grad = torch.tensor([5.0, -0.1, 0.0])
        >>> Lion([weight], lr=0.25).step()
        >>> weight.tolist()
        [-0.25, 0.25, 0.0]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _check_options(self, group: dict[str, Any]) -> None:
        check_lr_and_weight_decay(group)
        betas = group["betas"]
        if not (isinstance(betas, Sequence) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"betas must be two numbers, each at least 0 and below 1, not {betas!r}")
        group["betas"] = tuple(betas)

    def _check_param(self, param: Tensor, name: str | None, group: dict[str, Any]) -> None:
        if not param.is_floating_point():
            raise ValueError(
                f"Lion updates real floating-point parameters, but {describe(param, name)} is {param.dtype}"
            )

    def _step(self) -> None:
        self._create_state()
        moving = [
            [param for param in group["params"] if param.grad is not None] for group in self.param_groups
        ]
        for param in chain.from_iterable(moving):
            _check_gradient(param)
        for group, params in zip(self.param_groups, moving, strict=True):
            if params:
                momenta = [self.state[param]["momentum_buffer"] for param in params]
                _update(params, momenta, group, should_skip(self.found_inf))

    def _create_state_of(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        momentum: Tensor | None = state.get("momentum_buffer")
        dtype = at_least_float32(param.dtype)
        # A module may be moved or converted after its optimizer was created.
        if momentum is None or (momentum.is_meta and not param.is_meta):
            momentum = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        elif momentum.device != param.device or momentum.dtype != dtype:
            momentum = momentum.to(device=param.device, dtype=dtype)
        state["momentum_buffer"] = momentum


def _update(params: list[Tensor], momenta: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
    """Update the parameters of a group and their momenta in place, unless ``skip``."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    weights = [local_part(param) for param in params]
    momenta = [local_part(momentum) for momentum in momenta]
    grads = [
        local_part(param.grad).to(momentum.dtype)
        for param, momentum in zip(params, momenta, strict=True)
        if param.grad is not None
    ]
    # Not lerp: its difference of gradient and momentum overflows for large numbers.
    update = torch._foreach_mul(momenta, beta1)
    torch._foreach_add_(update, grads, alpha=1 - beta1)
    torch._foreach_sign_(update)
    # -1, 0 and 1 are exact in every dtype, and foreach operations are fast if all dtypes are equal.
    signs = [sign.to(weight.dtype) for sign, weight in zip(update, weights, strict=True)]
    for targets, added, factor, alpha in (
        (weights, signs, 1 - lr * group["weight_decay"], -lr),
        (momenta, grads, beta2, 1 - beta2),
    ):
        new = targets if skip is None else [target.clone() for target in targets]
        torch._foreach_mul_(new, factor)
        torch._foreach_add_(new, added, alpha=alpha)
        if skip is not None:
            for target, value in zip(targets, new, strict=True):
                copy_unless_(skip, target, value)


def _check_gradient(param: Tensor) -> None:
    assert param.grad is not None
    if param.grad.layout != torch.strided:
        raise RuntimeError(
            f"Lion needs dense gradients; that of {describe(param, None)} is {param.grad.layout}: build the "
            f"embedding with sparse=False"
        )
    placements = getattr(param, "placements", None)
    grad_placements = getattr(param.grad, "placements", None)
    if placements != grad_placements:
        raise RuntimeError(
            f"Lion needs gradients with the placements of their parameters; {describe(param, None)} has "
            f"{placements} and its gradient {grad_placements}: redistribute the gradient first"
        )
