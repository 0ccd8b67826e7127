"""Checkpoints from which a delayed run goes on exactly as if it had not stopped."""

import os
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.checkpointer import CheckpointManager

from titan_async.training.optimizer import FEEDBACK_KEY

__all__ = ["NEXT_WEIGHTS", "AsyncCheckpointer"]

NEXT_WEIGHTS = "next_weights"
"""In the training state: the weights that the next batch reads, one update older than the model's."""


class AsyncCheckpointer(CheckpointManager):
    """torchtitan's checkpointer, which can also start a delayed run from a synchronous one's checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        if "train_state" in state_dict and not from_hf:
            keys = FileSystemReader(os.fspath(checkpoint_id)).read_metadata().state_dict_metadata
            # A synchronous run has no older weights, so the next batch reads the newest; and no history
            # of updates, so the first one is not corrected.
            state_dict["train_state"].resumes_delay = any(f".{NEXT_WEIGHTS}." in key for key in keys)
            state_dict["optimizer"].resumes_feedback = any(FEEDBACK_KEY in key for key in keys)
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
