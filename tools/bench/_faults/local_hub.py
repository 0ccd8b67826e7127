"""A folder instead of the Hugging Face hub, because fault benchmarks run offline."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from titan_async.data import hub

if TYPE_CHECKING:
    from datasets import DatasetBuilder

__all__ = ["install"]


def install(folder: str) -> None:
    """Replaces every dataset of the hub by a folder."""

    @functools.cache
    def load(dataset: str, config: str | None, revision: str | None) -> DatasetBuilder:
        # Imported here because it takes a second, and most runs use no dataset of the hub.
        from datasets import load_dataset_builder

        return load_dataset_builder(folder, config, cache_dir=f"{folder}.cache")

    hub._load = load
