"""Data layer: batches of packed sequences from token files.

Packed as `PackedDataset` packs text: the same documents in the same order give the same sequences. Nothing
of the files is held in memory but what the current window's documents begin and end at.

An epoch takes the files in an order of its own, eight at a time. The documents of such a window are shuffled
together and dealt to the ranks; so a rank's epoch is a fixed sequence of pairs (token, next token), and a
position is [epoch, window, pairs of it used]. Resuming opens that window, and reads nothing else.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from titan_async.data.fingerprints import fingerprint_of
from titan_async.data.packing import Sample, Segment, SequenceDataset, pack
from titan_async.data.readers import is_validation, order_of, share_of_worker
from titan_async.data.text_source import TextSource
from titan_async.data.token_files import TokenFiles
from titan_async.errors import UserError

__all__ = ["TokenBatches"]

_FILES_TOGETHER = 8
"""Files whose documents are shuffled together: neighbours in a file often come from the same crawl."""

_Ints = npt.NDArray[np.int64]


class TokenBatches(SequenceDataset):
    """Batches of packed sequences of one data-parallel rank, each of shape (batch_size, seq_len).

    An infinite dataset gives each rank its own documents, epoch after epoch; a finite one is a single epoch,
    whose sequences the ranks take by turns, so that all have equally many. See `PackedDataset`.

    Args:
        source: The folder, split and order: a source whose dataset is "tokens".
        seq_len: Length of the sequences.
        batch_size: Sequences in a batch; what fills none is left out.
        rank: This data-parallel rank, from 0.
        world_size: Number of data-parallel ranks.
        infinite: Whether to go on with the next epoch at an epoch's end.
        accept_changed_data: Whether a position may be one in other files, or in more or fewer.

    Raises:
        UserError: As `TokenFiles`; and while iterating, when a file is corrupt, or when there is too little
            for a batch, or for one sequence of an infinite dataset.
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
        super().__init__(source, seq_len, rank, world_size, infinite, accept_changed_data)
        source.check_split()
        self._files = TokenFiles(source.dataset_path or "")
        self._batch_size = batch_size
        shards = self._files.index.shards
        digest = zlib.crc32("".join(shard.sha256 for shard in shards).encode())
        self._identity = source.identity(f"{len(shards)} token files {digest:08x}")
        self._start(epoch=0)

    def fingerprints(self) -> list[str]:
        """The fingerprints of the files, by their index; see `titan_async.data.fingerprints`."""
        shards = self._files.index.shards
        return [fingerprint_of(shard.name, shard.bytes, shard.sha256[:16]) for shard in shards]

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch yielded last, as JSON data of a fixed small size."""
        return {"data": self._identity, "position": self._position, "taken": self._taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position of `state_dict`; takes effect for iterators made afterwards.

        Raises:
            UserError: The position is one in other data, or in another order of it.
        """
        self._check_data(state_dict["data"])
        self._position = state_dict["position"]
        self._taken = state_dict["taken"]

    def __iter__(self) -> Iterator[Sample]:
        # Of a finite dataset all ranks read all documents, and keep their own sequences.
        share = (self._rank, self._world_size) if self._infinite else (0, 1)
        pairs = _Pairs(self._files, self._source, *share_of_worker(*share), self._position)
        while segments := (self._next if self._infinite else self._next_of_rank)(pairs):
            self._position = pairs.position
            self._taken += self._batch_size * self._seq_len
            yield self._pack(segments)
        if not self._taken:
            raise self._too_little(self._batch_size)
        self._start(self._position[0] + 1)

    def _next(self, pairs: "_Pairs") -> list[Segment]:
        """The segments of a batch, in this epoch and, where that ends, in the next."""
        size = self._batch_size * self._seq_len
        segments, missing = pairs.take(size)
        while missing:
            if self._taken + size - missing < self._seq_len:
                raise self._too_little(1)
            pairs.start_epoch()
            more, missing = pairs.take(missing)
            segments += more
        return segments

    def _next_of_rank(self, pairs: "_Pairs") -> list[Segment]:
        """The segments of a batch of this rank's sequences; none if not all ranks can fill one any more."""
        segments: list[Segment] = []
        for _ in range(self._batch_size):
            before = pairs.skip(self._rank * self._seq_len)
            own, missing = pairs.take(self._seq_len)
            segments += own
            if before or missing or pairs.skip((self._world_size - 1 - self._rank) * self._seq_len):
                return []
        return segments

    def _start(self, epoch: int) -> None:
        self._position = [epoch, 0, 0]
        self._taken = 0
        """Pairs of this pass, to tell whether there is anything at all."""

    def _pack(self, segments: list[Segment]) -> Sample:
        fields, labels = pack(segments)
        # Cheap, where a model would answer with an assertion on a GPU that names nothing.
        highest, entries = int(max(fields["input"].max(), labels.max())), self._files.index.vocab_size
        if highest >= entries:
            raise UserError(
                f"The token files in {self._files.folder} hold a token {highest} where the vocabulary has "
                f"{entries} entries, so that a file must be corrupt: find it with tools/prepare_data.py "
                "--verify."
            )
        inputs, positions, labels = (
            tensor.view(-1, self._seq_len) for tensor in (fields["input"], fields["positions"], labels)
        )
        # A sequence that begins within a document counts from there.
        return {"input": inputs, "positions": positions.minimum(torch.arange(self._seq_len))}, labels


class _Pairs:
    """The pairs of a share of an epoch, one after the other, over all its windows."""

    def __init__(
        self, files: TokenFiles, source: TextSource, share: int, shares: int, position: list[int]
    ) -> None:
        self._files, self._source = files, source
        self._share, self._shares = share, shares
        self._epoch, self._number, self._used = position
        self._window: _Window | None = None

    @property
    def position(self) -> list[int]:
        """[epoch, window, pairs of it used]"""
        return [self._epoch, self._number, self._used]

    def start_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self._epoch, self._number, self._used, self._window = self._epoch + 1, 0, 0, None

    def take(self, count: int) -> tuple[list[Segment], int]:
        """The segments of so many pairs, and how many of them the epoch lacks."""
        segments: list[Segment] = []
        for window, low, high in self._stretches(count):
            segments += window.segments(low, high)
            count -= high - low
        return segments, count

    def skip(self, count: int) -> int:
        """Leave out so many pairs; returns how many of them the epoch lacks."""
        return count - sum(high - low for _, low, high in self._stretches(count))

    def _stretches(self, count: int) -> Iterator[tuple["_Window", int, int]]:
        """Windows with the bounds of the next so many pairs in them, or of what the epoch has of those."""
        while count and (self._window or self._open()):
            window = self._window
            # In data that have changed, a position may lie behind the window's end.
            low, high = self._used, min(self._used + count, window.pairs)
            if low < high:
                self._used, count = high, count - (high - low)
                yield window, low, high
            else:
                self._number, self._used, self._window = self._number + 1, 0, None

    def _open(self) -> bool:
        """Open the window of the position, if the epoch has it."""
        order = order_of(len(self._files.index.shards), self._source, self._epoch)
        shards = order[self._number * _FILES_TOGETHER : (self._number + 1) * _FILES_TOGETHER]
        if not len(shards):
            return False
        # One document more falls to another share in each window.
        dealt = slice((self._share + self._number) % self._shares, None, self._shares)
        self._window = _Window(self._files, self._source, shards, (self._epoch, self._number), dealt)
        return True


class _Window:
    """The documents of a share of some files, in the order in which they are read.

    Args:
        files: The folder.
        source: Split and order.
        shards: Numbers of the files.
        key: Epoch and window, which decide the order.
        dealt: Which of the documents, in that order, are this share's.
    """

    def __init__(
        self, files: TokenFiles, source: TextSource, shards: _Ints, key: tuple[int, int], dealt: slice
    ) -> None:
        self._files = files
        self._tokens: dict[int, npt.NDArray[np.unsignedinteger]] = {}
        # Of each document: its file, its first token, and its pairs.
        numbers, starts, pairs = [], [], []
        for number in shards:
            self._tokens[number], ends = files.map(number)
            bounds = np.concatenate([[0], ends])
            index = files.first_documents[number] + np.arange(ends.size)
            chosen = is_validation(index, source.validation_fraction) == (source.split == "validation")
            chosen &= np.diff(bounds) > 1
            starts.append(bounds[:-1][chosen])
            pairs.append(np.diff(bounds)[chosen] - 1)
            numbers.append(np.full(pairs[-1].size, number))
        order = order_of(sum(map(len, pairs)), source, *key)[dealt]
        self._numbers, self._starts = np.concatenate(numbers)[order], np.concatenate(starts)[order]
        self._before: _Ints = np.concatenate([[0], np.cumsum(np.concatenate(pairs)[order])])
        """The pairs before each document, and of all."""
        self.pairs = int(self._before[-1])

    def segments(self, low: int, high: int) -> list[Segment]:
        """The segments of documents that are the pairs from `low` to `high`."""
        first = int(np.searchsorted(self._before, low, side="right")) - 1
        last = int(np.searchsorted(self._before, high, side="left"))
        numbers, before = self._numbers[first:last], self._before[first:last]
        shift = self._starts[first:last] - before
        starts = np.maximum(before, low) + shift
        ends = np.minimum(self._before[first + 1 : last + 1], high) + shift
        for number in np.unique(numbers):
            self._files.check_size(number)
        return [
            (self._tokens[number], start, end)
            for number, start, end in zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True)
        ]
