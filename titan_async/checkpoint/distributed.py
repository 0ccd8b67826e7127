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
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from titan_async.checkpoint._dcp_internals import load_index
from titan_async.checkpoint.tensors import TensorInfo
from titan_async.errors import UserError

__all__ = ["INDEX", "SavedTensors", "save_tensors"]

INDEX = ".metadata"
"""The file that is written last, so that a folder without it is no checkpoint."""


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
            index = load_index(self.folder / INDEX)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{self.folder} is no checkpoint, or one that was cut off: it has no {INDEX}"
            ) from None
        except OSError as error:
            raise UserError(f"cannot read {self.folder / INDEX}: {error.strerror}") from error
        except ValueError as error:
            raise UserError(
                f"{self.folder / INDEX} is no index of a checkpoint and was not loaded: {error}; "
                "take another checkpoint"
            ) from error
        self._reader = _Reader(self.folder, index)
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
        except (Exception, CheckpointException) as error:  # whatever a missing or damaged file raises
            files = {self._reader.file_of(key, tuple(chunk.offsets)) for chunk in chunks}
            missing = sorted(name for name in files if name and not (self.folder / name).is_file())
            why = f"{missing[0]} is missing" if missing else f"{', '.join(sorted(files))} may be damaged"
            raise UserError(f"cannot read {key} of {self.folder}: {why}; take another checkpoint") from error
        return tensor


class _Reader(FileSystemReader):
    """torch's reader, with an index that was read before, and once."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index

    def file_of(self, key: str, offsets: tuple[int, ...]) -> str:
        """The file with the part of a tensor that begins at `offsets`; "" if the index names none."""
        place = self._index.storage_data.get(MetadataIndex(key, offsets))
        return "" if place is None else str(place.relative_path)


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
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    try:
        with _alone():
            dcp.save(plan, storage_writer=writer, planner=_LazyPlanner(load), no_dist=True)
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        raise _of_disk(cause) or cause from None


def _of_disk(error: BaseException) -> OSError | None:
    """The error of a disk that torch's writer has met on its way to another one."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__context__
    return link


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
