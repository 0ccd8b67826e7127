"""The term by which DC-ASGD brings a late gradient to the newest weights (arXiv 1609.08326, equation 10).

g at the old weights is extrapolated by a Taylor series whose Hessian is replaced by the diagonal of g g^T:

    g + curvature * g * g * (newest weights - old weights)

PipeDream-2BW holds both versions of the weights anyway. Where g is mostly noise, the diagonal of the
empirical Fisher matrix is about n times g * g for a batch of n samples; the paper weights it 0.04 or less.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["compensate_gradients_"]


@torch.no_grad()
def compensate_gradients_(params: Sequence[nn.Parameter], old: Sequence[Tensor], curvature: float) -> None:
    """Add the term to the gradients of `params`, which were taken at the weights `old`."""
    for param, weights in zip(params, old, strict=True):
        assert param.grad is not None
        param.grad.addcmul_(param.grad.square(), param - weights, value=curvature)
