"""Training of byte-level BPE tokenizers, the default tokenizer, and unigram baselines.

Tokenizers are saved as Hugging Face folders. As in GPT-2, the end-of-text token begins and ends every
document. `assets/shakespeare_bpe2048` is the result of `train_tokenizer` on the training split of
"shakespeare".
"""

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titan_async.data.document_stream import open_documents
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
"""The token, with id 0, that begins and ends a document."""


def shakespeare_tokenizer_folder() -> Path:
    """Folder of this package's tokenizer of 2048 entries for the default dataset."""
    return Path(__file__).parent / "assets" / "shakespeare_bpe2048"


def train_tokenizer(documents: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
    """Trains a byte-level BPE; the same documents in the same order give the same tokenizer.

    Args:
        documents: The texts, read once.
        vocab_size: Maximum number of entries, including the 256 bytes and the end-of-text token.

    Raises:
        UserError: `vocab_size` is too small for the bytes, or there is no text.

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
    """Writes `tokenizer_config.json` and `tokenizer.json`.

    Each file is written atomically, `tokenizer.json` last, so that other processes may read or write the same
    folder concurrently, and a folder with a `tokenizer.json` is complete.
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
    """Loads the `tokenizer.json` of a folder.

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
    """Loads the tokenizer of a folder, or trains it on a source's first epoch and saves it there.

    Several processes may call this concurrently; each trains the same tokenizer. If the folder has a
    tokenizer, `source` and `vocab_size` are ignored.

    Raises:
        UserError: As `train_tokenizer`, `load_tokenizer` and `open_documents`.
    """
    if not (Path(folder) / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(open_documents(source), vocab_size), folder)
    return load_tokenizer(folder)


def count_tokens(documents: Iterable[str], tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Counts how often each token is a label in training on these documents.

    The labels are all tokens of the documents and, if the tokenizer has it, one end-of-text token each.

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

    It is the training loss of a model that knows the frequency of each token only.

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
    """Validation loss, in nats per token, of the unigram distribution of the training text.

    One is added to every training count, so that the loss of an unseen token is finite.

    Raises:
        UserError: There are no validation tokens.
    """
    total = validation_counts.sum()
    if total == 0:
        raise UserError("There is no validation text to measure: set validation_fraction higher.")
    smoothed = train_counts + 1
    return float(-(validation_counts * np.log(smoothed / smoothed.sum())).sum() / total)
