"""AdamW in a basis that is turned towards the eigenvectors of the curvature (arXiv 2602.03515).

That paper finds that a delay harms Adam most where its coordinates are not those of the Hessian's
eigenvectors. For a matrix G it therefore lets Adam act on U^T G V. Of the paper's variants this is the one
with both sides turned and U, V those of the first moment M: eigenvectors of M M^T and of M^T M, followed by
one power iteration every few updates. With U and V of the averaged G G^T and G^T G it is SOAP.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

__all__ = ["RotatedAdamW"]

_EVERY = 10  # updates between two turns of the basis, as for SOAP in this study


class RotatedAdamW(Optimizer):
    """AdamW whose matrices are updated in a turned basis; vectors are updated as by AdamW."""

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
            state["left"], state["right"] = _turned(first, state.get("left"), state.get("right"))

        second.lerp_(_rotated(grad, state).square(), 1 - beta2)
        root = (second / (1 - beta2 ** state["step"])).sqrt().add_(group["eps"])
        update = _rotated(first, state) / (1 - beta1 ** state["step"]) / root
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(_rotated_back(update, state), alpha=-group["lr"])


def _turned(first: Tensor, left: Tensor | None, right: Tensor | None) -> tuple[Tensor, Tensor]:
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
