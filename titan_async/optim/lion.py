"""Lion: the sign of a momentum as the update, so that every entry moves by the learning rate.

Source: arXiv 2302.06675 ("Symbolic Discovery of Optimization Algorithms"), Algorithm 2. The sign is the
linear-minimization oracle of the largest entry, as Muon's orthogonalization is that of the largest
singular value: the size of an update does not depend on the size of the gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from titan_async.local_tensors import local_part
from titan_async.optim.param_checks import check_duplicates, check_rates
from titan_async.optim.tensors import at_least_float32, copy_unless_, named, skips

__all__ = ["Lion"]


class Lion(Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay.

    For a gradient G of a parameter W, with betas (b1, b2) and learning rate lr (arXiv 2302.06675,
    Algorithm 2):

        U <- sign(b1 M + (1 - b1) G)
        W <- (1 - lr weight_decay) W - lr U
        M <- b2 M + (1 - b2) G

    With betas (0, 0) it is signSGD, with b1 = b2 Signum. An entry whose interpolation is zero only decays. A
    parameter without a gradient is left alone: no decay, no change of its momentum.

    Parameters are real, of any number of dimensions and elements. They may be DTensors of any placement,
    with gradients placed alike: the update is elementwise and there is no communication.

    State: ``momentum_buffer``, of the parameter's shape and placement, in its dtype but at least float32,
    made for every trainable parameter when it is given to the optimizer. Loading keeps that dtype, where
    torch's optimizers would round it to a bfloat16 parameter's.

    Args:
        params: parameters, named parameters, or groups. Keys of a group that Lion does not know are kept.
        lr: learning rate, a number or a tensor with one element. About a tenth of AdamW's.
        betas: coefficients b1 of the update and b2 of the momentum.
        weight_decay: decoupled weight decay. About ten times AdamW's, so that lr weight_decay is alike.

    Raises:
        ValueError: a parameter that is not real and floating-point, or that is given twice, or an option out
            of its range.
        RuntimeError: a sparse gradient or one placed unlike its parameter, in `step`, before any change.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> weight.grad = torch.tensor([5.0, -0.1, 0.0])
        >>> Lion([weight], lr=0.25).step()
        >>> weight.tolist()
        [-0.25, 0.25, 0.0]
    """

    found_inf: Tensor | None = None
    """A float32 scalar on the parameters' device, 1 if the next steps are to change nothing; see
    `set_found_inf`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; raises as the constructor does, and then leaves no trace."""
        check_duplicates(self, self.param_groups, param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
            for param, name in zip(group["params"], names, strict=True):
                if not param.is_floating_point():
                    raise ValueError(
                        f"Lion updates real floating-point parameters, "
                        f"but {named(param, name)} is {param.dtype}"
                    )
        except ValueError:
            self.param_groups.pop()
            raise
        for param in group["params"]:
            if param.requires_grad:
                self._momentum(param)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is handed back.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [
            [param for param in group["params"] if param.grad is not None] for group in self.param_groups
        ]
        for param in chain.from_iterable(moving):
            _check_gradient(param)
        for group, params in zip(self.param_groups, moving, strict=True):
            if params:
                _update(params, [self._momentum(param) for param in params], group, skips(self.found_inf))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; a parameter without a saved momentum starts with zeros.

        Raises:
            ValueError: a momentum of another shape than its parameter's, or groups that do not match.
        """
        loaded: dict[str, Any] = {}

        def remember(_: Optimizer, final: dict[str, Any]) -> None:
            for param, saved in _saved_momenta(final, self.param_groups):
                if saved is not None and saved.shape != param.shape:
                    raise ValueError(
                        f"the momentum of shape {list(saved.shape)} does not fit {named(param, None)}: load "
                        f"the state of a Lion with the same parameters in the same order"
                    )
            loaded.update(final)

        def restore(_: Optimizer) -> None:
            self._load_momenta(loaded)

        # Registered last and first: other hooks may still replace what is loaded, and see the result.
        with (
            self.register_load_state_dict_pre_hook(remember),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ):
            super().load_state_dict(state_dict)

    @torch.no_grad()
    def _load_momenta(self, state_dict: dict[str, Any]) -> None:
        for param, saved in _saved_momenta(state_dict, self.param_groups):
            self.state[param].pop("momentum_buffer", None)
            if saved is not None:
                local_part(self._momentum(param)).copy_(local_part(saved))
            elif param.requires_grad:
                self._momentum(param)

    def _momentum(self, param: Tensor) -> Tensor:
        """The momentum of a parameter, made if there is none, and moved to where the parameter is now."""
        state = self.state[param]
        momentum: Tensor | None = state.get("momentum_buffer")
        dtype = at_least_float32(param.dtype)
        # A module may be moved or converted after its optimizer was made.
        if momentum is None or (momentum.is_meta and not param.is_meta):
            momentum = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        elif momentum.device != param.device or momentum.dtype != dtype:
            momentum = momentum.to(device=param.device, dtype=dtype)
        state["momentum_buffer"] = momentum
        return momentum


def _saved_momenta(
    state_dict: dict[str, Any], groups: list[dict[str, Any]]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Every parameter with its momentum in a state dict; torch itself refuses groups that do not match."""
    for saved_group, group in zip(state_dict["param_groups"], groups, strict=False):
        for key, param in zip(saved_group["params"], group["params"], strict=False):
            yield param, state_dict["state"].get(key, {}).get("momentum_buffer")


def _update(params: list[Tensor], momenta: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
    """One step of the parameters of a group, in place on them and on their momenta, unless ``skip``."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    weights = [local_part(param) for param in params]
    momenta = [local_part(momentum) for momentum in momenta]
    grads = [
        local_part(param.grad).to(momentum.dtype)
        for param, momentum in zip(params, momenta, strict=True)
        if param.grad is not None
    ]
    # Not by lerp: it takes the difference of a gradient and the momentum, which overflows for large ones.
    update = torch._foreach_mul(momenta, beta1)
    torch._foreach_add_(update, grads, alpha=1 - beta1)
    torch._foreach_sign_(update)
    # -1, 0 and 1 are exact in every dtype, and operations on lists are fast in one.
    signs = [sign.to(weight.dtype) for sign, weight in zip(update, weights, strict=True)]
    for kept, added, factor, alpha in (
        (weights, signs, 1 - lr * group["weight_decay"], -lr),
        (momenta, grads, beta2, 1 - beta2),
    ):
        moved = kept if skip is None else [each.clone() for each in kept]
        torch._foreach_mul_(moved, factor)
        torch._foreach_add_(moved, added, alpha=alpha)
        if skip is not None:
            for target, value in zip(kept, moved, strict=True):
                copy_unless_(skip, target, value)


def _check_gradient(param: Tensor) -> None:
    assert param.grad is not None
    if param.grad.layout != torch.strided:
        raise RuntimeError(
            f"Lion needs dense gradients; that of {named(param, None)} is {param.grad.layout}: build the "
            f"embedding with sparse=False"
        )
    placed, grad_placed = getattr(param, "placements", None), getattr(param.grad, "placements", None)
    if placed != grad_placed:
        raise RuntimeError(
            f"Lion needs gradients placed like their parameters; {named(param, None)} is placed {placed} and "
            f"its gradient {grad_placed}: redistribute the gradient first"
        )


def _check_options(group: dict[str, Any]) -> None:
    check_rates(group)
    betas = group["betas"]
    if not (isinstance(betas, Sequence) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise ValueError(f"betas must be two numbers, each at least 0 and below 1, not {betas!r}")
    group["betas"] = tuple(betas)
