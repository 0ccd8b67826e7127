"""Checkpoints from which a delayed run goes on exactly as if it had not stopped."""

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import (
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    AsyncMode,
    BaseCheckpointManager,
    CheckpointManager,
)
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.tools.utils import GarbageCollection

from titan_async.checkpoint._dcp_internals import (
    INDEX,
    ChecksumReader,
    ChecksumWriter,
    CorruptCheckpointError,
    WeightsOnlyLoadPlanner,
    disk_error,
)
from titan_async.checkpoint.safetensors_files import INDEX as HF_INDEX
from titan_async.errors import UserError
from titan_async.pipelining.recording import Kind
from titan_async.training._titan_internals import saves_at
from titan_async.training.data import TextDataLoader
from titan_async.training.optimizer import AsyncOptimizers
from titan_async.training.recording import Recording
from titan_async.training.reporter import Reporter

__all__ = [
    "EMA_WEIGHTS",
    "NEXT_WEIGHTS",
    "RANDOM_STATE",
    "AsyncCheckpointer",
    "check_index",
    "complete_steps",
    "save_for_resuming",
]

NEXT_WEIGHTS = "next_weights"
"""In the training state: the weights that the next batch reads, one update older than the model's."""

EMA_WEIGHTS = "ema_weights"
"""In the training state: the weights averaged over the updates."""

RANDOM_STATE = "random_state"
"""In the training state: the states of the random number generators, by `random_state.layout_key`."""

_POSITION = "dataloader.dp_rank_"
"""In the key of each data-parallel rank's place in the data."""


class AsyncCheckpointer(CheckpointManager):
    """torchtitan's checkpointer, for the states that are not in every checkpoint.

    A delayed run can start from a synchronous one's checkpoint, and any run from one of another layout.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    recording: Recording = Recording()
    reporter: Reporter | None = None
    """Is told what does not count when a checkpoint is loaded."""
    _saving = Path()
    """The checkpoint that is being saved, or was last."""
    _most = 0
    """Checkpoints that are kept, or 0 for all."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if self.enable and "://" not in self.folder:
            # torchtitan's own removal leaves a last save out, and counts folders that are no checkpoints.
            self._most, self.keep_latest_k = self.keep_latest_k, 0

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """See `BaseCheckpointManager`.

        Raises:
            UserError: the disk does not take this checkpoint, or the one before, which was saved meanwhile.
        """
        if not saves_at(self, curr_step, last_step):
            return super().save(curr_step, last_step)
        start = time.perf_counter()
        with self._telling_of_disk(), self.recording.span(Kind.SAVE, curr_step):
            saved = super().save(curr_step, last_step)
        if saved:
            self.recording.write("checkpoint", step=curr_step, seconds=time.perf_counter() - start)
            if self.save_future is None:
                self._remove_old()
        return saved

    def load(self, step: int = -1) -> bool:
        """See `BaseCheckpointManager`. A collective.

        Options of the optimizers and learning rates are those of this run, whatever the checkpoint holds.
        """
        there = complete_steps(Path(self.folder)) if self.enable else []
        loaded = super().load(step)
        if not loaded:
            return False
        if there and self.initial_load_path:
            self._say(
                f"checkpoint.initial_load_path is not read: {self.folder} has checkpoints, and the run goes "
                f"on from step {there[-1] if step == -1 else step}"
            )
        schedulers, optimizers = self.states.get(LR_SCHEDULER), self.states.get(OPTIMIZER)
        if isinstance(schedulers, LRSchedulersContainer):
            _set_learning_rates(schedulers)
        if isinstance(optimizers, AsyncOptimizers):
            changed = _of_all_ranks(optimizers.changed)
            if changed:
                self._say(f"the recipe changes options of the checkpoint: {', '.join(changed)}")
        return True

    def _say(self, line: str) -> None:
        if self.reporter is not None:
            self.reporter.say(line)

    def maybe_wait_for_staging(self) -> None:
        """See `BaseCheckpointManager`.

        Raises:
            UserError: as `save`, as soon as it is known of a checkpoint that is saved meanwhile.
        """
        if self.enable and self.save_future is not None and self.save_future.done():
            with self._telling_of_disk():
                self.maybe_wait_for_saving()
        super().maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        """See `BaseCheckpointManager`."""
        is_saving = self.enable and self.save_future is not None
        super().maybe_wait_for_saving()
        if is_saving:
            self._remove_old()

    def _remove_old(self) -> None:
        """Remove what is not to be kept: older checkpoints than the latest, and what killed saves have left.

        The one just saved is kept in any case. The others stop being checkpoints at once; their files are
        removed in the background. With async saves, folders of later steps stay until a later save.
        """
        if not self._most or dist.get_rank() != 0:
            return
        folders = _folders(Path(self.folder))
        saved = next((step for step, path in folders if path == self._saving), None)
        if saved is not None and self.async_mode != AsyncMode.DISABLED:
            # Another rank, that learned of this save's end earlier, may have made the folder of the next one.
            folders = [(step, path) for step, path in folders if step <= saved]
        others = [path for _, path in folders if path != self._saving]
        whole = [path for path in others if _is_whole(path)]
        for path in set(others) - set(whole[-(self._most - 1) :]):
            if not path.is_symlink():  # what it leads to may be another run's
                with contextlib.suppress(OSError):
                    (path / INDEX).unlink(missing_ok=True)
                self.purge_queue.put(str(path))

    @contextlib.contextmanager
    def _telling_of_disk(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointException, OSError) as error:
            causes = (
                [cause for cause, _ in error.failures.values()]
                if isinstance(error, CheckpointException)
                else [error]
            )
            on_disk = [found for cause in causes if (found := disk_error(cause))]
            if not on_disk:
                raise
            if dist.get_rank() == 0 and not (self._saving / INDEX).exists():
                # No rank writes any more. What is there takes room, and would be counted as a checkpoint.
                shutil.rmtree(self._saving, ignore_errors=True)
            raise _cannot_save(self._saving, on_disk[0]) from error

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """See `CheckpointManager`; runs nothing that the files may contain.

        Raises:
            UserError: they are damaged.
        """
        if from_hf or "://" in checkpoint_id:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        with _telling_of_damage(Path(checkpoint_id)):
            reader = ChecksumReader(checkpoint_id)
            self._fit(state_dict, reader.index.state_dict_metadata)
            dcp.load(state_dict, storage_reader=reader, planner=WeightsOnlyLoadPlanner())
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _fit(self, state_dict: dict[str, Any], keys: Collection[str]) -> None:
        """Let the states not ask for what a checkpoint with these keys lacks, and refuse what they must."""
        trainer, optimizer = state_dict.get("train_state"), state_dict.get("optimizer")
        loader, positions = state_dict.get("dataloader"), [key for key in keys if _POSITION in key]
        if isinstance(loader, TextDataLoader) and positions:
            loader.check_degree(len(positions))  # or there may be none of this rank
            loader.resumes_files = "dataloader.files" in keys
        # A synchronous run has no older weights, so the next batch reads the newest; and no history
        # of updates, so the first one is not corrected. An average that was not kept starts from the
        # weights.
        if trainer:
            trainer.resumes_average = any(f".{EMA_WEIGHTS}." in key for key in keys)
            trainer.resumes_delay = trainer.was_delayed = any(f".{NEXT_WEIGHTS}." in key for key in keys)
            mine = f".{RANDOM_STATE}.{trainer.random_key}."
            trainer.resumes_random_state = any(mine in key for key in keys)
        if optimizer:
            prefix = "optimizer."
            optimizer.saved = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """See `CheckpointManager`; with a checksum of the index."""
        self._saving = Path(checkpoint_id)
        if "://" in checkpoint_id:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        if dist.get_rank() == 0:
            # An old checkpoint of this step stops being one before any rank writes over its files, which
            # the others do only after rank 0 has seen all their plans.
            Path(checkpoint_id, INDEX).unlink(missing_ok=True)
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer = ChecksumWriter(checkpoint_id)
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
            saving = None
        elif async_mode == AsyncMode.ASYNC:
            saving = dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
        else:
            saving = dcp.async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saving


def _set_learning_rates(schedulers: LRSchedulersContainer) -> None:
    """Give the groups the rates of the schedule's step: a schedule that was loaded waits for its next one."""
    for scheduler in schedulers:
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def _of_all_ranks(lines: Sequence[str]) -> list[str]:
    """The lines of every rank, each once: a stage knows its own parameters only. A collective."""
    if dist.get_backend() == "fake":
        return list(lines)
    everyone: list[Any] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, lines)
    return list(dict.fromkeys(chain.from_iterable(everyone)))


def _cannot_save(folder: Path, error: OSError) -> UserError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    mend = "make room there" if full else "make that folder writable"
    steps = [step for step in complete_steps(folder.parent) if folder.name != f"step-{step}"]
    then = f"goes on from step {steps[-1]}" if steps else "starts anew"
    return UserError(
        f"cannot save {folder}: {os.strerror(error.errno or 0)}; {mend}, and the same command {then}"
    )


@contextlib.contextmanager
def _telling_of_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except CorruptCheckpointError as error:
        raise _damaged(folder, str(error)) from error
    except OSError as error:
        raise _damaged(folder, f"{INDEX} cannot be read ({error.strerror})") from error
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, CorruptCheckpointError):
                raise _damaged(folder, str(cause)) from error
        raise


def _damaged(folder: Path, why: str) -> UserError:
    steps = [step for step in complete_steps(folder.parent) if folder.name != f"step-{step}"]
    if steps:
        mend = f"remove that folder to go on from step {steps[-1]}"
    else:
        mend = "take another checkpoint, or remove that folder to start anew"
    return UserError(f"the checkpoint {folder} is damaged: {why}; {mend}")


def check_index(folder: Path) -> None:
    """Look whether a checkpoint has an index that can be read; runs nothing that it may contain.

    Raises:
        UserError: it has not.
    """
    with _telling_of_damage(folder):
        ChecksumReader(folder)


def complete_steps(folder: Path, index: str = INDEX) -> list[int]:
    """The steps of which `folder` holds a whole checkpoint, in ascending order.

    Args:
        folder: of the checkpoints.
        index: the file that is written last into one: by default that of checkpoints to resume from.
    """
    return [step for step, path in _folders(folder) if (path / index).exists()]


def _folders(folder: Path) -> list[tuple[int, Path]]:
    """The folders of checkpoints in `folder`, whole or not, each behind its step, in ascending order."""
    found = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*/"))
    return sorted((int(match[1]), path) for match, path in found if match)


def _is_whole(path: Path) -> bool:
    # A last save in Hugging Face's format has an index of its own, which is written last, too.
    return (path / INDEX).exists() or (path / HF_INDEX).exists()


def save_for_resuming(checkpointer: BaseCheckpointManager, step: int) -> bool:
    """Save all state of `step` before returning, even where a last step would save the model alone.

    A collective over all ranks.

    Returns:
        False if the settings allow no save.
    """
    checkpointer.last_save_model_only = checkpointer.last_save_in_hf = False
    return checkpointer.save(step, last_step=True)
