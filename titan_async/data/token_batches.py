"""Batches of packed sequences from token files.

Sequences are packed as by `PackedDataset`: the same documents in the same order give the same sequences. Only
the offsets of the current window's documents are in memory.

An epoch reads the files in a permuted order, in windows of eight files. The documents of a window are
shuffled together and divided among the ranks. So a rank's epoch is a fixed sequence of pairs (token, next
token), and a position is [epoch, window, pairs of it used]. A resumed run opens only that window.
"""

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from titan_async.data.document_stream import DocumentStream
from titan_async.data.fingerprints import fingerprint_of
from titan_async.data.packing import Sample, Segment, SequenceDataset, pack
from titan_async.data.readers import Position, is_validation, order_of, share_of_worker
from titan_async.data.text_source import TextSource
from titan_async.data.token_files import TokenFiles
from titan_async.errors import UserError

__all__ = ["TokenBatches"]

_WINDOW = 8
"""Number of files whose documents are shuffled together: a file may consist of a single crawl."""


class TokenBatches(SequenceDataset):
    """Batches of packed sequences of one data-parallel rank, each of shape (batch_size, seq_len).

    Documents and sequences are divided among ranks, and positions are saved, as by `PackedDataset`. Arguments
    that are not listed are those of `PackedDataset`.

    Args:
        source: The folder, split and order: a source whose dataset is "tokens".
        batch_size: Sequences per batch; an incomplete batch is left out.

    Raises:
        UserError: As `TokenFiles`; and while iterating, if a file is corrupt, or the data are too short for a
            batch, or for one sequence of an infinite dataset.
    """

    def __init__(
        self,
        source: TextSource,
        *,
        seq_len: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        infinite: bool = False,
        accept_changed_data: bool = False,
    ) -> None:
        super().__init__(source, seq_len, rank, world_size, infinite, batch_size, accept_changed_data)
        source.check_split()
        self._files = TokenFiles(source.dataset_path or "")
        self._batch_size = batch_size
        shards = self._files.index.shards
        digest = zlib.crc32("".join(shard.sha256 for shard in shards).encode())
        self._identity = source.identity(f"{len(shards)} token files {digest:08x}")
        # In a finite dataset all ranks read all documents, and keep their own sequences.
        self._ranks = 1 if infinite else world_size
        self._documents_state: dict[str, Any] = {"epoch": 0, "position": None}
        self._pairs_done = self._produced = 0

    def fingerprints(self) -> list[str]:
        """The fingerprints of the files, from the index; see `titan_async.data.fingerprints`."""
        shards = self._files.index.shards
        return [fingerprint_of(shard.name, shard.bytes, shard.sha256[:16]) for shard in shards]

    def state_dict(self) -> dict[str, Any]:
        """The position after the last yielded batch, as JSON data of a small constant size."""
        window, before = self._documents_state["position"] or (0, 0)
        return {
            "data": self._identity,
            "position": [self._documents_state["epoch"], window, before + self._pairs_done],
            "taken": self._produced // self._ranks * self._seq_len,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a position of `state_dict`; it takes effect for iterators created afterwards.

        Raises:
            UserError: The position belongs to other data, or to another order.
        """
        self._check_data(state_dict["data"])
        epoch, *position = state_dict["position"]
        self._documents_state, self._pairs_done = {"epoch": epoch, "position": position}, 0
        self._produced = state_dict["taken"] // self._seq_len * self._ranks

    def __iter__(self) -> Iterator[Sample]:
        share = (self._rank, self._world_size) if self._infinite else (0, 1)
        reader = _TokenReader(self._files, self._source, *share_of_worker(*share))
        sequences = self._sequences(DocumentStream(reader, self._identity))
        while len(batch := list(itertools.islice(sequences, self._batch_size))) == self._batch_size:
            reader.check_sizes()
            yield self._pack(list(itertools.chain.from_iterable(batch)))

    def _pack(self, segments: list[Segment]) -> Sample:
        fields, labels = pack(segments)
        # This check is cheap. Without it, an embedding on a GPU would fail with an unspecific assertion.
        highest, entries = int(max(fields["input"].max(), labels.max())), self._files.index.vocab_size
        if highest >= entries:
            raise UserError(
                f"The token files in {self._files.folder} contain the token {highest}, but the vocabulary "
                f"has {entries} entries: find the corrupt file with tools/prepare_data.py --verify."
            )
        inputs, positions, labels = (
            tensor.view(-1, self._seq_len) for tensor in (fields["input"], fields["positions"], labels)
        )
        # Positions of a sequence that begins within a document count from there.
        return {"input": inputs, "positions": positions.minimum(torch.arange(self._seq_len))}, labels


class _TokenReader:
    """Reads a share of the documents of an epoch, as memory-mapped arrays of tokens.

    A position is [window, pairs of the window before it], and may be within a document.
    """

    def __init__(self, files: TokenFiles, source: TextSource, share: int, shares: int) -> None:
        self._files, self._source = files, source
        self._share, self._shares = share, shares
        self._in_use: list[int] = []

    def check_sizes(self) -> None:
        """Checks the files of the documents since the last call, and of the one before, which may continue.

        Raises:
            UserError: One is missing or of the wrong size.
        """
        for number in set(self._in_use):
            self._files.check_size(number)
        del self._in_use[:-1]

    def read(self, epoch: int, position: Position) -> Iterator[tuple[Any, Position]]:
        """Yields the documents from `position` on, each with the position after it."""
        window, used = position or (0, 0)
        order = order_of(len(self._files.index.shards), self._source, epoch)
        for first in range(window * _WINDOW, len(order), _WINDOW):
            yield from self._read(order[first : first + _WINDOW].tolist(), epoch, window, used)
            window, used = window + 1, 0

    def _read(self, shards: list[int], epoch: int, window: int, used: int) -> Iterator[tuple[Any, Position]]:
        source, tokens = self._source, {}
        # For each document: its file, its first token, and its number of pairs.
        numbers, starts, pairs = [], [], []
        for number in shards:
            tokens[number], ends = self._files.map(number)
            bounds = np.concatenate([[0], ends])
            index = self._files.first_documents[number] + np.arange(ends.size)
            chosen = is_validation(index, source.validation_fraction) == (source.split == "validation")
            chosen &= np.diff(bounds) > 1
            starts.append(bounds[:-1][chosen])
            pairs.append(np.diff(bounds)[chosen] - 1)
            numbers.append(np.full(pairs[-1].size, number))
        # The share that gets an additional document changes with the window.
        own = slice((self._share + window) % self._shares, None, self._shares)
        order = order_of(sum(map(len, pairs)), source, epoch, window)[own]
        lengths = np.concatenate(pairs)[order]
        ends = np.cumsum(lengths)
        first = int(np.searchsorted(ends, used, side="right"))
        documents = zip(
            *(np.concatenate(each)[order][first:].tolist() for each in (numbers, starts)),
            lengths[first:].tolist(),
            ends[first:].tolist(),
            strict=True,
        )
        last = int(ends[-1]) if ends.size else 0
        for number, start, length, end in documents:
            self._in_use.append(number)
            skipped = max(used - (end - length), 0)
            following = [window, end] if end < last else [window + 1, 0]
            yield tokens[number][start + skipped : start + length + 1], following
