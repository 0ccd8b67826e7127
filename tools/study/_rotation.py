"""AdamW in a basis rotated towards the eigenvectors of the curvature (arXiv 2602.03515).

According to that paper, a delay harms Adam most if its coordinates are not aligned with the Hessian's
eigenvectors. For a matrix G it therefore applies Adam to U^T G V. This is the paper's variant with both sides
rotated and U, V from the first moment M: the eigenvectors of M M^T and of M^T M, tracked by one power
iteration every few updates. With U and V from the averaged G G^T and G^T G it would be SOAP.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

__all__ = ["RotatedAdamW"]

_EVERY = 10  # updates between two rotations of the basis, as for SOAP in this study


class RotatedAdamW(Optimizer):
    """AdamW that updates matrices in a rotated basis, and vectors as usual."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state.update(step=0, first=torch.zeros_like(param), second=torch.zeros_like(param))
        state["step"] += 1
        first, second = state["first"], state["second"]
        first.lerp_(grad, 1 - beta1)
        if param.ndim > 1 and state["step"] % _EVERY == 1:
            state["left"], state["right"] = _basis(first, state.get("left"), state.get("right"))

        second.lerp_(_rotated(grad, state).square(), 1 - beta2)
        root = (second / (1 - beta2 ** state["step"])).sqrt().add_(group["eps"])
        update = _rotated(first, state) / (1 - beta1 ** state["step"]) / root
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(_rotated_back(update, state), alpha=-group["lr"])


def _basis(first: Tensor, left: Tensor | None, right: Tensor | None) -> tuple[Tensor, Tensor]:
    if left is None or right is None:
        left, _, right_t = torch.linalg.svd(first)
        return left, right_t.mT
    left, _ = torch.linalg.qr(first @ (first.mT @ left))
    right, _ = torch.linalg.qr(first.mT @ (first @ right))
    return left, right


def _rotated(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    return state["left"].mT @ matrix @ state["right"] if "left" in state else matrix


def _rotated_back(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    return state["left"] @ matrix @ state["right"].mT if "left" in state else matrix
