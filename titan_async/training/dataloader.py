"""torchtitan's data loader, over the packed text and the token files of `titan_async.data`."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from tokenizers import Tokenizer
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from titan_async.config.device import has_accelerator
from titan_async.data import PackedDataset, TextSource, TokenBatches
from titan_async.data.encoder import adds_bos_eos, encode_plainly
from titan_async.data.fingerprints import changed_files
from titan_async.errors import UserError
from titan_async.training.process.library_errors import dead_data_worker
from titan_async.training.process.preemption import shield_data_worker

__all__ = ["Batch", "TextDataLoader", "plain_worker_errors"]

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""({"input": tokens, "positions": positions}, labels), all int64 of shape (batch, seq_len)."""


_PREFETCHED = 16
"""Batches that a worker prefetches: some microbatches take longer to read than others."""


class TextDataLoader(ParallelAwareDataloader):
    """Batches of packed text, tokenized on the fly or in advance.

    Incomplete batches are dropped, because pipeline stages expect one shape. A checkpoint holds the position
    as JSON text, one for each data-parallel rank.

    Raises:
        UserError: The data can't be found or read, has too little text, or a checkpoint does not fit.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        dataset: str = "shakespeare"
        """"shakespeare" for Shakespeare's plays (no download), "files" for the text at `dataset_path`,
        "tokens" for the token files there, or "owner/name" of a dataset of the Hugging Face hub."""

        dataset_path: str | None = None
        """File or folder, read recursively, of .txt, .jsonl, .jsonl.gz or .parquet; or, with the dataset
        "tokens", a folder written by tools/prepare_data.py."""

        dataset_config: str | None = None
        """Name of the hub dataset's configuration, where it has several."""

        dataset_revision: str | None = None
        """Commit, tag or branch of the hub dataset; by default its newest state, which may change while a
        long run is interrupted."""

        split: str = "train"
        """"train" or "validation"; for a hub dataset also any other split it has."""

        validation_fraction: float = 0.05
        """Share of the documents set apart as "validation" where the data has no such split; must be
        the same in the training and in the validation loader. 0 sets none apart."""

        text_column: str = "text"
        """Column of parquet and hub data, or key of JSON lines, that holds the text."""

        num_workers: int | None = None
        """Worker processes that read and tokenize ahead. By default one for each rank on GPUs and none on a
        CPU, which give the same batches, and as many as before in a run that resumes."""

        prefetch_factor: int | None = None
        """Batches, of one microbatch each, that each worker prefetches; by default 16."""

        infinite: bool = True
        """Start over at the end of the data, in a new order; False ends after one epoch."""

        shuffle: bool = True
        """Read the documents in a different order in each epoch."""

        data_seed: int = 0
        """Seed of the orders of all epochs."""

        source: Annotated[Callable[..., Iterable[Any]] | None, tyro.conf.Suppress] = None
        """A function that returns an iterable of documents, each a text or an array of tokens, instead of a
        dataset. It is called for each epoch, with those of `epoch`, `split`, `rank` and `world_size` that it
        has parameters for. By default each rank and worker uses its share of the documents, and validation
        its fraction. An iterable or iterator resumes by `state_dict` and `load_state_dict` if it has them,
        and is read again otherwise."""

        accept_changed_data: bool = False
        """Resume at the checkpoint's position even if local files have changed since it was saved; some
        documents may then be repeated, and others skipped."""

        def text_source(self) -> TextSource:
            """The part of this configuration that selects the text.

            Raises:
                UserError: As `TextSource`.
            """
            return TextSource(
                dataset=self.dataset,
                dataset_path=self.dataset_path,
                dataset_config=self.dataset_config,
                dataset_revision=self.dataset_revision,
                split=self.split,
                validation_fraction=self.validation_fraction,
                text_column=self.text_column,
                shuffle=self.shuffle,
                seed=self.data_seed,
                function=self.source,
            )

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **kwargs: Any,
    ) -> None:
        self._adopts_workers = config.num_workers is None
        self._prefetched = config.prefetch_factor or _PREFETCHED
        source = config.text_source()
        common: dict[str, Any] = {
            "seq_len": seq_len,
            "rank": dp_rank,
            "world_size": dp_world_size,
            "infinite": config.infinite,
            "accept_changed_data": config.accept_changed_data,
        }
        dataset: PackedDataset | TokenBatches
        batching: dict[str, Any] = {"batch_size": local_batch_size, "drop_last": True}
        if source.dataset == "tokens":
            dataset = TokenBatches(source, batch_size=local_batch_size, **common)
            batching = {"batch_size": None}  # they are batches already
        else:
            dataset = PackedDataset(source, _encode_with(tokenizer), min_samples=local_batch_size, **common)
        self._fingerprints = functools.cache(dataset.fingerprints)
        self._accept_changed_data = config.accept_changed_data
        super().__init__(
            dataset,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            num_workers=int(has_accelerator()) if config.num_workers is None else config.num_workers,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=self._prefetched,
            snapshot_every_n_steps=snapshot_every_n_steps,
            **batching,
            worker_init_fn=shield_data_worker,
            # Each epoch draws a seed, which must not advance the global generator: a resumed run would
            # differ.
            generator=torch.Generator().manual_seed(config.data_seed),
        )

    def __iter__(self) -> Iterator[Batch]:
        # Built at once, not at the first batch: a checkpoint may be saved in between.
        return _plain_user_errors(super().__iter__(), self.num_workers > 0)

    def state_dict(self) -> dict[str, Any]:
        """This rank's position as JSON text, and the layout and files for which it is valid."""
        # The parent class returns a pickle, which can run code when it is loaded.
        return {
            self._rank_id: json.dumps(StatefulDataLoader.state_dict(self)),
            "world_size": self.dp_world_size,
            "num_workers": self.num_workers,
            "files": json.dumps(self._fingerprints()),
        }

    def check_degree(self, saved: int) -> None:
        """Refuse the positions of another number of data-parallel ranks.

        Raises:
            UserError: `saved` is not this run's.
        """
        _check("data-parallel degree", saved, self.dp_world_size)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of `state_dict`; with an empty state, start from the beginning.

        Raises:
            UserError: The position is of another number of ranks or workers, or of other data.
        """
        if not state_dict:
            return
        self.check_degree(state_dict["world_size"])
        saved = state_dict["num_workers"]
        if self._adopts_workers:
            self.num_workers, self.prefetch_factor = saved, self._prefetched if saved else None
        _check("dataloader.num_workers", saved, self.num_workers)
        if "files" in state_dict and not self._accept_changed_data:
            _check_files(json.loads(state_dict["files"]), self._fingerprints())
        StatefulDataLoader.load_state_dict(self, json.loads(state_dict[self._rank_id]))


def _check(setting: str, saved: int, now: int) -> None:
    if saved != now:
        raise UserError(
            f"The checkpoint's data position is one of {setting} {saved}, not {now}: resume with {setting} "
            f"{saved}, or exclude it with checkpoint.exclude_from_loading."
        )


def _check_files(saved: list[str], now: list[str]) -> None:
    changed = changed_files(saved, now)
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UserError(
            f"The data have changed since the checkpoint was saved ({changed[0]}{others}), so some documents "
            "would be repeated and others skipped: restore the files, accept that with "
            "--dataloader.accept_changed_data, or read the data from the start with "
            "--checkpoint.exclude_from_loading dataloader."
        )


def _encode_with(tokenizer: BaseTokenizer) -> Callable[[str], list[int]]:
    backend = getattr(tokenizer, "tokenizer", None)
    if isinstance(backend, Tokenizer):
        encode_plainly(backend)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            # torchtitan mistakes the BOS token for an EOS token, if they are the same.
            marks = adds_bos_eos(backend, tokenizer.bos_id, tokenizer.eos_id)
            tokenizer.hf_adds_bos, tokenizer.hf_adds_eos = marks
    return functools.partial(_encode, tokenizer)


def _encode(tokenizer: BaseTokenizer, document: Any) -> Any:
    if not isinstance(document, np.ndarray):
        return tokenizer.encode(document, add_bos=True, add_eos=True)
    # Token ids of the user's own source.
    size = tokenizer.get_vocab_size()
    if document.min() < 0 or document.max() >= size:
        wrong = document.min() if document.min() < 0 else document.max()
        raise UserError(
            f"dataloader.source returned the token {wrong}, but the tokenizer in hf_assets_path has {size} "
            "entries: set hf_assets_path to the tokenizer of these tokens"
        )
    return document


def _plain_user_errors(batches: Iterator[Batch], has_workers: bool) -> Iterator[Batch]:
    try:
        yield from batches
    except UserError as error:
        # An error of a worker process arrives with its traceback before the message.
        raise UserError(str(error).strip().rpartition("UserError: ")[2]) from error
    except (ConnectionError, EOFError) as error:
        if not has_workers:
            raise
        raise _worker_died(str(error) or "its connection was closed") from error


@contextlib.contextmanager
def plain_worker_errors() -> Iterator[None]:
    """Turn torch's error for a dead worker process, which any statement may raise, into a sentence.

    Raises:
        UserError: a worker process of a data loader has died.
    """
    try:
        yield
    except RuntimeError as error:
        how = dead_data_worker(error)
        if how is None:
            raise
        raise _worker_died(how) from error


def _worker_died(how: str) -> UserError:
    return UserError(
        f"A data loader worker has died ({how}), perhaps for lack of memory: lower dataloader.num_workers or "
        "dataloader.prefetch_factor, and start the run again, which resumes from its last checkpoint."
    )
