"""Folders of safetensors in transformers' layout: a single file, or shards with an index.

Tensors are read and written one at a time. safetensors' own writer takes all tensors of a file at once, so
this module writes the format: the header's length in eight bytes, a JSON header, and the tensors' bytes in
its order.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from titan_async.checkpoint import TensorInfo
from titan_async.errors import UserError
from titan_async.file_io import read_json

__all__ = ["INDEX", "SafetensorsFolder", "plan_shards", "write_folder"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_HEADER_ALIGNMENT = 8
"""Bytes, as safetensors pads it."""


def plan_shards(tensors: Mapping[str, TensorInfo], limit: int) -> list[list[str]]:
    """Divides tensors, in their order, into shards of at most `limit` bytes; a larger tensor has its own.

    Examples:
        >>> import torch
        >>> kernel = TensorInfo((10, 10), torch.float32)  # 400 bytes
        >>> plan_shards({"a": kernel, "b": kernel, "c": kernel}, limit=1000)
        [['a', 'b'], ['c']]
    """
    shards: list[list[str]] = []
    size = 0
    for name, info in tensors.items():
        if not shards or size + info.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    return shards


def write_folder(
    folder: Path, tensors: Mapping[str, TensorInfo], values: Iterable[tuple[str, torch.Tensor]], *, limit: int
) -> list[str]:
    """Writes `model.safetensors`, or shards `model-00001-of-0000N.safetensors` and their index.

    Args:
        folder: exists.
        tensors: the tensors to write, in order.
        values: the same names in the same order, each with its CPU tensor.
        limit: maximum bytes of tensors per file, as in `plan_shards`.

    Returns:
        The names of the files.

    Examples:
        >>> import tempfile
        >>> tensors = {"a": TensorInfo((2, 3), torch.float32), "b": TensorInfo((4,), torch.bfloat16)}
        >>> values = [(name, torch.ones(info.shape, dtype=info.dtype)) for name, info in tensors.items()]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in write_folder(Path(folder), tensors, values, limit=24):
        ...         print(name)
        ...     SafetensorsFolder(folder).read("b")
        model-00001-of-00002.safetensors
        model-00002-of-00002.safetensors
        model.safetensors.index.json
        tensor([1., 1., 1., 1.], dtype=torch.bfloat16)
    """
    assert sys.byteorder == "little", "the safetensors format is little-endian"
    shards = plan_shards(tensors, limit)
    if len(shards) == 1:
        files = [SINGLE]
    else:
        files = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    rest = iter(values)
    for file, names in zip(files, shards, strict=True):
        _write_file(folder / file, {name: tensors[name] for name in names}, rest)
    if len(shards) == 1:
        return files
    index = {
        "metadata": {"total_size": sum(info.nbytes for info in tensors.values())},
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*files, INDEX]


def _write_file(
    path: Path, tensors: Mapping[str, TensorInfo], values: Iterator[tuple[str, torch.Tensor]]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in tensors.items():
        start, end = end, end + info.nbytes
        header[name] = {
            "dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for expected, info in tensors.items():
            name, value = next(values)
            assert (name, TensorInfo(tuple(value.shape), value.dtype)) == (expected, info)
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy())
            del value  # before the next one is created
        file.flush()
        os.fsync(file.fileno())


class SafetensorsFolder:
    """The tensors of a folder of safetensors, by name.

    Raises:
        UserError: there are none, a file is missing or damaged, or all weights are pickled.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._files = self._find()
        self.tensors: dict[str, TensorInfo] = {}
        """Shape and dtype of each tensor."""
        for file in sorted(set(self._files.values())):
            self._describe(file)
        for name, file in self._files.items():
            if name not in self.tensors:
                raise UserError(f"{file} lacks {name}, which {self.folder / INDEX} lists; fetch it again")

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor.

        Raises:
            KeyError: there is no tensor of this name.
            UserError: its file is damaged.
        """
        file = self._files[name]
        try:
            with safe_open(file, framework="pt") as opened:
                return opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _damaged(file, error) from error

    def _find(self) -> dict[str, Path]:
        """The file of each tensor."""
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file():
            return self._read_index(index)
        if single.is_file():
            with _open(single) as opened:
                return dict.fromkeys(opened.keys(), single)
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*")):
            raise UserError(
                f"{self.folder} has only pickled weights, which can run code when they are loaded: "
                "convert them to safetensors first"
            )
        raise UserError(f"{self.folder} has no {SINGLE} and no {INDEX}: name a folder with a model")

    def _read_index(self, index: Path) -> dict[str, Path]:
        try:
            files = read_json(index)["weight_map"]
            found = {str(name): self.folder / file for name, file in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} cannot be read; fetch it again") from error
        for file in files.values():
            if not file or file != Path(file).name:
                raise UserError(f"{index} names {file}, which is not a file in its folder; fetch it again")
        for file in sorted(set(found.values())):
            if not file.is_file():
                raise UserError(f"{file}, which {index} names, is missing; fetch it again")
        return found

    def _describe(self, file: Path) -> None:
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - an open file is not a mapping
                entry = opened.get_slice(name)
                dtype = _DTYPES.get(entry.get_dtype())
                if dtype is None:
                    raise UserError(f"{name} in {file} has an unsupported dtype, {entry.get_dtype()}")
                if self._files.get(name) == file:
                    self.tensors[name] = TensorInfo(tuple(entry.get_shape()), dtype)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> UserError:
    return UserError(f"{file} cannot be read ({' '.join(str(error).split())}); fetch it again")
