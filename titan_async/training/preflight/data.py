"""Checks of a run's data."""

import dataclasses
import itertools
from collections.abc import Iterable
from functools import partial

import datasets
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.trainer import Trainer

from titan_async.data import DocumentEncoder, TokenFiles, open_documents
from titan_async.errors import UserError
from titan_async.training.dataloader import TextDataLoader
from titan_async.training.pipeline.schedule import accumulation_of

__all__ = ["check_data"]

_REMAKE = "create the files again with tools/prepare_data.py"

_AMPLE = 4
"""With this many documents and sequences per reader, their distribution over readers is not checked."""


def check_data(config: Trainer.Config, tokenizer: BaseTokenizer, *, data_parallel: int) -> None:
    """Refuse data that cannot be read, are too few for a rank, or do not fit the model.

    Args:
        config: the resolved configuration; not changed.
        tokenizer: the run's.
        data_parallel: ranks that read different data.

    Raises:
        UserError: one sentence that names the cause and the fix.
    """
    training, validator = config.training, config.validator
    batch = training.local_batch_size * accumulation_of(training, data_parallel)
    loaders = [("dataloader", config.dataloader, batch)]
    if validator.enable:
        loaders.append(("validator.dataloader", validator.dataloader, training.local_batch_size))
    for name, loader, needed in loaders:
        if type(loader).__module__.startswith("torchtitan."):
            _check_torchtitans(name, loader, config, tokenizer, data_parallel)
        if not isinstance(loader, TextDataLoader.Config):
            continue
        if name == "validator.dataloader":  # which torchtitan's validator decides
            loader = dataclasses.replace(loader, infinite=validator.steps != -1)
        if loader.dataset == "tokens":
            _check_token_files(name, loader, config)
        build = partial(_sequences, loader, tokenizer, training.seq_len)
        # Each worker process of each rank has its own documents.
        readers = data_parallel * max(loader.num_workers or 0, 1)
        enough = _AMPLE * readers
        documents = _count(_documents(loader), enough)
        if documents == 0 and loader.dataset != "tokens":
            raise UserError(f"{name} reads no document: its {loader.split} split is empty; add more text")
        if not loader.infinite:
            # Token files come in batches.
            _count(build(0, data_parallel, at_least=needed), 1 if loader.dataset == "tokens" else needed)
        elif documents < enough or _count(build(0, 1, at_least=1), enough) < enough:
            for reader in range(readers):
                _count(build(reader, readers), 1)
    if validator.enable:
        _check_split(config.dataloader, validator.dataloader)


def _check_torchtitans(
    name: str,
    loader: BaseDataLoader.Config,
    config: Trainer.Config,
    tokenizer: BaseTokenizer,
    data_parallel: int,
) -> None:
    """Refuse a data set that a loader of torchtitan does not find, by building the loader."""
    datasets.disable_progress_bars()
    try:
        loader.build(
            dp_world_size=data_parallel,
            dp_rank=0,
            tokenizer=tokenizer,
            seq_len=config.training.seq_len,
            local_batch_size=config.training.local_batch_size,
        )
    except Exception as error:  # the hub's client and readers of files raise many kinds of errors
        sentence = " ".join(str(error).split())[:300] or type(error).__name__
        which = getattr(loader, "dataset", None)
        shown = f' (the data set "{which}")' if which and isinstance(which, str) else ""
        raise UserError(
            f"{name}{shown} cannot be opened: {sentence}; set {name}.dataset_path to its path, or "
            "choose another"
        ) from error


def _sequences(
    loader: TextDataLoader.Config,
    tokenizer: BaseTokenizer,
    seq_len: int,
    rank: int,
    ranks: int,
    *,
    at_least: int | None = None,
) -> Iterable[object]:
    """The sequences of a rank, read in this process: endless, or one epoch of at least `at_least`.

    Raises:
        UserError: while they are read, if there are fewer, or none.
    """
    alone = dataclasses.replace(
        loader, infinite=at_least is None, num_workers=0, prefetch_factor=None, persistent_workers=False
    )
    return alone.build(
        dp_rank=rank,
        dp_world_size=ranks,
        tokenizer=tokenizer,
        seq_len=seq_len,
        local_batch_size=at_least or 1,
    ).dataset


def _documents(loader: TextDataLoader.Config) -> Iterable[object]:
    source = loader.text_source()
    if loader.dataset != "tokens":
        return open_documents(source)
    share = source.validation_fraction if source.split == "validation" else 1 - source.validation_fraction
    return range(int(TokenFiles(source.dataset_path or "").index.documents * share))


def _count(items: Iterable[object], most: int) -> int:
    return sum(1 for _ in itertools.islice(items, most))


def _check_token_files(name: str, loader: TextDataLoader.Config, config: Trainer.Config) -> None:
    source = loader.text_source()
    index = TokenFiles(source.dataset_path or "").index
    encoder = DocumentEncoder(config.hf_assets_path)
    which = f"the token files of {name}, {source.dataset_path},"
    if index.tokenizer_sha256 != encoder.sha256:
        raise UserError(
            f"{which} were made with another tokenizer than the one in hf_assets_path, "
            f"{config.hf_assets_path}: set it to the folder of that tokenizer, or {_REMAKE}"
        )
    marks = (index.bos_id, index.eos_id)
    if marks != (encoder.bos_id, encoder.eos_id):
        raise UserError(
            f"{which} mark beginning and end of documents with the tokens {marks[0]} and {marks[1]}, but the "
            f"tokenizer_config.json in {config.hf_assets_path} names {encoder.bos_id} and {encoder.eos_id}: "
            f"set hf_assets_path to the folder of the tokenizer used for them, or {_REMAKE}"
        )
    room = getattr(config.model_spec.model, "vocab_size", index.vocab_size)
    if index.vocab_size > room:
        raise UserError(
            f"{which} have a vocabulary of {index.vocab_size} entries but the model has room for {room}: "
            f"choose a recipe of that vocabulary, or {_REMAKE}"
        )


def _check_split(train: BaseDataLoader.Config, validation: BaseDataLoader.Config) -> None:
    if not (isinstance(train, TextDataLoader.Config) and isinstance(validation, TextDataLoader.Config)):
        return
    same_text = (train.dataset, train.dataset_path, train.dataset_config) == (
        validation.dataset,
        validation.dataset_path,
        validation.dataset_config,
    )
    fractions = train.validation_fraction, validation.validation_fraction
    if same_text and train.split != validation.split and fractions[0] != fractions[1]:
        raise UserError(
            f"dataloader.validation_fraction is {fractions[0]} but validator.dataloader.validation_fraction "
            f"is {fractions[1]}, so that training reads validation data: set both to the same"
        )
