"""Tensors of checkpoints of torch.distributed.checkpoint, one at a time, without a process group.

Tensors are read unsharded, from checkpoints of any number of ranks and any layout. A checkpoint that one
process writes can be loaded into any layout.
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

from titan_async.checkpoint import TensorInfo
from titan_async.checkpoint._dcp_internals import (
    INDEX,
    ChecksumReader,
    ChecksumWriter,
    CorruptCheckpointError,
    disk_error,
)
from titan_async.errors import UserError

__all__ = ["INDEX", "SavedTensors", "save_tensors"]


class SavedTensors:
    """The tensors of a checkpoint, by key.

    Args:
        folder: with a `.metadata`.

    Raises:
        UserError: there is no checkpoint, or its index is damaged or names code to run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self._reader = ChecksumReader(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{self.folder} is not a checkpoint, or is incomplete: it has no {INDEX}"
            ) from None
        except OSError as error:
            raise UserError(f"cannot read {self.folder / INDEX}: {error.strerror}") from error
        except CorruptCheckpointError as error:
            raise UserError(f"{self.folder}: {error}; use another checkpoint") from error
        index = self._reader.index
        self._saved = {
            key: entry
            for key, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.tensors = {
            key: TensorInfo(tuple(entry.size), entry.properties.dtype) for key, entry in self._saved.items()
        }
        """Shape and dtype of each tensor."""

    def read(self, key: str) -> torch.Tensor:
        """Reads an unsharded tensor, in the dtype it was saved in.

        Raises:
            KeyError: there is no tensor of this key.
            UserError: a file is missing or damaged, or the checkpoint lacks chunks of the tensor.
        """
        info, chunks = self.tensors[key], self._saved[key].chunks
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(info.shape):
            raise UserError(f"{self.folder} lacks chunks of {key}; use another checkpoint")
        tensor = torch.empty(info.shape, dtype=info.dtype)
        try:
            with _without_process_group():
                dcp.load({key: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            [(cause, _)] = error.failures.values()
            raise UserError(
                f"cannot read {key} of {self.folder}: {cause}; use another checkpoint"
            ) from error
        return tensor


def save_tensors(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, TensorInfo],
    load: Callable[[str], torch.Tensor],
) -> None:
    """Writes a checkpoint with one file per tensor. At most two tensors are in memory at a time.

    Args:
        folder: is created; a checkpoint in it is replaced.
        tensors: the tensors to write.
        load: returns the tensor of a key, when it is to be written.

    Raises:
        UserError, OSError: from `load`, or from writing.
    """
    # Planned with meta tensors; torch requests the data when it writes them.
    plan = {key: torch.empty(info.shape, dtype=info.dtype, device="meta") for key, info in tensors.items()}
    # torch keeps all tensors of a file in memory until the file is complete.
    writer = ChecksumWriter(folder, single_file_per_rank=False)
    try:
        with _without_process_group():
            dcp.save(plan, storage_writer=writer, planner=_LazyPlanner(load), no_dist=True)
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        raise disk_error(cause) or cause from None


@contextlib.contextmanager
def _without_process_group() -> Iterator[None]:
    """Suppresses torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _LazyPlanner(DefaultSavePlanner):
    def __init__(self, load: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._load = load

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._load(index.fqn)
