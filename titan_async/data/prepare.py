"""Data layer: text to token files, in parallel processes, in a way that can be interrupted anywhere.

One process reads the text in the order it has and cuts it into batches of documents; others tokenize them;
the first takes the results in order and fills one file after the other, each of which ends with a batch.
`progress.json` says which files are whole and where in the text the next one begins. So the files depend on
the text, the tokenizer and `shard_tokens` alone: neither on the number of processes, nor on how often the
work was interrupted. The last step replaces progress.json by index.json.
"""

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_async.data.encoder import DocumentEncoder
from titan_async.data.sources import DocumentStream, open_documents
from titan_async.data.text_source import TextSource
from titan_async.data.token_files import (
    FORMAT,
    INDEX,
    PROGRESS,
    Shard,
    TokenFiles,
    TokenIndex,
    shards_of,
    token_dtype,
    write_index,
    write_shard,
)
from titan_async.errors import UserError
from titan_async.whole_files import read_json, write_json

__all__ = ["SHARD_TOKENS", "prepare_tokens"]

SHARD_TOKENS = 2**26
"""Tokens of a file, about: 128 MiB where the vocabulary is small."""

_BATCH_CHARACTERS = 2**20
"""A batch of documents ends when it has as many, or as many as a file has tokens: a file is some batches."""

_BATCH_DOCUMENTS = 1024
_BATCHES_AHEAD = 4
"""Batches under way for each process."""

_Tokens = tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]
"""The tokens of some documents, end to end, and the length of each."""


def prepare_tokens(
    source: TextSource,
    tokenizer_folder: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    processes: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    on_progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> TokenIndex:
    """Tokenize all documents of a source into a folder of token files, or go on with that.

    What a killed call has left is gone on with, and a folder that is finished is left as it is. Training
    and validation documents are told apart when the files are read, so that all are written here.

    Args:
        source: The text. Its order and its `validation_fraction` are not used.
        tokenizer_folder: Folder of the tokenizer, whose tokens of beginning and end are written too.
        folder: Where the files are written; made if it does not exist.
        processes: Processes that tokenize; with 1, this one does.
        shard_tokens: A file ends when it has as many tokens.
        on_progress: Called with the documents and tokens done so far.

    Raises:
        UserError: The text, tokenizer or folder can't be used, or the folder holds files of something else.

    Examples:
        >>> import tempfile
        >>> from titan_async.data import TokenFiles, shakespeare_tokenizer_folder
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "texts.jsonl").write_text('{"text": "one"}\\n{"text": "two"}\\n')
        ...     out = Path(folder, "tokens")
        ...     index = prepare_tokens(TextSource(dataset_path=folder), shakespeare_tokenizer_folder(), out)
        ...     tokens, ends = TokenFiles(out).map(0)
        >>> index.documents, index.tokens == len(tokens), index.tokens == ends.max().item()
        (2, True, True)
    """
    if processes < 1 or shard_tokens < 1:
        raise UserError(
            f"{processes} processes and {shard_tokens} tokens a file were asked for: set both to 1 or more."
        )
    encoder = DocumentEncoder(tokenizer_folder)
    stream = open_documents(replace(source, shuffle=False, validation_fraction=0.0))
    stream.empty.logs = True
    settings = {
        "format": FORMAT,
        "source": stream.identity,
        "tokenizer_sha256": encoder.sha256,
        "vocab_size": encoder.vocab_size,
        "bos_id": encoder.bos_id,
        "eos_id": encoder.eos_id,
        "dtype": token_dtype(encoder.vocab_size),
    }
    path = Path(os.path.expanduser(folder))
    try:
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path, is_new):
            work = _Work(path, {**settings, "shard_tokens": shard_tokens}, stream)
            if not work.is_finished:
                with _encoding(tokenizer_folder, encoder, processes) as encode:
                    work.run(encode, on_progress)
                work.finish(settings)
            return TokenFiles(path).index
    except OSError as error:
        raise UserError(
            f"The folder {path} can't be written to ({error.strerror or error}): make room or name another."
        ) from error


class _Work:
    """The state of a folder in the making."""

    def __init__(self, folder: Path, settings: dict[str, Any], stream: DocumentStream) -> None:
        self._folder, self._settings, self._stream = folder, settings, stream
        self._shards: list[Shard] = []
        self.is_finished = (folder / INDEX).exists()
        if self.is_finished:
            index = TokenFiles(folder).index
            self._check({key: getattr(index, key, settings[key]) for key in settings})
        elif (folder / PROGRESS).exists():
            try:
                progress = read_json(folder / PROGRESS)
                self._check(progress["settings"])
                self._shards = list(shards_of(progress["shards"]))
                stream.load_state_dict(progress["position"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                if isinstance(error, UserError):
                    raise
                raise UserError(
                    f"The file {folder / PROGRESS} can't be read ({error}): delete the folder and start "
                    "again."
                ) from error

    def run(
        self, encode: Callable[[Iterator["_Batch"]], Iterator["_Encoded"]], report: Callable[[int, int], None]
    ) -> None:
        """Write all files that are not there yet."""
        documents = sum(shard.documents for shard in self._shards)
        tokens = sum(shard.tokens for shard in self._shards)
        report(documents, tokens)
        done: list[_Tokens] = []
        size = 0
        position = None
        for result in encode(_batches(self._stream, self._settings["shard_tokens"])):
            done.append(result.tokens)
            size += result.tokens[0].size
            documents += result.tokens[1].size
            tokens += result.tokens[0].size
            position = result.position
            report(documents, tokens)
            if size >= self._settings["shard_tokens"]:
                self._write(done, position)
                done, size = [], 0
        if done:
            self._write(done, position)
        if not self._shards:
            raise UserError("The text has no document, so that there is nothing to write: name other text.")

    def finish(self, settings: dict[str, Any]) -> None:
        """Write the index, with which the folder can be read."""
        index = TokenIndex(
            **settings,
            documents=sum(shard.documents for shard in self._shards),
            tokens=sum(shard.tokens for shard in self._shards),
            shards=tuple(self._shards),
        )
        write_index(self._folder, index)
        (self._folder / PROGRESS).unlink(missing_ok=True)
        for rest in self._folder.glob(".*.partial"):
            rest.unlink()

    def _write(self, parts: list[_Tokens], position: Any) -> None:
        tokens = np.concatenate([tokens for tokens, _ in parts])
        ends = np.cumsum(np.concatenate([lengths for _, lengths in parts]))
        self._shards.append(write_shard(self._folder, len(self._shards), tokens, ends))
        progress = {
            "settings": self._settings,
            "shards": [asdict(shard) for shard in self._shards],
            "position": position,
        }
        write_json(self._folder / PROGRESS, progress)

    def _check(self, there: dict[str, Any]) -> None:
        for key, value in self._settings.items():
            if there.get(key) != value:
                raise UserError(
                    f"The folder {self._folder} holds token files whose {key} is {there.get(key)!r}, not "
                    f"{value!r}: name another folder, or delete that one."
                )


@dataclass(slots=True)
class _Batch:
    texts: list[str]
    position: Any
    """The stream's state behind these documents."""


@dataclass(slots=True)
class _Encoded:
    tokens: _Tokens
    position: Any


def _batches(stream: DocumentStream, shard_tokens: int) -> Iterator[_Batch]:
    if stream.epoch:
        return  # all has been read
    texts: list[str] = []
    characters = 0
    for text in stream:
        texts.append(text)
        characters += len(text)
        if characters >= min(_BATCH_CHARACTERS, shard_tokens) or len(texts) == _BATCH_DOCUMENTS:
            yield _Batch(texts, stream.state_dict())
            texts, characters = [], 0
    if texts:
        yield _Batch(texts, stream.state_dict())


def _tokens_of(encoder: DocumentEncoder, texts: list[str]) -> _Tokens:
    # A document of no token at all, as a tokenizer without marks can make of a blank one, is left out.
    documents = [tokens for tokens in encoder(texts) if tokens.size]
    lengths = np.array([tokens.size for tokens in documents], dtype=np.int64)
    dtype = np.uint16 if token_dtype(encoder.vocab_size) == "U16" else np.uint32
    return np.concatenate(documents or [np.empty(0, dtype=np.uint32)]).astype(dtype), lengths


@contextlib.contextmanager
def _encoding(
    folder: str | os.PathLike[str], encoder: DocumentEncoder, processes: int
) -> Iterator[Callable[[Iterator[_Batch]], Iterator[_Encoded]]]:
    """A function that tokenizes batches in order, in as many processes."""
    if processes == 1:
        yield lambda batches: (
            _Encoded(_tokens_of(encoder, batch.texts), batch.position) for batch in batches
        )
        return
    context = multiprocessing.get_context("forkserver")
    # Imported once instead of by each process.
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(processes, context, _start_worker, (str(folder),))

    def encode(batches: Iterator[_Batch]) -> Iterator[_Encoded]:
        pending: deque[tuple[Future[_Tokens], Any]] = deque()
        for batch in itertools.chain(batches, [None]):
            if batch is not None:
                pending.append((pool.submit(_encode_in_worker, batch.texts), batch.position))
            while pending and (batch is None or len(pending) > processes * _BATCHES_AHEAD):
                future, position = pending.popleft()
                yield _Encoded(future.result(), position)

    try:
        yield encode
    except BrokenProcessPool as error:
        raise UserError(
            "A process that tokenizes has ended, perhaps for want of memory: start again with fewer "
            "processes, and it goes on where it stopped."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: DocumentEncoder | None = None
"""That of a worker process."""


def _start_worker(folder: str) -> None:
    global _encoder
    # Batches are what is divided among processes; threads below them would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # An interruption from the keyboard goes to all processes, but is for the first one to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = DocumentEncoder(folder)


def _end_with_parent() -> None:
    # A killed parent leaves its workers waiting for work that never comes.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _encode_in_worker(texts: list[str]) -> _Tokens:
    assert _encoder is not None
    return _tokens_of(_encoder, texts)


@contextlib.contextmanager
def _locked(folder: Path, is_new: bool) -> Iterator[None]:
    # The lock is the open file's, and ends with the process however that ends.
    lock = folder / ".lock"
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another process is writing to the folder {folder}: wait for it, or name another folder."
            ) from None
        try:
            yield
        finally:
            if {file.name for file in folder.iterdir()} == {lock.name}:  # nothing came of it
                with contextlib.suppress(OSError):
                    lock.unlink()
                    if is_new:
                        folder.rmdir()
