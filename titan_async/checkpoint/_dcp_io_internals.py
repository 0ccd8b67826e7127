"""torch's writer and reader of a checkpoint's files, which notice what torch's own do not.

Every tensor and every other value lies in its file as a zip archive, of which torch writes the checksums and
never looks at them again. The index has none of torch's, so one is put behind it, where no reader of pickles
looks.
"""

import os
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem, _FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.futures import Future

from titan_async.checkpoint._dcp_internals import load_index, seal

__all__ = ["INDEX", "CheckingReader", "DamagedError", "SealingWriter", "ValueLoadPlanner", "disk_error"]

INDEX = ".metadata"
"""The file that is written last, so that a folder without it is no checkpoint."""

_BLOCK = 1 << 20
"""Bytes that are read at a time to be checked."""


class DamagedError(Exception):
    """A file of a checkpoint is not what was saved. The message is part of a sentence."""


class SealingWriter(_FileSystemWriter):
    """Writes as `FileSystemWriter` does, and a checksum behind the index.

    A disk that takes no more is an `OSError`, also for the other ranks.
    """

    def __init__(self, path: str | os.PathLike[str], *, single_file_per_rank: bool = True) -> None:
        super().__init__(path, single_file_per_rank)
        self.fs = _SealingFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise disk_error(error) or error from None


class _SealingFiles(FileSystem):
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        if Path(new_path).name == INDEX:
            with open(path, "rb+") as file:
                file.write(seal(file.read()))
                file.flush()
                os.fsync(file.fileno())
        super().rename(path, new_path)


def disk_error(error: BaseException) -> OSError | None:
    """The error of a disk that torch's writer has met on its way to another one."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__context__
    return link


class CheckingReader(FileSystemReader):
    """Reads as `FileSystemReader` does, and of an index that was read before and once.

    What is read is compared with its checksum first. Nothing is run that a file may contain, if the planner
    is a `ValueLoadPlanner` or loads tensors alone.

    Args:
        folder: of the checkpoint.

    Raises:
        OSError: the index cannot be read.
        DamagedError: it is no index, damaged, or names what none needs.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        try:
            self.index = load_index(Path(folder, INDEX))
        except ValueError as error:
            raise DamagedError(f"{INDEX} is no index of a checkpoint and was not loaded: {error}") from error
        self._good: set[tuple[str, int]] = set()
        self._latest = ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See `StorageReader`.

        Raises:
            DamagedError: a file is missing, cannot be read, or is not what was saved.
        """
        try:
            return super().read_data(plan, planner)
        except FileNotFoundError as error:
            raise DamagedError(f"{Path(error.filename).name} is missing") from None
        except OSError as error:
            raise DamagedError(f"{self._latest} cannot be read ({error.strerror})") from error
        except (AssertionError, DamagedError):
            raise
        except Exception as error:  # whatever torch makes of archives that are not its own
            raise DamagedError(f"{self._latest} may be damaged") from error

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        self._latest = sinfo.relative_path
        place = (sinfo.relative_path, sinfo.offset)
        if place not in self._good:
            if not _is_whole(_Part(file, sinfo.offset, sinfo.length)):
                raise DamagedError(f"{sinfo.relative_path} is not what was saved")
            self._good.add(place)
        return super()._slice_file(file, sinfo)


class _Part:
    """A part of a file as a file. torch's own cannot seek from its end, where the reading of a zip begins."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(self._length - self._at, 0)
        self._file.seek(self._begin + self._at)
        data = self._file.read(rest if size < 0 else min(size, rest))
        self._at += len(data)
        return data


def _is_whole(archive: _Part) -> bool:
    """Whether every file of a zip archive has the content that its checksum was made of."""
    try:
        with zipfile.ZipFile(cast(IO[bytes], archive)) as files:
            for name in files.namelist():
                with files.open(name) as file:
                    while file.read(_BLOCK):
                        pass
    except OSError:
        raise
    except Exception:  # whatever else a damaged archive raises
        return False
    return True


class ValueLoadPlanner(DefaultLoadPlanner):
    """Loads values that are no tensors only if they hold nothing to be run."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        try:
            torch.load(value, weights_only=True)
        except Exception as error:
            raise DamagedError(
                f"{read_item.storage_index.fqn} holds what no checkpoint needs and was not loaded"
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)
