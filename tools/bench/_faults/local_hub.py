"""A folder in place of the Hugging Face hub, since fault benchmarks run offline."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from titan_async.data import hub

if TYPE_CHECKING:
    from datasets import DatasetBuilder

__all__ = ["install"]


def install(folder: str) -> None:
    """Replace every dataset of the hub by a folder."""

    @functools.cache
    def load(dataset: str, config: str | None, revision: str | None) -> DatasetBuilder:
        # Here, since it takes a second, and most runs ask for no dataset of the hub.
        from datasets import load_dataset_builder

        return load_dataset_builder(folder, config, cache_dir=f"{folder}.cache")

    hub._load = load
