"""Corrections for a delay that the library does not have.

These are extrapolated weights, gradients extrapolated to the newest weights, and a pipeline without weight
stashing.

With y the sum of an optimizer's own displacements D_b, error feedback of strength s trains at
W[b+1] = y[b+1] + s D_b: the last displacement is added once more (except the first, which is uncorrected). So
the gradient is evaluated s updates further ahead. `SmoothedFeedback` uses an average of the displacements
instead of the last one; `Prediction` moves the weights only for the forward and backward of a batch.
"""

from collections import deque
from collections.abc import Sequence

import torch
from _model import language_loss
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

__all__ = ["AdaptiveStrength", "PaciGradients", "Prediction", "SmoothedFeedback", "compensate_gradients_"]


class SmoothedFeedback:
    """Error feedback with an average of displacements, which has less of the noise of the last batch.

    With E_b = smoothing E_{b-1} + (1 - smoothing) D_b the update is D_b + strength (E_b - E_{b-1}). For
    smoothing 0 this is the library's level "update". It also needs one buffer of the parameters' size.
    """

    def __init__(self, params: list[nn.Parameter], strength: float, smoothing: float) -> None:
        self._params, self._strength, self._smoothing = params, strength, smoothing
        self._average: list[Tensor] | None = None
        self._before: list[Tensor] = []

    def before_step(self) -> None:
        self._before = [param.detach().clone() for param in self._params]

    @torch.no_grad()
    def after_step(self) -> None:
        displacements = [now - old for now, old in zip(self._params, self._before, strict=True)]
        if self._average is None:
            self._average = displacements
            return
        for param, average, displacement in zip(self._params, self._average, displacements, strict=True):
            change = (1 - self._smoothing) * (displacement - average)
            average.add_(change)
            param.add_(change, alpha=self._strength)


class Prediction:
    """Moves the weights ahead for forward and backward of a batch (SpecTrain, arXiv 1809.02839; XPipe,
    arXiv 1911.04610), here by the last displacement that was known at the start of the batch.

    Those papers use the same displacement for SGD with momentum and for Adam. `horizon` is the number of
    updates by which the weights are moved ahead; for a delay of one update it is one.
    """

    def __init__(self, params: list[nn.Parameter], horizon: float) -> None:
        self._params, self._horizon = params, horizon
        self._newest = [param.detach().clone() for param in params]
        self._displacements: deque[list[Tensor]] = deque(maxlen=2)

    @torch.no_grad()
    def move(self) -> None:
        """Call it inside ``batch()`` with a delay of one, where the weights are those of one update ago."""
        if len(self._displacements) == 2:
            torch._foreach_add_(self._params, self._displacements[0], alpha=self._horizon)

    def after_step(self) -> None:
        newest = [param.detach().clone() for param in self._params]
        self._displacements.append(torch._foreach_sub(newest, self._newest))
        self._newest = newest


class AdaptiveStrength:
    """Sets the strength of error feedback to the cosine between the last two histories, and at least to 0.

    Extrapolation is safe if successive updates (or gradients) agree; if they are noise, it doubles it.
    """

    def __init__(self, optimizers: list[Optimizer], level: str) -> None:
        self._optimizers, self._key = optimizers, f"error_feedback_{level}"
        self._last: Tensor | None = None
        self.values: list[float] = []
        """The strengths so far, one per update."""

    def after_step(self) -> None:
        now = torch.cat(
            [
                optimizer.state[param][self._key].flatten()
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                for param in group["params"]
            ]
        )
        if self._last is not None:
            strength = max(0.0, float(torch.cosine_similarity(now, self._last, dim=0)))
            for optimizer in self._optimizers:
                optimizer.strength = strength
        self.values.append(self._optimizers[0].strength)
        self._last = now


@torch.no_grad()
def compensate_gradients_(params: Sequence[nn.Parameter], old: Sequence[Tensor], curvature: float) -> None:
    """Extrapolates gradients of `params` from the weights `old` to the newest weights, as DC-ASGD does.

    From arXiv 1609.08326, equation 10: g is extrapolated by a Taylor series whose Hessian is replaced by the
    diagonal of g g^T, g + curvature * g * g * (newest weights - old weights).

    PipeDream-2BW keeps both versions of the weights anyway. If g is mostly noise, the diagonal of the
    empirical Fisher matrix is about n times g * g for a batch of n samples; the paper uses at most 0.04.
    """
    for param, weights in zip(params, old, strict=True):
        assert param.grad is not None
        param.grad.addcmul_(param.grad.square(), param - weights, value=curvature)


class PaciGradients:
    """Gradients of a pipeline without weight stashing whose updates are less frequent by accumulation.

    This is PACI, arXiv 2606.07881, with as many microbatches as stages. Each stage updates as soon as its
    batch is complete, and the backward of a microbatch uses the current weights, even if its forward used
    those before the update. With 1F1B's order and d stages, this affects the first d - 1 - r of the m
    microbatches of a batch on stage r; all others are consistent.
    """

    def __init__(self, model: nn.Module, stages: list[list[nn.Parameter]]) -> None:
        self._model, self._stages = model, stages
        self._older: dict[nn.Parameter, Tensor] = {}

    def backward(self, inputs_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Accumulates the mean gradient of the batch; returns its cross-entropy."""
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
        # Through .data, which autograd does not track: the backward uses the current weights.
        param.data.copy_(weights[param])
