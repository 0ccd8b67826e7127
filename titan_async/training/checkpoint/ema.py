"""The section `[ema]`, and the exponential moving average of the weights, which checkpoints hold too."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchtitan.trainer import Trainer

from titan_async.local_tensors import local_part
from titan_async.training.callbacks import Callback, Update
from titan_async.training.models.tying import stored_name

__all__ = ["EmaConfig", "WeightAverage", "keeps_average"]


@dataclass(kw_only=True, slots=True)
class EmaConfig:
    """An exponential moving average of the weights, saved as `train_state.ema_weights`."""

    decay: float = 0.0
    """The decay of the average at each update, such as 0.999; the weights are added with a share of 1 -
    decay. The average starts from the weights before the first update. 0 keeps no average. It costs a copy of
    the parameters, with their sharding."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"ema.decay is {self.decay}: set it to a number from 0, which keeps no average, to below 1, "
                "such as 0.999"
            )


def keeps_average(config: Trainer.Config) -> bool:
    """Whether a run with this configuration averages its weights."""
    return config.ema.decay > 0


class WeightAverage(Callback):
    """An exponential moving average of trainable parameters; each rank averages its own shards.

    Args:
        parts: modules whose parameters' names are unique among them. An average has its parameter's dtype,
            and as a DTensor its sharding.
        decay: between 0 and 1; see `EmaConfig`.
    """

    def __init__(self, parts: Iterable[nn.Module], decay: float) -> None:
        self._decay = decay
        self._weights = {
            stored_name(part, name): parameter
            for part in parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        self._averages = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._begun = False

    def before_clip(self, trainer: Trainer) -> None:
        """Start from the weights before the first update; the first batch has made copies of tied weights
        equal."""
        self.begin()

    def after_update(self, trainer: Trainer, update: Update) -> None:
        """Include the updated weights, unless the update was skipped."""
        if update.found_finite:
            self.update(update.skip)

    @torch.no_grad()
    def begin(self) -> None:
        """Start from the current weights, unless it has started or was loaded."""
        if not self._begun:
            torch._foreach_copy_(*self._local())
            self._begun = True

    @torch.no_grad()
    def update(self, skip: Tensor | None = None) -> None:
        """Include the weights of the latest update. No communication.

        Args:
            skip: a bool scalar on the device; if it is true, the average does not change.
        """
        for average, weight in zip(*self._local(), strict=True):
            average.lerp_(weight if skip is None else torch.where(skip, average, weight), 1 - self._decay)

    def _local(self) -> tuple[list[Tensor], list[Tensor]]:
        return (
            [local_part(average) for average in self._averages.values()],
            [local_part(weight.detach()) for weight in self._weights.values()],
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The averages themselves, by the names of their parameters."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Continue from the averages of `state_dict`, which are sharded like these.

        Raises:
            KeyError: if one is missing.
        """
        for name, average in self._averages.items():
            local_part(average).copy_(local_part(state_dict[name]))
        self._begun = True
