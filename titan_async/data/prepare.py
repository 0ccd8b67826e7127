"""Tokenization of text into token files, in parallel processes, with resumption.

One process reads the text in order and divides it into batches of documents; worker processes tokenize the
batches; the first process writes the results in order to one file after the other, each of which ends with a
batch. `progress.json` lists the complete files and the position of the next one in the text. So the files
depend only on the text, the tokenizer and `shard_tokens`, and not on the number of processes or on
interruptions. The last step replaces progress.json by index.json.
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
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_async.data.document_stream import DocumentStream, open_documents
from titan_async.data.encoder import DocumentEncoder
from titan_async.data.files import find_files, read_documents
from titan_async.data.shakespeare import play_scenes
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
from titan_async.file_io import read_json, write_json

__all__ = ["SHARD_TOKENS", "estimate_documents", "prepare_tokens"]

SHARD_TOKENS = 2**26
"""Approximate tokens per file: 128 MiB for a small vocabulary."""

_BATCH_CHARACTERS = 2**20
"""A batch of documents ends at this number of characters, or at `shard_tokens` if that is smaller."""

_BATCH_DOCUMENTS = 1024
_BATCHES_AHEAD = 4
"""Pending batches per process."""

_Batch = tuple[list[str], Any]
"""Texts, and the stream's state after them."""

_Tokens = tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]
"""The concatenated tokens of documents, and the length of each."""


def prepare_tokens(
    source: TextSource,
    tokenizer_folder: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    processes: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    on_progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> TokenIndex:
    """Tokenizes all documents of a source into a folder of token files.

    An interrupted call is resumed, and a finished folder is left unchanged. All documents are written; they
    are split into training and validation when the files are read.

    Args:
        source: The text. Its order and its `validation_fraction` are not used.
        tokenizer_folder: Folder of the tokenizer; its BOS and EOS tokens are written as well.
        folder: Folder of the files; created if it does not exist.
        processes: Number of processes that tokenize; 1 is this process.
        shard_tokens: A file ends with the batch that reaches this number of tokens.
        on_progress: Called with the documents and tokens done so far.

    Raises:
        UserError: The text, tokenizer or folder can't be used, or the folder has files of other settings.

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
            f"processes is {processes} and shard_tokens is {shard_tokens}: set both to 1 or more."
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
        with _locked(path):
            if (path / INDEX).exists():
                _check_settings(path, asdict(TokenFiles(path).index), settings)
            else:
                batches = _batches(stream, shard_tokens)
                with contextlib.closing(_encoded(batches, tokenizer_folder, encoder, processes)) as encoded:
                    _write(path, settings, shard_tokens, stream, encoded, on_progress)
            return TokenFiles(path).index
    except OSError as error:
        raise UserError(
            f"The folder {path} can't be written to ({error.strerror or error}): free space or name another."
        ) from error


def estimate_documents(source: TextSource) -> int | None:
    """Estimates the number of documents of a source in all splits; None if unknown.

    Raises:
        UserError: As `open_documents`.
    """
    if source.is_on_hub:
        from titan_async.data.hub import files_of_split
        from titan_async.data.parquet import count_rows

        _, urls, _ = files_of_split(source)
        # Files have similar lengths, and each would need a request.
        return len(urls) * count_rows(urls[0]) if all(url.endswith(".parquet") for url in urls) else None
    if source.local_path is None:
        return len(play_scenes())
    counts = [_estimate(file, source.text_column) for file in find_files(source.local_path)]
    return None if None in counts else sum(count for count in counts if count is not None)


def _estimate(file: Path, text_column: str) -> int | None:
    size = file.stat().st_size
    if file.suffix == ".parquet":
        from titan_async.data.parquet import count_rows

        return count_rows(str(file))
    if file.suffix == ".jsonl":
        with file.open("rb") as opened:
            beginning = opened.read(2**20)
        lines = beginning.count(b"\n") + (not beginning.endswith(b"\n"))
        return lines if len(beginning) == size else round(lines * size / len(beginning))
    if file.suffix == ".txt":
        # Split into documents of similar length.
        first = next(read_documents(file, text_column), "")
        return max(1, round(size / max(len(first.encode()), 1)))
    return None


def _write(
    folder: Path,
    settings: dict[str, Any],
    shard_tokens: int,
    stream: DocumentStream,
    encoded: Iterator[tuple[_Tokens, Any]],
    on_progress: Callable[[int, int], None],
) -> None:
    """Writes the remaining files, and the index, which completes the folder."""
    progress = {"settings": settings | {"shard_tokens": shard_tokens}}
    shards = _resume(folder, progress["settings"], stream)
    for batches, position in _grouped(encoded, shard_tokens, _totals(shards), on_progress):
        tokens, lengths = zip(*batches, strict=True)
        ends = np.cumsum(np.concatenate(lengths))
        shards.append(write_shard(folder, len(shards), np.concatenate(tokens), ends))
        progress |= {"shards": [asdict(shard) for shard in shards], "position": position}
        write_json(folder / PROGRESS, progress)
    if not shards:
        raise UserError("The text has no documents: name other text.")
    write_index(folder, TokenIndex(**settings, **_totals(shards), shards=tuple(shards)))
    for left in (folder / PROGRESS, *folder.glob(".*.partial")):
        left.unlink(missing_ok=True)


def _resume(folder: Path, settings: dict[str, Any], stream: DocumentStream) -> list[Shard]:
    """The files of an interrupted call; the stream is moved to the start of the next file."""
    if not (folder / PROGRESS).exists():
        return []
    try:
        progress = read_json(folder / PROGRESS)
        _check_settings(folder, progress["settings"], settings)
        shards = shards_of(progress["shards"])
        stream.load_state_dict(progress["position"])
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"The file {folder / PROGRESS} can't be read ({error}): delete the folder and start again."
        ) from error
    return list(shards)


def _check_settings(folder: Path, there: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        if there.get(key) != value:
            raise UserError(
                f"The folder {folder} has token files whose {key} is {there.get(key)!r}, not "
                f"{value!r}: name another folder, or delete that one."
            )


def _totals(shards: list[Shard]) -> dict[str, int]:
    return {key: sum(getattr(shard, key) for shard in shards) for key in ("documents", "tokens")}


def _grouped(
    encoded: Iterator[tuple[_Tokens, Any]],
    shard_tokens: int,
    done: dict[str, int],
    on_progress: Callable[[int, int], None],
) -> Iterator[tuple[list[_Tokens], Any]]:
    """The batches of each file, with the position after them."""
    documents, tokens = done["documents"], done["tokens"]
    on_progress(documents, tokens)
    batches: list[_Tokens] = []
    position = None
    for batch, position in encoded:
        batches.append(batch)
        documents += batch[1].size
        tokens += batch[0].size
        on_progress(documents, tokens)
        if sum(batch[0].size for batch in batches) >= shard_tokens:
            yield batches, position
            batches = []
    if batches:
        yield batches, position


def _batches(stream: DocumentStream, shard_tokens: int) -> Iterator[_Batch]:
    if stream.epoch:
        return  # the text has been read
    texts: list[str] = []
    characters = 0
    for text in stream:
        texts.append(text)
        characters += len(text)
        if characters >= min(_BATCH_CHARACTERS, shard_tokens) or len(texts) == _BATCH_DOCUMENTS:
            yield texts, stream.state_dict()
            texts, characters = [], 0
    if texts:
        yield texts, stream.state_dict()


def _encoded(
    batches: Iterator[_Batch], folder: str | os.PathLike[str], encoder: DocumentEncoder, processes: int
) -> Iterator[tuple[_Tokens, Any]]:
    """The tokens of batches in order, each with its position, computed in `processes` processes."""
    if processes == 1:
        for texts, position in batches:
            yield _tokens_of(encoder, texts), position
        return
    context = multiprocessing.get_context("forkserver")
    # Imported once instead of in each process.
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(processes, context, _start_worker, (str(folder),))
    pending: deque[tuple[Future[_Tokens], Any]] = deque()
    try:
        for batch in itertools.chain(batches, [None]):
            if batch is not None:
                pending.append((pool.submit(_encode_in_worker, batch[0]), batch[1]))
            while pending and (batch is None or len(pending) > processes * _BATCHES_AHEAD):
                future, position = pending.popleft()
                yield future.result(), position
    except BrokenProcessPool as error:
        raise UserError(
            "A tokenizer process has ended, perhaps because there was too little memory: start again with "
            "fewer processes, and it resumes."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _tokens_of(encoder: DocumentEncoder, texts: list[str]) -> _Tokens:
    # A document without tokens, possible without BOS and EOS, is left out.
    documents = [tokens for tokens in encoder(texts) if tokens.size]
    lengths = np.array([tokens.size for tokens in documents], dtype=np.int64)
    dtype = np.uint16 if token_dtype(encoder.vocab_size) == "U16" else np.uint32
    return np.concatenate(documents or [np.empty(0, dtype=np.uint32)]).astype(dtype), lengths


_encoder: DocumentEncoder | None = None
"""The encoder of a worker process."""


def _start_worker(folder: str) -> None:
    global _encoder
    # Batches are distributed over processes; threads within them would compete for cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C is sent to all processes; only the first one handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = DocumentEncoder(folder)


def _end_with_parent() -> None:
    # Without this, the workers of a killed parent would wait forever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _encode_in_worker(texts: list[str]) -> _Tokens:
    assert _encoder is not None
    return _tokens_of(_encoder, texts)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Creates and locks the folder; if nothing was written, it is removed."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # The lock belongs to the open file, and ends with the process.
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
            if list(folder.iterdir()) == [lock]:
                with contextlib.suppress(OSError):
                    lock.unlink()
                    if is_new:
                        folder.rmdir()
