"""Callbacks of the training loop: one class for each concern around a step."""

from typing import Literal, NamedTuple

from torch import Tensor
from torchtitan.trainer import Trainer

from titan_async.training.transfer import HostCopy

__all__ = ["Callback", "EndReason", "StepResult", "Update"]

EndReason = Literal["finished", "stopped", "failed"]


class Update(NamedTuple):
    """An update that the optimizers have just made, or skipped."""

    norm: HostCopy
    """Of the gradient before clipping; the host can read it a step later without waiting."""
    skip: Tensor
    """A bool scalar on the device: whether the gradient is not finite, and the update is a no-op."""
    found_finite: bool
    """False if an optimizer itself found a non-finite gradient, which only a hook can cause."""


class StepResult(NamedTuple):
    """The values of a step that are reported."""

    loss: Tensor
    """This rank's share of the batch's loss; 0 on a rank without the last stage."""
    local_valid_tokens: int
    global_valid_tokens: Tensor


class Callback:
    """Hooks of the training loop; none of them does anything by default.

    `AsyncTrainer` calls each hook of all its callbacks, in the order of `AsyncTrainer.callbacks`, and
    `after_training` in reverse order. A component of torchtitan's trainer (optimizers, metrics, checkpointer,
    validator) that is a `Callback` comes first. `trainer` is the calling trainer.
    """

    def before_training(self, trainer: Trainer) -> None:
        """Before a checkpoint is loaded."""

    def before_first_step(self, trainer: Trainer) -> None:
        """Before the first step of this process; `trainer.step` is its number."""

    def before_batch(self, trainer: Trainer) -> None:
        """The batch of this step is on the device; its forwards follow."""

    def before_clip(self, trainer: Trainer) -> None:
        """A gradient is complete, in `.grad`, and not clipped."""

    def after_update(self, trainer: Trainer, update: Update) -> None:
        """An update was made or skipped."""

    def after_batch(self, trainer: Trainer) -> None:
        """All microbatches of the step, and its update, were launched."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """The step is over, with the drain of the pipeline if a validation or a save follows."""

    def before_pause(self, trainer: Trainer) -> None:
        """A validation, a save or the end of training follows; a callback may wait for the device."""

    def after_training(self, trainer: Trainer, reason: EndReason) -> None:
        """Training has ended, for any reason."""
