"""Muon for matrices that lie whole on one rank: momentum, then orthogonalization.

Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon/). The spelling follows ``torch.optim.Muon`` where that has one,
and so do the bits on float32 matrices.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from titan_async.optim.local_tensors import holds_whole_tensor, local_part, named
from titan_async.optim.orthogonalization import (
    STANDARD_COEFFICIENTS,
    Coefficients,
    orthogonalize,
    resolve_coefficients,
)

__all__ = ["ADJUST_LR_CHOICES", "Muon"]

ADJUST_LR_CHOICES = ("original", "match_rms_adamw")
_COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class Muon(Optimizer):
    """Momentum whose update is orthogonalized, with decoupled weight decay.

    For a gradient G of a matrix W, with momentum m and learning rate lr::

        B <- m B + (1 - m) G
        U  = m B + (1 - m) G  if nesterov else  B
        W <- (1 - lr weight_decay) W - lr scale(rows, cols) orthogonalize(U)

    A parameter is a matrix ``[rows, cols]`` or a stack of them ``[experts, rows, cols]``, each matrix of
    which is updated as if it were a parameter of its own. Everything else (embeddings, norms, biases)
    belongs to another optimizer, such as AdamW. A parameter without a gradient is left alone: no decay,
    no change of its momentum.

    Parameters may be DTensors if this rank holds the whole tensor (a mesh of size 1, or replicated).
    State: ``momentum_buffer``, of the parameter's shape, dtype and placement, made for every trainable
    parameter of the optimizer in the first step.

    Args:
        params: parameters, named parameters, or groups. Keys of a group that Muon does not know are kept.
        lr: learning rate, a number or a tensor with one element.
        weight_decay: decoupled weight decay.
        momentum: coefficient m of the moving average of gradients.
        nesterov: look one step ahead along the momentum.
        ns_coefficients: ``"standard"`` or its triple ``(3.4445, -4.7750, 2.0315)``,
            ``"polar_express"`` (arXiv 2505.16932), another triple (a, b, c), or one triple an iteration.
        eps: guards the normalization of a zero matrix; see `orthogonalize`.
        ns_steps: number of iterations.
        adjust_lr: how the update is scaled to the matrix. ``"original"`` (also ``None``):
            sqrt(max(1, rows / cols)). ``"match_rms_adamw"``: 0.2 sqrt(max(rows, cols)), which makes the
            root mean square of the update about that of AdamW (arXiv 2502.16982, section 2.2).
        compute_dtype: dtype of the iterations: ``"bfloat16"``, ``"float32"``, ``"float64"``, or the
            torch dtype of that name.

    Raises:
        ValueError: a parameter that is no real floating-point matrix or stack of matrices, or an option
            out of its range.
        NotImplementedError: a parameter of which this rank holds a shard only.
        RuntimeError: a sparse gradient, in `step`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = STANDARD_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr: str | None = None,
        compute_dtype: torch.dtype | str = "bfloat16",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
            "compute_dtype": compute_dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; raises as the constructor does, and then leaves no trace."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
            for param, name in zip(group["params"], names, strict=True):
                _check_parameter(param, name)
        except (ValueError, NotImplementedError):
            self.param_groups.pop()
            raise

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
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad and "momentum_buffer" not in self.state[param]:
                    # Also without a gradient: a checkpoint can only be loaded into state that exists.
                    self.state[param]["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
                if param.grad is not None:
                    _update(param, self.state[param]["momentum_buffer"], group)
        return loss


def _update(param: Tensor, momentum_buffer: Tensor, group: dict[str, Any]) -> None:
    """One step of one parameter, in place on it and on its momentum."""
    if param.grad is None or param.grad.is_sparse:
        raise RuntimeError(f"Muon needs dense gradients; that of {named(param, None)} is sparse")
    if not holds_whole_tensor(param.grad):
        raise RuntimeError(
            f"Muon needs the whole gradient on this rank, but has a part for {named(param, None)}"
        )
    weight = local_part(param)
    momentum = local_part(momentum_buffer)
    grad = local_part(param.grad).to(momentum.dtype)

    momentum.lerp_(grad, 1 - group["momentum"])
    update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    update = orthogonalize(
        update,
        resolve_coefficients(group["ns_coefficients"], group["ns_steps"]),
        eps=group["eps"],
        compute_dtype=_COMPUTE_DTYPES[group["compute_dtype"]],
    )
    lr = float(group["lr"])
    weight.mul_(1 - lr * group["weight_decay"])
    weight.add_(update, alpha=-lr * _scale(weight.shape, group["adjust_lr"]))


def _scale(shape: torch.Size, adjust_lr: str) -> float:
    """Factor on the learning rate for a matrix, or a stack of matrices, of this shape."""
    # The last two dimensions: the first one of a stack counts experts.
    rows, cols = shape[-2:]
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1, rows / cols))


def _check_options(group: dict[str, Any]) -> None:
    """Check a group's options, and put them into the form in which a checkpoint holds them."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element, but has shape {list(lr.shape)}")
    for key in ("lr", "weight_decay"):
        if not (float(group[key]) >= 0 and math.isfinite(group[key])):
            raise ValueError(f"{key} must be a finite number, zero or more, not {group[key]!r}")
    if not (group["eps"] > 0 and math.isfinite(group["eps"])):
        raise ValueError(f"eps must be a finite number above zero, not {group['eps']!r}")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, not {group['momentum']!r}")
    if group["adjust_lr"] is None:
        group["adjust_lr"] = "original"
    if group["adjust_lr"] not in ADJUST_LR_CHOICES:
        choices = ", ".join(repr(choice) for choice in ADJUST_LR_CHOICES)
        raise ValueError(f"unknown adjust_lr {group['adjust_lr']!r}: choose {choices}")
    compute_dtype = str(group["compute_dtype"]).removeprefix("torch.")
    if compute_dtype not in _COMPUTE_DTYPES:
        choices = ", ".join(repr(choice) for choice in _COMPUTE_DTYPES)
        raise ValueError(f"unknown compute_dtype {compute_dtype!r}: choose {choices}")
    group["compute_dtype"] = compute_dtype
    triples = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
    if not isinstance(group["ns_coefficients"], str):
        group["ns_coefficients"] = triples[0] if len(set(triples)) == 1 else triples


def _check_parameter(param: Tensor, name: str | None) -> None:
    if param.ndim not in (2, 3):
        raise ValueError(
            f"Muon updates matrices [rows, cols] and stacks of them [experts, rows, cols]; "
            f"give {named(param, name)} to AdamW instead"
        )
    if not param.is_floating_point():
        raise ValueError(
            f"Muon updates real floating-point parameters, but {named(param, name)} is {param.dtype}"
        )
    if not holds_whole_tensor(param):
        raise NotImplementedError(
            f"Muon cannot yet update {named(param, name)}, of which this rank holds a shard only: "
            f"use a data-parallel degree of 1, or give it to AdamW"
        )
