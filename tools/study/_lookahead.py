"""Weights extrapolated beyond their updates: alternatives to the library's error feedback.

With y the weights that an optimizer's own displacements D_b add up to, error feedback of strength s trains
at W[b+1] = y[b+1] + s D_b: the last displacement once more (but for the first, which it leaves uncorrected).
The gradient is thus taken s updates ahead of where it would be. `SmoothedFeedback` takes an average of the
displacements in place of the last one; `Prediction` leaves the weights alone and moves them for a batch only.
"""

from collections import deque

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

__all__ = ["AdaptiveStrength", "Prediction", "SmoothedFeedback"]


class SmoothedFeedback:
    """Error feedback whose look-ahead is an average of displacements: less of the noise of the last batch.

    With E_b = smoothing E_{b-1} + (1 - smoothing) D_b the update is D_b + strength (E_b - E_{b-1}), which is
    the library's level "update" for smoothing 0, and needs one buffer of the parameters' size as that does.
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
    arXiv 1911.04610), here by the last displacement that was known when the batch began.

    For SGD with momentum and for Adam that displacement is what those papers predict with. `horizon` is the
    number of updates that the weights are moved ahead; a delay of one update asks for one.
    """

    def __init__(self, params: list[nn.Parameter], horizon: float) -> None:
        self._params, self._horizon = params, horizon
        self._newest = [param.detach().clone() for param in params]
        self._displacements: deque[list[Tensor]] = deque(maxlen=2)

    @torch.no_grad()
    def move(self) -> None:
        """Call inside ``batch()`` at a delay of one: the weights are then those of one update ago."""
        if len(self._displacements) == 2:
            torch._foreach_add_(self._params, self._displacements[0], alpha=self._horizon)

    def after_step(self) -> None:
        newest = [param.detach().clone() for param in self._params]
        self._displacements.append(torch._foreach_sub(newest, self._newest))
        self._newest = newest


class AdaptiveStrength:
    """Sets the strength of error feedback to the cosine between the last two histories, and at least to 0.

    Where successive updates (or gradients) agree, extrapolating is safe; where they are noise, it doubles it.
    """

    def __init__(self, optimizers: list[Optimizer], level: str) -> None:
        self._optimizers, self._key = optimizers, f"error_feedback_{level}"
        self._last: Tensor | None = None
        self.values: list[float] = []
        """The strengths so far, one an update."""

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
