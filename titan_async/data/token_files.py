"""The format of token files, which are written once and memory-mapped.

A folder of token files has

    index.json                 source and tokenizer, and each file's name, counts, size and SHA-256
    tokens-00000.safetensors   the tensors `tokens` (U16, or U32 for a larger vocabulary), the concatenated
                               documents with BOS and EOS tokens, and `ends` (I64), the index after each
                               document's last token
    tokens-00001.safetensors   ...

The format is safetensors because a file holds both tensors with their dtypes, is memory-mapped by the
library, and cannot contain code. NumPy's .npy would need two files per shard, of which a killed process could
leave one; a `MemoryMappedTensor` of tensordict has no dtype and shape, and `TensorDict.load_memmap` may
unpickle metadata.

Opening a folder checks that each file exists and has the right size. `verify` reads all files.
"""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from titan_async.errors import UserError
from titan_async.file_io import atomic_write, read_json, write_json

__all__ = [
    "INDEX",
    "PROGRESS",
    "Shard",
    "TokenFiles",
    "TokenIndex",
    "token_dtype",
    "write_shard",
]

INDEX = "index.json"
PROGRESS = "progress.json"
"""Exists instead of the index while the files are being written."""

FORMAT = "titan_async tokens 1"

_FIX = "copy the folder again, or recreate it with tools/prepare_data.py"
_DTYPES = {"U16": np.dtype(np.uint16), "U32": np.dtype(np.uint32)}
_NAME = re.compile(r"tokens-\d{5,}\.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of tokens."""

    name: str
    documents: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenIndex:
    """The content of index.json."""

    format: str
    source: str
    """The identity of the text's `DocumentStream`."""
    tokenizer_sha256: str
    """Of the tokenizer.json."""
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    dtype: str
    """"U16" or "U32"."""
    documents: int
    tokens: int
    shards: tuple[Shard, ...]


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype for the tokens of a vocabulary."""
    return "U16" if vocab_size <= 2**16 else "U32"


class TokenFiles:
    """A folder of token files, opened for reading.

    Raises:
        UserError: There are no token files, they are incomplete, or a file is missing or of the wrong size.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.expanduser(folder))
        self.index = _read_index(self.folder)
        self.first_documents = np.cumsum([0, *(shard.documents for shard in self.index.shards)])
        """The number of documents before each shard, and the total."""
        for number in range(len(self.index.shards)):
            self.check_size(number)

    def check_size(self, number: int) -> None:
        """Checks the size of a shard's file.

        Call it before using the arrays of `map`: reading beyond the end of a file that was truncated since
        then raises SIGBUS.

        Raises:
            UserError: The size is wrong, or the file is missing.
        """
        shard, file = self.index.shards[number], self.folder / self.index.shards[number].name
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise UserError(f"The token file {file} is missing: {_FIX}.") from None
        except OSError as error:
            raise UserError(f"The token file {file} can't be read ({error.strerror}): {_FIX}.") from error
        if size != shard.bytes:
            raise UserError(f"The token file {file} has {size} bytes instead of {shard.bytes}: {_FIX}.")

    def map(self, number: int) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]:
        """The tokens of a shard and the ends of its documents, memory-mapped.

        Raises:
            UserError: The file does not match the index.
        """
        shard, file = self.index.shards[number], self.folder / self.index.shards[number].name
        try:
            with safetensors.safe_open(file, "pt") as opened:
                tokens, ends = (opened.get_tensor(name).numpy() for name in ("tokens", "ends"))
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"The token file {file} can't be read ({error}): {_FIX}.") from error
        found = (tokens.dtype, tokens.shape, ends.dtype, ends.shape)
        expected = (_DTYPES[self.index.dtype], (shard.tokens,), np.int64, (shard.documents,))
        if found != expected or (np.diff(ends, prepend=0) < 1).any() or ends[-1] != tokens.size:
            raise UserError(f"The token file {file} does not match the index: {_FIX}.")
        return tokens, ends

    def verify(self, on_shard: Callable[[Shard], None] = lambda shard: None) -> None:
        """Reads every file and compares its SHA-256 with that of the index.

        Args:
            on_shard: Called after each file.

        Raises:
            UserError: A file differs; the message names all such files.
        """
        corrupt = []
        for shard in self.index.shards:
            with open(self.folder / shard.name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    corrupt.append(shard.name)
            on_shard(shard)
        if corrupt:
            raise UserError(
                f"In {self.folder} the SHA-256 of {', '.join(corrupt)} does not match the index: {_FIX}."
            )


def write_shard(
    folder: Path, number: int, tokens: npt.NDArray[np.unsignedinteger], ends: npt.NDArray[np.int64]
) -> Shard:
    """Writes a file of tokens atomically."""
    name = f"tokens-{number:05}.safetensors"
    content = safetensors.numpy.save({"tokens": tokens, "ends": ends})
    with atomic_write(folder / name) as partial:
        partial.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return Shard(name=name, documents=ends.size, tokens=tokens.size, bytes=len(content), sha256=digest)


def write_index(folder: Path, index: TokenIndex) -> None:
    """Writes index.json, which completes the folder."""
    write_json(folder / INDEX, asdict(index))


def shards_of(values: Any) -> tuple[Shard, ...]:
    """Converts shards from JSON.

    Raises:
        ValueError: A value is invalid, or a name is not that of a token file in the folder.
    """
    names = {field.name for field in fields(Shard)}
    shards = tuple(Shard(**{name: value[name] for name in names}) for value in values)
    for shard in shards:
        if not all(isinstance(count, int) for count in (shard.documents, shard.tokens, shard.bytes)):
            raise ValueError(f"the counts of {shard.name!r} are not numbers")
        if not isinstance(shard.name, str) or not _NAME.fullmatch(shard.name):
            raise ValueError(f"{shard.name!r} is not the name of a token file")
    return shards


def _read_index(folder: Path) -> TokenIndex:
    file = folder / INDEX
    try:
        values = read_json(file)
    except FileNotFoundError:
        if (folder / PROGRESS).exists():
            raise UserError(
                f"The token files in {folder} are incomplete: run tools/prepare_data.py again with the same "
                "options to resume."
            ) from None
        raise UserError(
            f"The folder {folder} has no token files: create them with tools/prepare_data.py, or set "
            "dataset_path to a folder with token files."
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"The index {file} can't be read ({error}): {_FIX}.") from error
    try:
        if values["format"] != FORMAT:
            raise UserError(
                f"The token files in {folder} have the format {values['format']!r}, not {FORMAT!r}: "
                "recreate them with tools/prepare_data.py."
            )
        values["shards"] = shards_of(values["shards"])
        return TokenIndex(**{field.name: values[field.name] for field in fields(TokenIndex)})
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is not an index of token files ({error}): {_FIX}.") from error
