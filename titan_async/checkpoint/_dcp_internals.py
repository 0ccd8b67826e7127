"""The index of a checkpoint of torch.distributed.checkpoint, read without running what it may contain.

torch keeps the index, `.metadata`, as a pickle, and a pickle can call anything. This one may name the classes
that torch itself writes there, and nothing else. Behind the pickle, where readers of pickles do not look,
stands a checksum of it, unless torch alone has written the checkpoint.
"""

import io
import os
import pathlib
import pickle  # nosec B403  # the unpickler below names all that it may call
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.serialization import _get_layout

from titan_async.file_io import read_regular

__all__ = ["load_index", "seal"]

_MOST_BYTES = 2**34
"""Of an index: more than that of any run."""

_CLASSES: tuple[Callable[..., Any], ...] = (
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
    **{(value.__module__, value.__name__): value for value in _CLASSES},
    # Where the checkpoint was written; nothing here reads it. Newer Pythons name another module.
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        value = _ALLOWED.get((module, name))
        if value is None and module == "torch":
            value = getattr(torch, name, None)
            value = value if isinstance(value, torch.dtype) else None
        if value is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return value


def seal(index: bytes) -> bytes:
    """What stands behind a pickled index."""
    return f"\ncrc32 {zlib.crc32(index):08x}\n".encode()


_SEAL_BYTES = len(seal(b""))


def load_index(file: Path) -> Metadata:
    """Reads a `.metadata`.

    Every file that it names lies in its own folder.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such index, damaged, or names what none needs; the message is part of a sentence.
    """
    content = read_regular(file, _MOST_BYTES)
    # First of all: a damaged pickle may ask for more memory than there is.
    if content[-1:] != pickle.STOP and content[-_SEAL_BYTES:] != seal(content[:-_SEAL_BYTES]):
        raise ValueError("it is not what was saved")
    try:
        index = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    if not (
        isinstance(index, Metadata)
        and isinstance(index.storage_data, dict)
        and isinstance(index.state_dict_metadata, dict)
        and all(isinstance(key, str) and _is_entry(entry) for key, entry in index.state_dict_metadata.items())
    ):
        raise ValueError("it holds something else")
    names = {getattr(place, "relative_path", None) for place in index.storage_data.values()}
    for name in names:
        if not isinstance(name, str) or name != Path(name).name:
            raise ValueError(f"it names a file outside of its folder, {name}")
        if os.path.exists(file.with_name(name)) and not os.path.isfile(file.with_name(name)):
            raise ValueError(f"it names {name}, which is no file")
    return index


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
        return isinstance(entry, dcp_metadata.BytesStorageMetadata)
    return isinstance(entry.size, torch.Size) and isinstance(
        getattr(entry.properties, "dtype", None), torch.dtype
    )
