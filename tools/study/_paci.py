"""A pipeline without weight stashing whose updates are slowed by accumulation (PACI, arXiv 2606.07881).

Each stage updates as soon as its batch is complete, and a microbatch's backward uses the weights of that
moment, also where its forward used those before the update. With 1F1B's order and d stages, that is so for
the first d - 1 - r of the m microbatches of a batch on stage r; all others are consistent.
"""

import torch
from _model import language_loss
from torch import Tensor, nn

__all__ = ["PaciGradients"]


class PaciGradients:
    """Computes a batch's gradients as that pipeline would, with as many microbatches as stages."""

    def __init__(self, model: nn.Module, stages: list[list[nn.Parameter]]) -> None:
        self._model, self._stages = model, stages
        self._older: dict[nn.Parameter, Tensor] = {}

    def backward(self, inputs_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Accumulate the mean gradient of the batch; returns its cross-entropy."""
        newest = {param: param.detach().clone() for stage in self._stages for param in stage}
        count = len(self._stages)
        losses = []
        parts = zip(inputs_BL.chunk(count), targets_BL.chunk(count), strict=True)
        for index, (inputs, targets) in enumerate(parts):
            for stage, params in enumerate(self._stages):
                if self._older and index < count - 1 - stage:
                    _show(params, self._older)
            loss, objective = language_loss(self._model, inputs, targets)
            for params in self._stages:
                _show(params, newest)
            (objective / count).backward()
            losses.append(loss.detach())
        self._older = newest
        return torch.stack(losses).mean()


def _show(params: list[nn.Parameter], weights: dict[nn.Parameter, Tensor]) -> None:
    for param in params:
        # Through .data, which autograd does not track: the backward uses the weights of its own time.
        param.data.copy_(weights[param])
