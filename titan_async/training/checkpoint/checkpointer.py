"""Checkpoints from which a delayed run resumes bit for bit."""

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
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
    WeightsOnlyLoadPlanner,
    disk_error,
)
from titan_async.pipelining.recording import Kind
from titan_async.training._titan_internals import saves_at
from titan_async.training.checkpoint.folders import (
    complete_steps,
    explain_damage,
    is_complete,
    step_folders,
    write_error,
)
from titan_async.training.checkpoint.train_state import EMA_WEIGHTS, NEXT_WEIGHTS, RANDOM_STATE
from titan_async.training.dataloader import TextDataLoader
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.optimizer.saved_options import may_be_missing
from titan_async.training.telemetry.recording import Recorded

__all__ = ["AsyncCheckpointer", "existing_state", "save_for_resuming"]

_POSITION = "dataloader.dp_rank_"
"""Part of the keys of the data-parallel ranks' positions in the data."""


class AsyncCheckpointer(CheckpointManager, Recorded):
    """torchtitan's checkpointer, which can load checkpoints that lack a part of the state.

    A delayed run can resume from a synchronous run's checkpoint, and any run from one of another layout.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    was_delayed: bool | None = None
    """Whether the run of the loaded checkpoint had a delay; None if none was loaded."""
    _saving = Path()
    """The checkpoint that is being saved, or was last."""
    _keep_latest_k = 0
    """Checkpoints to keep, or 0 for all."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if self.enable and "://" not in self.folder:
            # torchtitan's own removal skips the last save, and counts folders that are not checkpoints.
            self._keep_latest_k, self.keep_latest_k = self.keep_latest_k, 0

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """See `BaseCheckpointManager`.

        Raises:
            UserError: this checkpoint, or the previous one saved in the background, cannot be written.
        """
        if not saves_at(self, curr_step, last_step):
            return super().save(curr_step, last_step)
        start = time.perf_counter()
        with self._explain_disk_errors(), self.recording.span(Kind.SAVE, curr_step):
            saved = super().save(curr_step, last_step)
        if saved:
            self.recording.write("checkpoint", step=curr_step, seconds=time.perf_counter() - start)
            if self.save_future is None:
                self._remove_old()
        return saved

    def load(self, step: int = -1) -> bool:
        """See `BaseCheckpointManager`. A collective.

        Options of the optimizers and learning rates are those of this run, not the checkpoint's.
        """
        there = complete_steps(Path(self.folder)) if self.enable else []
        loaded = super().load(step)
        if not loaded:
            return False
        if there and self.initial_load_path:
            self.report(
                f"checkpoint.initial_load_path is not read: {self.folder} has checkpoints, and the run "
                f"resumes from step {there[-1] if step == -1 else step}"
            )
        schedulers, optimizers = self.states.get(LR_SCHEDULER), self.states.get(OPTIMIZER)
        if isinstance(schedulers, LRSchedulersContainer):
            _set_learning_rates(schedulers)
        if isinstance(optimizers, AsyncOptimizers):
            changed = _of_all_ranks(optimizers.changed)
            if changed:
                self.report(f"the recipe changes options of the checkpoint: {', '.join(changed)}")
        return True

    def maybe_wait_for_staging(self) -> None:
        """See `BaseCheckpointManager`.

        Raises:
            UserError: as `save`, for a checkpoint that is saved in the background.
        """
        if self.enable and self.save_future is not None and self.save_future.done():
            with self._explain_disk_errors():
                self.maybe_wait_for_saving()
        super().maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        """See `BaseCheckpointManager`."""
        is_saving = self.enable and self.save_future is not None
        super().maybe_wait_for_saving()
        if is_saving:
            self._remove_old()

    def _remove_old(self) -> None:
        """Remove checkpoints beyond `keep_latest_k`, and incomplete ones of killed saves.

        The one just saved is always kept. The index of the others is removed at once, their other files in
        the background. With async saves, folders of later steps are kept until a later save.
        """
        if not self._keep_latest_k or dist.get_rank() != 0:
            return
        folders = step_folders(Path(self.folder))
        saved = next((step for step, path in folders if path == self._saving), None)
        if saved is not None and self.async_mode != AsyncMode.DISABLED:
            # A rank that has seen the end of this save earlier may have created the next save's folder.
            folders = [(step, path) for step, path in folders if step <= saved]
        others = [path for _, path in folders if path != self._saving]
        complete = [path for path in others if is_complete(path)]
        for path in set(others) - set(complete[-(self._keep_latest_k - 1) :]):
            if not path.is_symlink():  # its target may belong to another run
                with contextlib.suppress(OSError):
                    (path / INDEX).unlink(missing_ok=True)
                self.purge_queue.put(str(path))

    @contextlib.contextmanager
    def _explain_disk_errors(self) -> Iterator[None]:
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
                # No rank is writing any more, and an incomplete checkpoint takes space.
                shutil.rmtree(self._saving, ignore_errors=True)
            raise write_error(self._saving, on_disk[0]) from error

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """See `CheckpointManager`; runs no code that the files may contain.

        Raises:
            UserError: they are damaged.
        """
        if from_hf or "://" in checkpoint_id:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        with explain_damage(Path(checkpoint_id)):
            reader = ChecksumReader(checkpoint_id)
            keys = reader.index.state_dict_metadata
            self._check_positions(state_dict, keys)
            self.was_delayed = any(f".{NEXT_WEIGHTS}." in key for key in keys)
            state = existing_state(state_dict, keys)
            dcp.load(state, storage_reader=reader, planner=WeightsOnlyLoadPlanner())
        for name, part in state_dict.items():
            if isinstance(part, Stateful):
                part.load_state_dict(state[name])
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state)

    def _check_positions(self, state_dict: dict[str, Any], keys: Collection[str]) -> None:
        loader, positions = state_dict.get("dataloader"), [key for key in keys if _POSITION in key]
        if isinstance(loader, TextDataLoader) and positions:
            loader.check_degree(len(positions))  # with another degree this rank may have none

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
            # Invalidate an old checkpoint of this step before any rank overwrites its files: the others do so
            # only after rank 0 has received all their plans.
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


def existing_state(state_dict: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The state to load from a checkpoint with these keys: without the entries that a checkpoint may lack.

    A synchronous run has no older weights, so the next batch reads the newest ones, and no history of
    updates, so the first update is not corrected. A new average starts from the weights. Generators' states
    are those of one layout. Earlier versions saved fewer options, and no fingerprints of files.
    """
    state = {}
    for name, part in state_dict.items():
        if isinstance(part, Stateful):
            optional = _OPTIONAL.get(name, lambda key: False)
            part = {
                key: value
                for key, value in part.state_dict().items()
                if not optional(key) or any(leaf in keys for leaf in _leaves(f"{name}.{key}", value))
            }
        state[name] = part
    return state


_OPTIONAL: dict[str, Callable[[str], bool]] = {
    "train_state": {NEXT_WEIGHTS, EMA_WEIGHTS, RANDOM_STATE}.__contains__,
    "dataloader": {"files"}.__contains__,
    "optimizer": may_be_missing,
}
"""For a part of the state, which of its entries a checkpoint may lack."""


def _leaves(key: str, value: Any) -> Iterator[str]:
    """The keys of a checkpoint under which a nested entry is saved."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key


def _set_learning_rates(schedulers: LRSchedulersContainer) -> None:
    """Set the groups' learning rates to those of the schedule's step: loading a schedule does not."""
    for scheduler in schedulers:
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def _of_all_ranks(lines: Sequence[str]) -> list[str]:
    """The lines of all ranks without duplicates: each stage has its own parameters only. A collective."""
    if dist.get_backend() == "fake":
        return list(lines)
    everyone: list[Any] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, lines)
    return list(dict.fromkeys(chain.from_iterable(everyone)))


def save_for_resuming(checkpointer: BaseCheckpointManager, step: int) -> bool:
    """Save all state of `step` before returning, even where a last step would save the model alone.

    A collective over all ranks.

    Returns:
        False if the settings allow no save.
    """
    checkpointer.last_save_model_only = checkpointer.last_save_in_hf = False
    return checkpointer.save(step, last_step=True)
