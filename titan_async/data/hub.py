"""Data layer: datasets of the Hugging Face hub, streamed and resumed by the `datasets` library."""

import copy
import functools
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from titan_async.data.sources import Position, TextSource
from titan_async.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset

__all__ = ["open_hub_reader"]


def open_hub_reader(source: TextSource, rank: int, world_size: int) -> "HubReader":
    """Open a rank's share of a hub dataset as a stream; nothing is downloaded ahead or cached.

    Raises:
        UserError: The hub can't be reached, or has no such dataset, configuration, split or column.
    """
    from datasets.distributed import split_dataset_by_node

    splits = _load_splits(source.dataset, source.dataset_config)
    own_validation = "validation" in splits
    divide = source.split == "validation" and not own_validation and source.validation_fraction > 0
    name = "train" if divide else source.split
    if name not in splits:
        raise UserError(
            f"The dataset {source.dataset!r} has no split {name!r}: set split to one of those there, "
            f"{', '.join(map(repr, splits))}."
        )
    stream = splits[name]
    columns = stream.column_names
    if columns is not None:
        if source.text_column not in columns:
            raise _no_column(source, columns)
        stream = stream.select_columns([source.text_column])
    fraction = 0.0 if own_validation or name != "train" else source.validation_fraction
    return HubReader(split_dataset_by_node(stream, rank, world_size), source, fraction)


class HubReader:
    """Reads a streamed dataset; a position is the state that `datasets` itself gives."""

    def __init__(self, stream: "IterableDataset", source: TextSource, fraction: float) -> None:
        self._stream = stream
        self._source = source
        self._fraction = fraction

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        """Yield the documents from `position` on, each with the position that follows it.

        Raises:
            UserError: A record has no text, or there are more loader workers than shards.
        """
        self._check_workers()
        # A state once loaded would also decide where the next epoch begins.
        stream = copy.deepcopy(self._stream)
        if position is not None:
            stream.load_state_dict(position)
        for record in stream:
            text = self._text_of(record)
            if text and not text.isspace() and self._is_wanted(text):
                yield text, stream.state_dict()

    def _is_wanted(self, text: str) -> bool:
        # Streams come in shards that ranks share, so that an index has no meaning: the text decides.
        chosen = zlib.crc32(text.encode("utf-8", "replace")) < self._fraction * 2**32
        return chosen == (self._fraction > 0 and self._source.split == "validation")

    def _text_of(self, record: dict[str, Any]) -> str | None:
        if self._source.text_column not in record:
            raise _no_column(self._source, list(record))
        text = record[self._source.text_column]
        if text is not None and not isinstance(text, str):
            raise UserError(
                f"The column {self._source.text_column!r} of {self._source.dataset!r} holds "
                f"{type(text).__name__} instead of text: set text_column to a column of text."
            )
        return text

    def _check_workers(self) -> None:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > self._stream.num_shards:
            raise UserError(
                f"The dataset {self._source.dataset!r} has {self._stream.num_shards} shards for this rank, "
                f"fewer than its {worker.num_workers} loader workers: lower num_workers to that."
            )


@functools.cache
def _load_splits(dataset: str, config: str | None) -> dict[str, "IterableDataset"]:
    # Kept, because a validator opens its data anew each time and this asks the hub several times.
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        splits = load_dataset(dataset, config, streaming=True)
    except DatasetNotFoundError as error:
        raise UserError(
            f"The Hugging Face hub has no dataset {dataset!r} that you may read: check the name, or log in."
        ) from error
    except ConnectionError as error:
        raise UserError(
            f"The Hugging Face hub could not be reached for the dataset {dataset!r}: check the network, "
            'or set dataset to "shakespeare" or dataset_path to local files.'
        ) from error
    except (ValueError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"The dataset {dataset!r} can't be opened ({reason}): set dataset and dataset_config accordingly."
        ) from error
    return {str(name): stream for name, stream in splits.items()}


def _no_column(source: TextSource, names: list[str]) -> UserError:
    return UserError(
        f"The dataset {source.dataset!r} has no column {source.text_column!r}: set text_column to one of "
        f"those there, {', '.join(map(repr, names))}."
    )
