"""Data layer: batches of packed sequences from token files.

Packed as `PackedDataset` packs text: the same documents in the same order give the same sequences. Batches
are filled by NumPy at once, not document by document, and nothing of the files is held in memory but what
the current window's documents begin and end at.

An epoch takes the files in an order of its own, eight at a time. The documents of such a window are shuffled
together and dealt to the ranks; so a rank's epoch is a fixed sequence of pairs (token, next token), and a
position is [epoch, window, pairs of it used]. Going on from one opens that window, and reads nothing else.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from titan_async.data.fingerprints import fingerprint_of
from titan_async.data.packing import Sample, check_data, too_little
from titan_async.data.readers import order_of, share_of_worker
from titan_async.data.text_source import TextSource, check_split, identity_of
from titan_async.data.token_files import TokenFiles
from titan_async.errors import UserError

__all__ = ["TokenBatches"]

_FILES_TOGETHER = 8
"""Files whose documents are shuffled together: neighbours in a file often come from the same crawl."""

_PAIRS_AT_ONCE = 2**16
"""Batches that are smaller are filled several at a time."""

_Ints = npt.NDArray[np.int64]


class TokenBatches(IterableDataset[Sample]):
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
        accept_changed_data: Whether a position may be one in other files; see `check_data`.

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
        if seq_len < 1:
            raise UserError(f"The sequence length is {seq_len}: set training.seq_len to 1 or more.")
        check_split(source)
        self._source = source
        self._files = TokenFiles(source.dataset_path or "")
        self._seq_len, self._batch_size = seq_len, batch_size
        self._rank, self._world_size = rank, world_size
        self._infinite = infinite
        self._accept_changed_data = accept_changed_data
        digests = "".join(shard.sha256 for shard in self._files.index.shards)
        self._identity = identity_of(
            source, f"{len(self._files.index.shards)} token files {zlib.crc32(digests.encode()):08x}"
        )
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
        check_data(state_dict["data"], self._identity, self._accept_changed_data)
        self._position = state_dict["position"]
        self._taken = state_dict["taken"]

    def __iter__(self) -> Iterator[Sample]:
        # Of a finite dataset all ranks read all documents, and keep their own sequences.
        share = (self._rank, self._world_size) if self._infinite else (0, 1)
        pairs = _Pairs(self._files, self._source, *share_of_worker(*share))
        pairs.position = self._position
        yield from self._endless(pairs) if self._infinite else self._one_pass(pairs)

    def _endless(self, pairs: "_Pairs") -> Iterator[Sample]:
        size = self._batch_size * self._seq_len
        together = max(1, _PAIRS_AT_ONCE // size)
        while True:
            filled, taken, done = _Batch(together * self._batch_size, self._seq_len), self._taken, 0
            while done < filled.size:
                done += pairs.take(filled, done, filled.size - done)
                if done < filled.size:
                    if taken + done < self._seq_len:
                        raise self._too_little(1)
                    pairs.position = [pairs.position[0] + 1, 0, 0]
            self._check_vocabulary(filled)
            for number, sample in enumerate(filled.split(self._batch_size), start=1):
                self._position, self._taken = filled.position(number * size), taken + number * size
                yield sample

    def _one_pass(self, pairs: "_Pairs") -> Iterator[Sample]:
        while self._fill_own(pairs, batch := _Batch(self._batch_size, self._seq_len)):
            self._position = pairs.position
            self._taken += batch.size
            self._check_vocabulary(batch)
            yield from batch.split(self._batch_size)
        if not self._taken:
            raise self._too_little(self._batch_size)
        self._start(self._position[0] + 1)

    def _fill_own(self, pairs: "_Pairs", batch: "_Batch") -> bool:
        """Fill a batch with this rank's sequences; False if not all ranks could fill one any more."""
        length, others = self._seq_len, self._world_size - 1 - self._rank
        return all(
            pairs.skip(self._rank * length) == self._rank * length
            and pairs.take(batch, start, length) == length
            and pairs.skip(others * length) == others * length
            for start in range(0, batch.size, length)
        )

    def _too_little(self, needed: int) -> UserError:
        return too_little(self._source, self._seq_len, needed, self._world_size)

    def _start(self, epoch: int) -> None:
        self._position = [epoch, 0, 0]
        self._taken = 0
        """Pairs of this pass, to tell whether there is anything at all."""

    def _check_vocabulary(self, batch: "_Batch") -> None:
        # Cheap, where a model would answer with an assertion on a GPU that names nothing.
        highest, entries = max(batch.inputs.max(), batch.labels.max()), self._files.index.vocab_size
        if highest >= entries:
            raise UserError(
                f"The token files in {self._files.folder} hold a token {highest} where the vocabulary has "
                f"{entries} entries, so that a file must be corrupt: find it with tools/prepare_data.py "
                "--verify."
            )


class _Batch:
    """Sequences, end to end while they are filled: of one batch, or of several."""

    def __init__(self, rows: int, seq_len: int) -> None:
        self.size = rows * seq_len
        self._shape = (rows, seq_len)
        self.inputs, self.labels, self.beginnings = (np.empty(self.size, dtype=np.int64) for _ in range(3))
        """`beginnings` is where in the batch the document of each token begins, or would."""
        self._origins: list[tuple[int, list[int]]] = []

    def note(self, start: int, position: list[int]) -> None:
        """Say at which position the pairs from `start` on were."""
        self._origins.append((start, position))

    def position(self, count: int) -> list[int]:
        """The position behind the first so many pairs."""
        start, (epoch, window, used) = max(origin for origin in self._origins if origin[0] < count)
        return [epoch, window, used + count - start]

    def split(self, rows: int) -> Iterator[Sample]:
        """The batches of so many rows; positions count from 0 at each document and at each sequence."""
        index = np.arange(self.size).reshape(self._shape)
        positions = index - np.maximum(self.beginnings.reshape(self._shape), index[:, :1])
        columns = [array.reshape(self._shape) for array in (self.inputs, positions, self.labels)]
        for start in range(0, self._shape[0], rows):
            parts = [column[start : start + rows] for column in columns]
            if rows < self._shape[0]:
                # A worker process would send all of what a tensor is a part of.
                parts = [part.copy() for part in parts]
            inputs, where, labels = map(torch.from_numpy, parts)
            yield {"input": inputs, "positions": where}, labels


class _Pairs:
    """The pairs of an epoch, one after the other, over all its windows."""

    def __init__(self, files: TokenFiles, source: TextSource, share: int, shares: int) -> None:
        self._files, self._source = files, source
        self._share, self._shares = share, shares
        self._epoch, self._number, self._used = 0, 0, 0
        self._window: _Window | None = None

    @property
    def position(self) -> list[int]:
        """[epoch, window, pairs of it used]"""
        return [self._epoch, self._number, self._used]

    @position.setter
    def position(self, position: list[int]) -> None:
        self._epoch, self._number, self._used = position
        self._window = None

    def take(self, batch: _Batch, start: int, count: int) -> int:
        """Put so many pairs into a batch; returns how many there were before the epoch's end."""
        return self._go(count, batch, start)

    def skip(self, count: int) -> int:
        """Leave out so many pairs; returns how many there were before the epoch's end."""
        return self._go(count, None, 0)

    def _go(self, count: int, batch: _Batch | None, start: int) -> int:
        done = 0
        while done < count:
            if self._window is None:
                self._window = self._open()
                if self._window is None:
                    break
            # In data that have changed, a position may lie behind the window's end.
            step = max(0, min(count - done, self._window.pairs - self._used))
            if batch is not None and step:
                batch.note(start + done, self.position)
                self._window.copy(self._used, self._used + step, batch, start + done)
            self._used += step
            done += step
            if self._used >= self._window.pairs:
                self._number, self._used, self._window = self._number + 1, 0, None
        return done

    def _open(self) -> "_Window | None":
        order = order_of(len(self._files.index.shards), self._source, self._epoch)
        shards = order[self._number * _FILES_TOGETHER : (self._number + 1) * _FILES_TOGETHER]
        if not shards:
            return None
        return _Window(self._files, self._source, shards, (self._epoch, self._number), self._dealt())

    def _dealt(self) -> slice:
        # One document more falls to another share in each window.
        return slice((self._share + self._number) % self._shares, None, self._shares)


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
        self, files: TokenFiles, source: TextSource, shards: list[int], key: tuple[int, int], dealt: slice
    ) -> None:
        self._files = files
        self._shards = shards
        mapped = [files.map(number) for number in shards]
        self._tokens = [tokens for tokens, _ in mapped]
        # Of each document: the place of its file in `shards`, its first token, and its pairs.
        places, starts, pairs = [], [], []
        for place, (number, (_, ends)) in enumerate(zip(shards, mapped, strict=True)):
            bounds = np.concatenate([[0], ends])
            index = files.first_documents[number] + np.arange(ends.size)
            chosen = _is_validation(index, source.validation_fraction) == (source.split == "validation")
            chosen &= np.diff(bounds) > 1
            starts.append(bounds[:-1][chosen])
            pairs.append(np.diff(bounds)[chosen] - 1)
            places.append(np.full(pairs[-1].size, place))
        count = sum(map(len, pairs))
        order = np.arange(count)[dealt]
        if source.shuffle:
            order = np.random.default_rng([source.seed, *key]).permutation(count)[dealt]
        self._places, self._starts = np.concatenate(places)[order], np.concatenate(starts)[order]
        self._behind: _Ints = np.concatenate([[0], np.cumsum(np.concatenate(pairs)[order])])
        """The pairs before each document, and of all."""
        self.pairs = int(self._behind[-1])

    def copy(self, low: int, high: int, batch: _Batch, at: int) -> None:
        """Put the pairs from `low` to `high` into a batch."""
        first = int(np.searchsorted(self._behind, low, side="right")) - 1
        last = int(np.searchsorted(self._behind, high, side="left"))
        before = self._behind[first:last]
        begin = np.maximum(before, low)
        counts = np.minimum(self._behind[first + 1 : last + 1], high) - begin
        tokens, targets = self._starts[first:last] + begin - before, at + begin - low
        batch.beginnings[at : at + high - low] = np.repeat(at + before - low, counts)
        places = self._places[first:last]
        for place in np.unique(places):
            self._files.check_size(self._shards[place])
            here = places == place
            source, target = (_ranges(offsets[here], counts[here]) for offsets in (tokens, targets))
            stored = self._tokens[place]
            batch.inputs[target] = stored[source]
            batch.labels[target] = stored[source + 1]


def _ranges(starts: _Ints, counts: _Ints) -> _Ints:
    """The numbers from each start on, so many of each, end to end."""
    behind = np.cumsum(counts)
    return np.repeat(starts - (behind - counts), counts) + np.arange(behind[-1])


def _is_validation(index: _Ints, fraction: float) -> npt.NDArray[np.bool_]:
    """`is_validation` of many documents."""
    return np.ceil(index * fraction) > np.ceil((index - 1) * fraction)
