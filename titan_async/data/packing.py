"""Data layer: documents to token sequences of one length, exactly resumable.

Every document of tokens t[0..n] gives the pairs (t[i], t[i+1]); pairs of successive documents are laid
end to end and cut every `seq_len`. So a label is never a token of another document. Positions count
from 0 at each document, and again where a sequence begins within one.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from titan_async.data.readers import share_of_worker
from titan_async.data.sources import DocumentStream, open_documents
from titan_async.data.text_source import TextSource
from titan_async.errors import UserError

__all__ = ["PackedDataset", "Sample", "Segment", "SequenceDataset", "pack"]

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]
"""({"input": tokens, "positions": positions}, labels), all int64 of shape (seq_len,)."""

_LOCAL_FILES = re.compile(r"^\d+ (token )?files [0-9a-f]{8}")
"""What an identity of local files begins with."""

Segment = tuple[npt.NDArray[np.integer], int, int]
"""Tokens, and the pairs from one index to another in them that are of one document."""


class SequenceDataset(IterableDataset[Sample]):
    """What datasets of packed sequences have in common; see `PackedDataset` for the arguments.

    A class that extends it opens a stream of documents, and iterates over `_sequences`.
    """

    _identity: str
    """Of the data and their order, by `TextSource.identity`."""

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
        """This rank's sequences, from the position on; the position follows the sequence yielded last."""
        documents.load_state_dict(self._documents_state)
        if self._infinite:
            yield from self._all_sequences(documents)
            return
        own: list[Segment] = []
        for sequence in self._all_sequences(documents):
            turn = (self._produced - 1) % self._world_size
            if turn == self._rank:
                own = sequence
            # Held back until every rank has one; the state, too, is one of the round's end.
            if turn == self._world_size - 1:
                yield own
        if self._produced // self._world_size < self._min_samples:
            raise self._too_little(self._min_samples)
        self._start_epoch(documents)

    def _all_sequences(self, documents: DocumentStream) -> Iterator[list[Segment]]:
        # At a sequence's end all that is left over belongs to the document read last. So the position
        # before that document and the number of its pairs used up are the whole state.
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
        """Refuse a position in data of another identity; local files may have changed if accepted."""
        configured = self._identity
        if self._accept_changed_data:
            saved, configured = (_LOCAL_FILES.sub("files", identity) for identity in (saved, configured))
        if saved != configured:
            raise UserError(
                f"The checkpoint stands in other data ({saved}) than is configured ({configured}): choose "
                "another dump_folder for a new run, or set the data as it was, or keep the loader's state "
                "out of loading with checkpoint.exclude_from_loading."
            )

    def _too_little(self, needed: int) -> UserError:
        """The error of data that do not fill so many sequences on each rank."""
        world_size = self._world_size
        ranks = f" for each of {world_size} data-parallel ranks" if world_size > 1 else ""
        return UserError(
            f"The {self._source.split} split of {self._source.shown} has fewer than the {needed} sequences "
            f"of {self._seq_len} tokens that are needed{ranks}: use more text, a higher validation_fraction "
            "if this is the validation split, or a shorter training.seq_len."
        )


class PackedDataset(SequenceDataset):
    """Packed sequences of one data-parallel rank.

    An infinite dataset gives each rank its own documents, epoch after epoch, and carries the rest of
    an epoch over to the next. A finite one is a single epoch of which each rank packs all documents
    but keeps only its own sequences: that costs tokenization, and makes all ranks yield equally
    many, without which one would wait for the others for ever. What does not fill a sequence on
    every rank is left out.

    Args:
        source: The text.
        encode: Gives the tokens of a document, with the tokens that mark its beginning and end.
        seq_len: Length of the sequences.
        rank: This data-parallel rank, from 0.
        world_size: Number of data-parallel ranks.
        infinite: Whether to go on with the next epoch at an epoch's end.
        min_samples: A finite dataset of fewer sequences on each rank is an error.
        accept_changed_data: Whether a position may be one in local files of other names, or in more or fewer.

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
        # Opened here for its errors, and again in __iter__, which may run in a worker process.
        documents = self._open()
        self._identity = documents.identity
        self.fingerprints = documents.fingerprints
        """Gives the fingerprints of the files; see `titan_async.data.fingerprints`."""
        self._start_epoch(documents)

    def state_dict(self) -> dict[str, Any]:
        """The position after the sample yielded last, as JSON data of a fixed small size."""
        return {
            "data": self._identity,
            "documents": self._documents_state,
            "pairs_done": self._pairs_done,
            "produced": self._produced,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position of `state_dict`; takes effect for iterators made afterwards.

        Raises:
            UserError: The position is one in other data, or in another order of it.
        """
        self._check_data(state_dict["data"])
        self._documents_state = state_dict["documents"]
        self._pairs_done = state_dict["pairs_done"]
        self._produced = state_dict["produced"]

    def __iter__(self) -> Iterator[Sample]:
        documents = self._open()
        # Of all ranks and workers one is enough, and validation reads the same files again and again.
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
    """The pairs of these segments, end to end; positions count from 0 in each segment."""
    inputs = np.concatenate([tokens[start:end] for tokens, start, end in segments], dtype=np.int64)
    labels = np.concatenate([tokens[start + 1 : end + 1] for tokens, start, end in segments], dtype=np.int64)
    positions = np.concatenate([np.arange(end - start) for _, start, end in segments])
    sample = {"input": torch.from_numpy(inputs), "positions": torch.from_numpy(positions)}
    return sample, torch.from_numpy(labels)
