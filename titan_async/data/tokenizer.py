"""Data layer: train a small byte-level BPE, ship one for the plays, and measure unigram baselines.

The folders written here are Hugging Face tokenizer folders. The end-of-text token begins and ends
every document, as in GPT-2. `assets/shakespeare_bpe2048` is what `train_tokenizer` gives on the
training split of the plays.
"""

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titan_async.data.sources import open_documents
from titan_async.data.text_source import TextSource
from titan_async.errors import UserError
from titan_async.file_io import atomic_write

__all__ = [
    "END_OF_TEXT",
    "count_tokens",
    "ensure_tokenizer",
    "load_tokenizer",
    "save_tokenizer",
    "shakespeare_tokenizer_folder",
    "train_tokenizer",
    "unigram_cross_entropy",
    "unigram_entropy",
]

END_OF_TEXT = "<|endoftext|>"
"""The token, of id 0, that begins and ends a document."""


def shakespeare_tokenizer_folder() -> Path:
    """Folder of the tokenizer of 2048 entries that this package ships for its default data."""
    return Path(__file__).parent / "assets" / "shakespeare_bpe2048"


def train_tokenizer(documents: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
    """Train a byte-level BPE; the same documents in the same order give the same tokenizer.

    Args:
        documents: The texts, read once.
        vocab_size: Entries at most, with the 256 bytes and the end-of-text token.

    Raises:
        UserError: `vocab_size` leaves no room for the bytes, or there is no text.

    Examples:
        >>> tokenizer = train_tokenizer(["to be or not to be"], vocab_size=260)
        >>> tokenizer.encode("to be").tokens
        ['to', 'Ġbe']
    """
    if vocab_size < 257:
        raise UserError(f"A vocabulary of {vocab_size} can't hold all bytes: set vocab_size to 257 or more.")
    texts = iter(documents)
    first = next(texts, None)
    if first is None:
        raise UserError("There is no text to train a tokenizer on: name data with at least one document.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain([first], texts), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, the latter first.

    Each file appears whole or not at all, so that another process may read or write the same folder
    meanwhile, and a folder with a `tokenizer.json` is complete.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": True,  # nosec B105  # no password
        "add_eos_token": True,  # nosec B105
    }
    path = Path(folder)
    texts = {
        "tokenizer_config.json": json.dumps(config, indent=2),
        "tokenizer.json": tokenizer.to_str(pretty=False),
    }
    for name, text in texts.items():
        with atomic_write(path / name, shared=True) as partial:
            partial.write_text(text + "\n", encoding="utf-8")


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Load the `tokenizer.json` of a folder.

    Raises:
        UserError: The folder has none, or it can't be read.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"The folder {folder} has no tokenizer.json: set hf_assets_path to a tokenizer's folder."
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        reason = " ".join(str(error).split())
        raise UserError(
            f"The tokenizer {file} can't be read ({reason}): fetch it again or remove it."
        ) from error


def ensure_tokenizer(folder: str | os.PathLike[str], source: TextSource, vocab_size: int = 2048) -> Tokenizer:
    """Load the tokenizer of a folder, or train it on a source's first epoch and save it there.

    Several processes may call this at once: each trains the same tokenizer. Where the folder already
    has a tokenizer, neither `source` nor `vocab_size` is looked at.

    Raises:
        UserError: As `train_tokenizer`, `load_tokenizer` and `open_documents`.
    """
    if not (Path(folder) / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(open_documents(source), vocab_size), folder)
    return load_tokenizer(folder)


def count_tokens(documents: Iterable[str], tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """How often each token is a label when these documents are trained on.

    Those are all tokens of the documents and, where the tokenizer has it, one end-of-text token each.

    Returns:
        int64 counts of shape (vocabulary,).
    """
    counts = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    texts = iter(documents)
    while batch := list(itertools.islice(texts, 256)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            counts += np.bincount(encoding.ids, minlength=counts.size)
        if end_of_text is not None:
            counts[end_of_text] += len(batch)
    return counts


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution with these counts; 0 without any.

    A model that has learnt nothing but how often each token occurs has this training loss.

    Examples:
        >>> unigram_entropy(np.array([5, 5]))  # ln 2
        0.6931471805599453
    """
    occurring = counts[counts > 0]
    shares = occurring / occurring.sum()
    return float(-(shares * np.log(shares)).sum())


def unigram_cross_entropy(
    train_counts: npt.NDArray[np.int64], validation_counts: npt.NDArray[np.int64]
) -> float:
    """Validation loss, in nats a token, of the unigram distribution of the training text.

    One is added to every training count, so that a token that never occurs there costs a finite loss.

    Raises:
        UserError: There is no validation token.
    """
    total = validation_counts.sum()
    if total == 0:
        raise UserError("There is no validation text to measure: set validation_fraction higher.")
    smoothed = train_counts + 1
    return float(-(validation_counts * np.log(smoothed / smoothed.sum())).sum() / total)
