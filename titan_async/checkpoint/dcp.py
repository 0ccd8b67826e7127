"""The tensors of a checkpoint of torch.distributed.checkpoint, one at a time, without a process group.

However many ranks wrote it, and in whatever layout, a tensor is read whole; and a checkpoint that one process
writes here any layout can load.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from titan_async.checkpoint._dcp_io_internals import (
    INDEX,
    CheckingReader,
    DamagedError,
    SealingWriter,
    disk_error,
)
from titan_async.checkpoint.tensors import TensorInfo
from titan_async.errors import UserError

__all__ = ["INDEX", "SavedTensors", "save_tensors"]


class SavedTensors:
    """The tensors that a checkpoint holds, by their keys.

    Args:
        folder: with a `.metadata`.

    Raises:
        UserError: there is no checkpoint, or its index is damaged or would run code.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self._reader = CheckingReader(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{self.folder} is no checkpoint, or one that was cut off: it has no {INDEX}"
            ) from None
        except OSError as error:
            raise UserError(f"cannot read {self.folder / INDEX}: {error.strerror}") from error
        except DamagedError as error:
            raise UserError(f"{self.folder}: {error}; take another checkpoint") from error
        index = self._reader.index
        self._saved = {
            key: entry
            for key, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.tensors = {
            key: TensorInfo(tuple(entry.size), entry.properties.dtype) for key, entry in self._saved.items()
        }
        """Every tensor, with its shape and type."""

    def read(self, key: str) -> torch.Tensor:
        """Reads a whole tensor, in the type it was saved in.

        Raises:
            KeyError: there is none of this key.
            UserError: a file is missing or damaged, or the checkpoint lacks a part of the tensor.
        """
        info, chunks = self.tensors[key], self._saved[key].chunks
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(info.shape):
            raise UserError(f"{self.folder} lacks parts of {key}; take another checkpoint")
        tensor = torch.empty(info.shape, dtype=info.dtype)
        try:
            with _alone():
                dcp.load({key: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            [(cause, _)] = error.failures.values()
            raise UserError(
                f"cannot read {key} of {self.folder}: {cause}; take another checkpoint"
            ) from error
        return tensor


def save_tensors(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, TensorInfo],
    load: Callable[[str], torch.Tensor],
) -> None:
    """Writes a checkpoint, a file for each tensor; no more than two of them are in memory at a time.

    Args:
        folder: is made; an old checkpoint in it is replaced.
        tensors: what the checkpoint holds.
        load: returns one of them when it is to be written.

    Raises:
        UserError, OSError: as `load` and the disk do.
    """
    # Planned with tensors that have no memory, and filled when torch asks for them.
    plan = {key: torch.empty(info.shape, dtype=info.dtype, device="meta") for key, info in tensors.items()}
    # torch keeps what it has written of a file until the file is whole.
    writer = SealingWriter(folder, single_file_per_rank=False)
    try:
        with _alone():
            dcp.save(plan, storage_writer=writer, planner=_LazyPlanner(load), no_dist=True)
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        raise disk_error(cause) or cause from None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hushes torch's remark that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _LazyPlanner(DefaultSavePlanner):
    def __init__(self, load: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._load = load

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._load(index.fqn)
