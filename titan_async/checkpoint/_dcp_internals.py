"""Storage writer and reader for torch.distributed.checkpoint that verify checksums and run no pickled code.

torch stores each tensor and each other value as a zip archive. It writes the archive's CRC-32 and never
verifies it. The index, `.metadata`, is a pickle without a checksum, so one is appended after the end of the
pickle, where unpicklers do not read. Unpickling the index is limited to the classes that torch writes there.
"""

import io
import os
import pathlib
import pickle  # nosec B403  # the unpickler below has an allow-list
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystem, _FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.futures import Future
from torch.serialization import _get_layout

from titan_async.file_io import read_regular_file

__all__ = [
    "INDEX",
    "ChecksumReader",
    "ChecksumWriter",
    "CorruptCheckpointError",
    "WeightsOnlyLoadPlanner",
    "disk_error",
    "load_index",
]

INDEX = ".metadata"
"""torch writes this file last. A folder without it is not a checkpoint."""

_MAX_INDEX_BYTES = 2**34
"""More than the index of any run."""

_BLOCK_BYTES = 1 << 20
"""Bytes read at a time to verify a checksum."""

_ALLOWED_CLASSES: tuple[Callable[..., Any], ...] = (
    dcp_metadata.BytesStorageMetadata,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.Metadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.StorageMeta,
    dcp_metadata.TensorProperties,
    dcp_metadata.TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    _get_layout,
    torch.Size,
)

_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    **{(value.__module__, value.__name__): value for value in _ALLOWED_CLASSES},
    # The path that the checkpoint was written to; it is not used. Newer Pythons name another module.
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
    },
}


class CorruptCheckpointError(Exception):
    """A file of a checkpoint is missing or differs from what was saved. The message is part of a sentence."""


class ChecksumWriter(_FileSystemWriter):
    """A `FileSystemWriter` that appends a checksum to the index.

    A failed write raises the underlying `OSError`, on the other ranks as well.
    """

    def __init__(self, path: str | os.PathLike[str], *, single_file_per_rank: bool = True) -> None:
        super().__init__(path, single_file_per_rank)
        self.fs = _ChecksumFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise disk_error(error) or error from None


class _ChecksumFileSystem(FileSystem):
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        if Path(new_path).name == INDEX:
            with open(path, "rb+") as file:
                file.write(_checksum_line(file.read()))
                file.flush()
                os.fsync(file.fileno())
        super().rename(path, new_path)


def _checksum_line(index: bytes) -> bytes:
    return f"\ncrc32 {zlib.crc32(index):08x}\n".encode()


_CHECKSUM_BYTES = len(_checksum_line(b""))


def disk_error(error: BaseException) -> OSError | None:
    """The `OSError` in an exception's context chain; None without one."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__context__
    return link


class ChecksumReader(FileSystemReader):
    """A `FileSystemReader` that reads the index once and verifies the checksum of everything it reads.

    No code in the files is run if the planner is a `WeightsOnlyLoadPlanner`, or loads tensors only.

    Args:
        folder: the checkpoint's folder.

    Raises:
        OSError: the index cannot be read.
        CorruptCheckpointError: see `load_index`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        try:
            self.index = load_index(Path(folder, INDEX))
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{INDEX} is not the index of a checkpoint and was not loaded: {error}"
            ) from error
        self._verified: set[tuple[str, int]] = set()
        self._latest = ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See `StorageReader`.

        Raises:
            CorruptCheckpointError: a file is missing, cannot be read, or is not what was saved.
        """
        try:
            return super().read_data(plan, planner)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{Path(error.filename).name} is missing") from None
        except OSError as error:
            raise CorruptCheckpointError(f"{self._latest} cannot be read ({error.strerror})") from error
        except (AssertionError, CorruptCheckpointError):
            raise
        except Exception as error:  # torch raises many types for an archive that it did not write
            raise CorruptCheckpointError(f"{self._latest} may be damaged") from error

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        self._latest = sinfo.relative_path
        place = (sinfo.relative_path, sinfo.offset)
        if place not in self._verified:
            if not _checksums_match(_FileSlice(file, sinfo.offset, sinfo.length)):
                raise CorruptCheckpointError(f"{sinfo.relative_path} is not what was saved")
            self._verified.add(place)
        return super()._slice_file(file, sinfo)


class _FileSlice:
    """A range of a file as a file. torch's own slice cannot seek from its end, as `zipfile` does."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._position = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._length)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(self._length - self._position, 0)
        self._file.seek(self._begin + self._position)
        data = self._file.read(rest if size < 0 else min(size, rest))
        self._position += len(data)
        return data


def _checksums_match(archive: _FileSlice) -> bool:
    """Whether the content of every member of a zip archive matches its CRC-32."""
    try:
        with zipfile.ZipFile(cast(IO[bytes], archive)) as files:
            for name in files.namelist():
                with files.open(name) as file:
                    while file.read(_BLOCK_BYTES):
                        pass
    except OSError:
        raise
    except Exception:  # a damaged archive raises many types
        return False
    return True


class WeightsOnlyLoadPlanner(DefaultLoadPlanner):
    """Loads values other than tensors only if `torch.load(..., weights_only=True)` accepts them."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        try:
            torch.load(value, weights_only=True)
        except Exception as error:
            raise CorruptCheckpointError(
                f"{read_item.storage_index.fqn} holds an object that no checkpoint needs and was not loaded"
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        value = _ALLOWED.get((module, name))
        if value is None and module == "torch":
            value = getattr(torch, name, None)
            value = value if isinstance(value, torch.dtype) else None
        if value is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return value


def load_index(file: Path) -> Metadata:
    """Reads a `.metadata`. All files that it names are in its own folder.

    Checkpoints of torch's own writer have no checksum of the index.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such an index, is damaged, or names a class that is not allowed. The message is
            part of a sentence.
    """
    content = read_regular_file(file, _MAX_INDEX_BYTES)
    # Before unpickling: a damaged pickle may request more memory than there is.
    unsigned, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    if content[-1:] != pickle.STOP and checksum != _checksum_line(unsigned):
        raise ValueError("it is not what was saved")
    try:
        index = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle raises many types
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    if not (
        isinstance(index, Metadata)
        and isinstance(index.storage_data, dict)
        and isinstance(index.state_dict_metadata, dict)
        and all(isinstance(key, str) and _is_entry(entry) for key, entry in index.state_dict_metadata.items())
    ):
        raise ValueError("it contains another object")
    names = {getattr(place, "relative_path", None) for place in index.storage_data.values()}
    for name in names:
        if not isinstance(name, str) or name != Path(name).name:
            raise ValueError(f"it names a file outside of its folder, {name}")
        if os.path.exists(file.with_name(name)) and not os.path.isfile(file.with_name(name)):
            raise ValueError(f"it names {name}, which is not a regular file")
    return index


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
        return isinstance(entry, dcp_metadata.BytesStorageMetadata)
    return isinstance(entry.size, torch.Size) and isinstance(
        getattr(entry.properties, "dtype", None), torch.dtype
    )
