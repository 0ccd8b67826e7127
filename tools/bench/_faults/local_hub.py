"""A folder instead of the Hugging Face hub, which is not there where faults are tried."""

import functools

import datasets

from titan_async.data import hub

__all__ = ["install"]


def install(folder: str) -> None:
    """Let a folder stand for every dataset of the hub."""

    @functools.cache
    def load(dataset: str, config: str | None, revision: str | None) -> datasets.DatasetBuilder:
        return datasets.load_dataset_builder(folder, config, cache_dir=f"{folder}.cache")

    hub._load = load
