"""Checkpoints from which a delayed run goes on exactly as if it had not stopped."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager

from titan_async.pipelining.recording import Kind
from titan_async.training._titan_internals import saves_at
from titan_async.training.recording import Recording

__all__ = [
    "EMA_WEIGHTS",
    "NEXT_WEIGHTS",
    "RANDOM_STATE",
    "AsyncCheckpointer",
    "complete_steps",
    "save_for_resuming",
]

NEXT_WEIGHTS = "next_weights"
"""In the training state: the weights that the next batch reads, one update older than the model's."""

EMA_WEIGHTS = "ema_weights"
"""In the training state: the weights averaged over the updates."""

RANDOM_STATE = "random_state"
"""In the training state: the states of the random number generators, by `random_state.layout_key`."""

_INDEX = ".metadata"  # written last, so that a checkpoint without it is half-written


class AsyncCheckpointer(CheckpointManager):
    """torchtitan's checkpointer, for the states that are not in every checkpoint.

    A delayed run can start from a synchronous one's checkpoint, and any run from one of another layout.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    recording: Recording = Recording()

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        if not saves_at(self, curr_step, last_step):
            return super().save(curr_step, last_step)
        start = time.perf_counter()
        with self.recording.span(Kind.SAVE, curr_step):
            saved = super().save(curr_step, last_step)
        if saved:
            self.recording.write("checkpoint", step=curr_step, seconds=time.perf_counter() - start)
        return saved

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        trainer, optimizer = state_dict.get("train_state"), state_dict.get("optimizer")
        if (trainer or optimizer) and not from_hf:
            keys = FileSystemReader(os.fspath(checkpoint_id)).read_metadata().state_dict_metadata
            # A synchronous run has no older weights, so the next batch reads the newest; and no history
            # of updates, so the first one is not corrected. An average that was not kept starts from the
            # weights.
            if trainer:
                trainer.resumes_average = any(f".{EMA_WEIGHTS}." in key for key in keys)
                trainer.resumes_delay = any(f".{NEXT_WEIGHTS}." in key for key in keys)
                mine = f".{RANDOM_STATE}.{trainer.random_key}."
                trainer.resumes_random_state = any(mine in key for key in keys)
            if optimizer:
                prefix = "optimizer."
                optimizer.saved = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0 and "://" not in checkpoint_id:
            # An old checkpoint of this step stops being one before any rank writes over its files, which
            # the others do only after rank 0 has seen all their plans.
            Path(checkpoint_id, _INDEX).unlink(missing_ok=True)
        return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)


def complete_steps(folder: Path) -> list[int]:
    """The steps of which `folder` holds a whole checkpoint, in ascending order."""
    found = (re.fullmatch(r"step-(\d+)", path.parent.name) for path in folder.glob(f"step-*/{_INDEX}"))
    return sorted(int(match[1]) for match in found if match)


def save_for_resuming(checkpointer: BaseCheckpointManager, step: int) -> bool:
    """Save all state of `step` before returning, even where a last step would save the model alone.

    A collective over all ranks.

    Returns:
        False if the settings allow no save.
    """
    checkpointer.last_save_model_only = checkpointer.last_save_in_hf = False
    return checkpointer.save(step, last_step=True)
