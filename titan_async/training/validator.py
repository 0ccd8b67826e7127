"""torchtitan's validator, which also validates at the last step and computes the unigram entropy."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import Validator
from torchtitan.trainer import Trainer

from titan_async.data import unigram_entropy
from titan_async.pipelining.recording import Kind
from titan_async.training.callbacks import Callback
from titan_async.training.dataloader import TextDataLoader
from titan_async.training.telemetry.recording import Recorded

__all__ = ["AsyncValidator"]


class AsyncValidator(Validator, Recorded, Callback):
    """Evaluates the newest weights. The pipeline must be empty, so the trainer drains it first."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        dataloader: BaseDataLoader.Config = field(
            default_factory=lambda: TextDataLoader.Config(split="validation", shuffle=False)
        )
        """DataLoader configuration for validation"""

    last_step: int | None = None
    """A step after which to validate, whatever `freq` is."""

    def before_first_step(self, trainer: Trainer) -> None:
        """Note the last step."""
        self.last_step = trainer.config.training.steps

    def should_validate(self, step: int) -> bool:
        return step % self.config.freq == 0 or step == self.last_step

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        self._counts: torch.Tensor | None = None
        with self.recording.span(Kind.VALIDATE, step):
            super().validate(model_parts, step)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[nn.Module]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        counts = labels[labels != IGNORE_INDEX].flatten().bincount(minlength=self.tokenizer.get_vocab_size())
        self._counts = counts if self._counts is None else self._counts + counts
        return super().post_dataloading_process(input_dict, labels, model_parts)

    def unigram_entropy(self) -> float:
        """The unigram entropy in nats of the tokens of this rank's last validation.

        It is the loss of the best model without any context. NaN before the first validation.
        """
        counts = getattr(self, "_counts", None)
        if counts is None:
            return math.nan
        return unigram_entropy(counts.cpu().numpy())
