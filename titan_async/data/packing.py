"""Packing of documents into token sequences of one length, exactly resumable.

A document of tokens t[0..n] gives the pairs (t[i], t[i+1]). The pairs of successive documents are
concatenated and split into sequences of `seq_len`. So a label is never a token of another document. Positions
count from 0 at the start of each document and of each sequence.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from titan_async.data.document_stream import DocumentStream, open_documents
from titan_async.data.readers import share_of_worker
from titan_async.data.text_source import TextSource
from titan_async.errors import UserError

__all__ = ["PackedDataset", "Sample", "Segment", "SequenceDataset", "pack"]

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]
"""({"input": tokens, "positions": positions}, labels), all int64 of shape (seq_len,)."""

_LOCAL_FILES = re.compile(r"^\d+ (token )?files [0-9a-f]{8}")
"""The beginning of the identity of local files."""

Segment = tuple[npt.NDArray[np.integer], int, int]
"""Tokens of a document, and the range of its pairs, from a first index to an end."""


class SequenceDataset(IterableDataset[Sample]):
    """Base class of datasets of packed sequences; see `PackedDataset` for the arguments.

    A subclass opens a stream of documents and iterates over `_sequences`.
    """

    _identity: str
    """Identifies the data and their order; see `TextSource.identity`."""

    def __init__(
        self,
        source: TextSource,
        seq_len: int,
        rank: int,
        world_size: int,
        infinite: bool,
        min_samples: int,
        accept_changed_data: bool,
    ) -> None:
        if seq_len < 1:
            raise UserError(f"The sequence length is {seq_len}: set training.seq_len to 1 or more.")
        self._source = source
        self._seq_len = seq_len
        self._rank, self._world_size = rank, world_size
        self._infinite = infinite
        self._min_samples = min_samples
        self._accept_changed_data = accept_changed_data

    def _start_epoch(self, documents: DocumentStream) -> None:
        self._documents_state = documents.state_dict()
        self._pairs_done = self._produced = 0

    def _tokens_of(self, document: Any) -> npt.NDArray[np.integer]:
        """The tokens of a document of the stream."""
        return document

    def _sequences(self, documents: DocumentStream) -> Iterator[list[Segment]]:
        """This rank's sequences from the position on; the position is that after the last yielded one."""
        documents.load_state_dict(self._documents_state)
        if self._infinite:
            yield from self._all_sequences(documents)
            return
        own: list[Segment] = []
        for sequence in self._all_sequences(documents):
            turn = (self._produced - 1) % self._world_size
            if turn == self._rank:
                own = sequence
            # Held back until every rank has one, so that the state is that of the end of a round.
            if turn == self._world_size - 1:
                yield own
        if self._produced // self._world_size < self._min_samples:
            raise self._too_little(self._min_samples)
        self._start_epoch(documents)

    def _all_sequences(self, documents: DocumentStream) -> Iterator[list[Segment]]:
        # At the end of a sequence, the remaining pairs belong to the last document read. So the position
        # before that document and the number of its used pairs are the whole state.
        segments: list[Segment] = []
        room = self._seq_len
        done = self._pairs_done
        while True:
            before = documents.state_dict()
            for document in documents:
                tokens = self._tokens_of(document)
                pairs = len(tokens) - 1
                while pairs - done >= room:
                    segments.append((tokens, done, done + room))
                    done += room
                    self._documents_state, self._pairs_done = before, done
                    self._produced += 1
                    yield segments
                    segments, room = [], self._seq_len
                if done < pairs:
                    segments.append((tokens, done, pairs))
                    room -= pairs - done
                done = 0
                before = documents.state_dict()
            if not self._infinite:
                return
            if self._produced == 0:
                raise self._too_little(1)

    def _check_data(self, saved: str) -> None:
        """Raises for a position in data of another identity; changed local files may be accepted."""
        configured = self._identity
        if self._accept_changed_data:
            saved, configured = (_LOCAL_FILES.sub("files", identity) for identity in (saved, configured))
        if saved != configured:
            raise UserError(
                f"The checkpoint has a position in other data ({saved}) than configured ({configured}): "
                "choose another dump_folder for a new run, restore the previous data, or exclude the "
                "loader's state with checkpoint.exclude_from_loading."
            )

    def _too_little(self, needed: int) -> UserError:
        """The error of data with fewer than `needed` sequences per rank."""
        world_size = self._world_size
        ranks = f" for each of {world_size} data-parallel ranks" if world_size > 1 else ""
        return UserError(
            f"The {self._source.split} split of {self._source.shown} has fewer than the {needed} sequences "
            f"of {self._seq_len} tokens that are needed{ranks}: use more text, a higher validation_fraction "
            "if this is the validation split, or a shorter training.seq_len."
        )


class PackedDataset(SequenceDataset):
    """Packed sequences of one data-parallel rank.

    An infinite dataset divides documents among ranks, epoch after epoch, and carries the rest of an epoch
    over to the next. A finite one is a single epoch: each rank packs all documents and keeps only its own
    sequences. This repeats the tokenization, but all ranks yield equally many sequences, without which they
    would deadlock. The rest that does not fill a sequence on every rank is left out.

    Args:
        source: The text.
        encode: Returns the tokens of a document, with BOS and EOS.
        seq_len: Length of the sequences.
        rank: This data-parallel rank, from 0.
        world_size: Number of data-parallel ranks.
        infinite: Whether to continue with the next epoch.
        min_samples: A finite dataset of fewer sequences per rank is an error.
        accept_changed_data: Whether a position in other local files is accepted.

    Raises:
        UserError: As `open_documents`; and while iterating, as `read_documents`, or when an epoch has
            not even one sequence.

    Examples:
        Each label is the token after its input, and never one of another document:

        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "texts.jsonl").write_text('{"text": "one"}\\n{"text": "three"}\\n')
        ...     source = TextSource(dataset_path=folder, shuffle=False, validation_fraction=0)
        ...     for inputs, labels in PackedDataset(source, lambda text: [ord(c) for c in text], seq_len=3):
        ...         print([chr(token) for token in inputs["input"]], [chr(token) for token in labels])
        ['o', 'n', 't'] ['n', 'e', 'h']
        ['h', 'r', 'e'] ['r', 'e', 'e']
    """

    def __init__(
        self,
        source: TextSource,
        encode: Callable[[str], list[int]],
        *,
        seq_len: int,
        rank: int = 0,
        world_size: int = 1,
        infinite: bool = False,
        min_samples: int = 1,
        accept_changed_data: bool = False,
    ) -> None:
        super().__init__(source, seq_len, rank, world_size, infinite, min_samples, accept_changed_data)
        self._encode = encode
        # Opened here to raise errors early, and again in __iter__, which may run in a worker process.
        documents = self._open()
        self._identity = documents.identity
        self.fingerprints = documents.fingerprints
        """Returns the fingerprints of the files; see `titan_async.data.fingerprints`."""
        self._start_epoch(documents)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last yielded sample, as JSON data of a small constant size."""
        return {
            "data": self._identity,
            "documents": self._documents_state,
            "pairs_done": self._pairs_done,
            "produced": self._produced,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a position of `state_dict`; it takes effect for iterators created afterwards.

        Raises:
            UserError: The position belongs to other data, or to another order.
        """
        self._check_data(state_dict["data"])
        self._documents_state = state_dict["documents"]
        self._pairs_done = state_dict["pairs_done"]
        self._produced = state_dict["produced"]

    def __iter__(self) -> Iterator[Sample]:
        documents = self._open()
        # One worker of one rank logs, and only for training, since validation repeats the same files.
        is_first = self._rank == 0 and share_of_worker(0, 1)[0] == 0
        documents.empty.logs = is_first and self._source.split != "validation"
        yield from map(pack, self._sequences(documents))

    def _tokens_of(self, document: str) -> npt.NDArray[np.integer]:
        return np.asarray(self._encode(document), dtype=np.int64)

    def _open(self) -> DocumentStream:
        if self._infinite:
            return open_documents(self._source, rank=self._rank, world_size=self._world_size)
        return open_documents(self._source)


def pack(segments: list[Segment]) -> Sample:
    """Concatenates the pairs of segments; positions count from 0 in each segment."""
    inputs = np.concatenate([tokens[start:end] for tokens, start, end in segments], dtype=np.int64)
    labels = np.concatenate([tokens[start + 1 : end + 1] for tokens, start, end in segments], dtype=np.int64)
    positions = np.concatenate([np.arange(end - start) for _, start, end in segments])
    sample = {"input": torch.from_numpy(inputs), "positions": torch.from_numpy(positions)}
    return sample, torch.from_numpy(labels)
