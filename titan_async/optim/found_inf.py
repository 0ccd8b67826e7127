"""Steps that the device may skip, without synchronization with the host.

The protocol is that of `torch.amp.GradScaler` and torch's fused optimizers: an attribute ``found_inf`` of the
optimizer.
"""

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from titan_async.optim.error_feedback import ErrorFeedback
from titan_async.optim.lion import Lion
from titan_async.optim.muon import Muon

__all__ = ["set_found_inf"]


def set_found_inf(optimizer: Optimizer, found_inf: Tensor | None) -> bool:
    """Make the next steps of an optimizer conditional on a scalar that the host does not read.

    With 1 a step changes nothing: parameters, state and step counts keep their bits, whatever the gradients
    are. With 0 it is an ordinary step. The value may be overwritten between steps.

    Args:
        found_inf: a float32 scalar on the parameters' device, the same on all ranks that share parameters;
            None for unconditional steps.

    Returns:
        Whether the optimizer supports it: `Muon`, `Lion`, torch's Adam, AdamW and SGD if ``fused``, and
        `ErrorFeedback` around one that does. If not, nothing has been set.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([1.0, torch.nan])
        >>> lion = Lion([weight], lr=0.25)
        >>> set_found_inf(lion, torch.ones(()))
        True
        >>> lion.step()
        >>> weight.tolist()
        [1.0, 1.0]
    """
    if not _supports_found_inf(optimizer):
        return False
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    return True


def _supports_found_inf(optimizer: Optimizer) -> bool:
    while isinstance(optimizer, ErrorFeedback):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, (Muon, Lion)):
        return True
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.SGD:
        # torch allocates the momentum in the first step; if skipped, it would leave it uninitialized.
        return all(
            group["fused"]
            and (not group["momentum"] or optimizer.state.get(param, {}).get("momentum_buffer") is not None)
            for group in groups
            for param in group["params"]
            if param.requires_grad
        )
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(g["fused"] for g in groups)
