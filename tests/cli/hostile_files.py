"""Malicious and corrupt files: each function returns one that writes or corrupts a file."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

__all__ = [
    "as_pytorch_bin",
    "changed_json",
    "damaged_parquet",
    "endless_line",
    "escaping_index",
    "fifo",
    "header",
    "made",
    "many_empty",
    "parquet",
    "pickled",
    "replaced",
    "sparse",
    "spoiled_index",
    "written",
]

Make = Callable[[Path], Any]


class RunsOnLoad:
    """Creates a folder, `canary`, when a pickle of it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("canary",)


def written(name: str, content: str | bytes) -> Make:
    """Writes a file."""

    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def made(*makes: Make) -> Make:
    """Calls one after another."""

    def make(folder: Path) -> None:
        for each in makes:
            each(folder)

    return make


def replaced(name: str, old: str, new: str) -> Make:
    """Replaces text in a file."""

    def make(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return make


def fifo(name: str) -> Make:
    """Replaces a file by a named pipe without a writer."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def sparse(name: str, size: int, begin: bytes = b"") -> Make:
    """Writes a sparse file of zeros."""

    def make(folder: Path) -> None:
        with open(folder / name, "wb") as file:
            file.write(begin)
            file.truncate(size)

    return make


def endless_line(name: str) -> Make:
    """Writes 10 MB of gzip that decompress to one line of 10 GB."""
    return written(name, gzip.compress(b'{"text": "') + gzip.compress(b"a" * (1 << 20)) * 10_000)


def many_empty(name: str) -> Make:
    """Writes some KB of gzip that decompress to three million records without text."""
    return written(name, gzip.compress(b'{"text":""}\n' * (1 << 16)) * 48)


def parquet(name: str, **columns: list[object]) -> Make:
    """Writes a parquet file."""
    return lambda folder: pyarrow.parquet.write_table(pyarrow.table(columns), folder / name)


def damaged_parquet(name: str, at: int) -> Make:
    """Writes a parquet file with corrupt bytes."""

    def make(folder: Path) -> None:
        parquet(name, text=[f"line {number}" for number in range(1000)])(folder)
        content = bytearray((folder / name).read_bytes())
        for index in range(at, at + 40):
            content[index % len(content)] ^= 0x55
        (folder / name).write_bytes(content)

    return make


def pickled(name: str) -> Make:
    """Writes a pickle that runs code when it is loaded."""
    return written(name, pickle.dumps(RunsOnLoad()))


def changed_json(name: str, **fields: object) -> Make:
    """Changes fields of a JSON object."""

    def make(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **fields}))

    return make


def header(name: str, tensor: str, **fields: object) -> Make:
    """Changes the header of a safetensors file, but not its data."""

    def make(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        described = json.loads(content[8 : 8 + length])
        described[tensor].update(fields)
        text = json.dumps(described).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return make


def escaping_index(name: str, file: object) -> Make:
    """Moves the norm in a safetensors index to another file."""

    def make(folder: Path) -> None:
        index = json.loads((folder / name).read_text())
        index["weight_map"]["model.norm.weight"] = file
        (folder / name).write_text(json.dumps(index))

    return make


def spoiled_index(change: Callable[[Any], object]) -> Make:
    """Changes the index of a checkpoint, and removes its checksum, which torch does not write."""

    def make(folder: Path) -> None:
        file = folder / ".metadata"
        index = pickle.loads(file.read_bytes())
        change(index)
        file.write_bytes(pickle.dumps(index))

    return make


def as_pytorch_bin(folder: Path) -> None:
    """Replaces safetensors by pickled weights."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({"model.norm.weight": RunsOnLoad()}, folder / "pytorch_model.bin")
