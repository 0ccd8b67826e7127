"""Data layer: files of tokens, written once and mapped into memory: their format.

A folder of token files has

    index.json                 what they were made of and by, and each file's name, counts, size and SHA-256
    tokens-00000.safetensors   the tensors `tokens` (U16, or U32 where the vocabulary is larger), documents
                               end to end with the tokens that begin and end them, and `ends` (I64), the
                               index behind each document's last token
    tokens-00001.safetensors   ... as many as there are

Files are of safetensors because one holds both tensors, says what they are, is mapped into memory by its
library, and can hold nothing but numbers. NumPy's own .npy would take two files a shard, which a killed
process can leave apart; a `MemoryMappedTensor` of tensordict is a bare file without type or shape, and
`TensorDict.load_memmap` may unpickle what lies beside it.

Whoever opens a folder checks that each file is there and as long as it should be. `verify` reads all of them.
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
"""Stands in the place of the index while the files are being made."""

FORMAT = "titan_async tokens 1"

_FIX = "copy the folder again, or make it anew with tools/prepare_data.py"
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
    """What a folder of token files holds: the content of its index.json."""

    format: str
    source: str
    """Names the text, as the identity of its `DocumentStream`."""
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
    """The smallest type that holds the tokens of a vocabulary."""
    return "U16" if vocab_size <= 2**16 else "U32"


class TokenFiles:
    """A folder of token files, opened for reading.

    Raises:
        UserError: There is none, it is unfinished, or a file is missing or of the wrong size.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.expanduser(folder))
        self.index = _read_index(self.folder)
        self.first_documents = np.cumsum([0, *(shard.documents for shard in self.index.shards)])
        """The number of documents before each shard, and of all."""
        for number in range(len(self.index.shards)):
            self.check_size(number)

    def check_size(self, number: int) -> None:
        """Look whether a shard is as long as it should be.

        To be called before what `map` has given is used: the end of a file that was cut since then cannot be
        read, and whoever tries is killed by SIGBUS.

        Raises:
            UserError: It is not, or it is missing.
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
        """The tokens of a shard, and where its documents end; read from the disk when they are used.

        Raises:
            UserError: The file is not what the index says.
        """
        shard, file = self.index.shards[number], self.folder / self.index.shards[number].name
        try:
            with safetensors.safe_open(file, "pt") as opened:
                tokens, ends = (opened.get_tensor(name).numpy() for name in ("tokens", "ends"))
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"The token file {file} can't be read ({error}): {_FIX}.") from error
        there = (tokens.dtype, tokens.shape, ends.dtype, ends.shape)
        promised = (_DTYPES[self.index.dtype], (shard.tokens,), np.int64, (shard.documents,))
        if there != promised or (np.diff(ends, prepend=0) < 1).any() or ends[-1] != tokens.size:
            raise UserError(f"The token file {file} is not the one that the index names: {_FIX}.")
        return tokens, ends

    def verify(self, on_shard: Callable[[Shard], None] = lambda shard: None) -> None:
        """Read every file and compare its SHA-256 with that of the index.

        Args:
            on_shard: Called after each file.

        Raises:
            UserError: A file differs; the sentence names all that do.
        """
        corrupt = []
        for shard in self.index.shards:
            with open(self.folder / shard.name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    corrupt.append(shard.name)
            on_shard(shard)
        if corrupt:
            raise UserError(
                f"In {self.folder} the SHA-256 of {', '.join(corrupt)} is not that of the index: {_FIX}."
            )


def write_shard(
    folder: Path, number: int, tokens: npt.NDArray[np.unsignedinteger], ends: npt.NDArray[np.int64]
) -> Shard:
    """Write a file of tokens, which appears whole or not at all."""
    name = f"tokens-{number:05}.safetensors"
    content = safetensors.numpy.save({"tokens": tokens, "ends": ends})
    with atomic_write(folder / name) as partial:
        partial.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return Shard(name=name, documents=ends.size, tokens=tokens.size, bytes=len(content), sha256=digest)


def write_index(folder: Path, index: TokenIndex) -> None:
    """Write index.json, which makes the folder one that can be opened."""
    write_json(folder / INDEX, asdict(index))


def shards_of(values: Any) -> tuple[Shard, ...]:
    """Shards as they were written to JSON.

    Raises:
        ValueError: These are none, or one's name leads out of the folder.
    """
    names = {field.name for field in fields(Shard)}
    shards = tuple(Shard(**{name: value[name] for name in names}) for value in values)
    for shard in shards:
        if not all(isinstance(count, int) for count in (shard.documents, shard.tokens, shard.bytes)):
            raise ValueError(f"the counts of {shard.name!r} are no numbers")
        if not isinstance(shard.name, str) or not _NAME.fullmatch(shard.name):
            raise ValueError(f"{shard.name!r} is no name of a token file")
    return shards


def _read_index(folder: Path) -> TokenIndex:
    file = folder / INDEX
    try:
        values = read_json(file)
    except FileNotFoundError:
        if (folder / PROGRESS).exists():
            raise UserError(
                f"The token files in {folder} are unfinished: run tools/prepare_data.py again with the same "
                "options, and it goes on where it stopped."
            ) from None
        raise UserError(
            f"The folder {folder} holds no token files: make them with tools/prepare_data.py, or set "
            "dataset_path to a folder made by it."
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"The index {file} can't be read ({error}): {_FIX}.") from error
    try:
        if values["format"] != FORMAT:
            raise UserError(
                f"The token files in {folder} are of the format {values['format']!r}, not {FORMAT!r}: make "
                "them anew with tools/prepare_data.py."
            )
        values["shards"] = shards_of(values["shards"])
        return TokenIndex(**{field.name: values[field.name] for field in fields(TokenIndex)})
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The index {file} is not one of token files ({error}): {_FIX}.") from error
