"""Training of byte-level BPE tokenizers, the default tokenizer, and the unigram entropy.

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

from titan_async.errors import UserError
from titan_async.file_io import atomic_write

__all__ = [
    "END_OF_TEXT",
    "load_tokenizer",
    "save_tokenizer",
    "shakespeare_tokenizer_folder",
    "train_tokenizer",
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


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution with these counts; 0 without any.

    This is the training loss of a model that predicts only the frequency of each token.

    Examples:
        >>> unigram_entropy(np.array([5, 5]))  # ln 2
        0.6931471805599453
    """
    occurring = counts[counts > 0]
    shares = occurring / occurring.sum()
    return float(-(shares * np.log(shares)).sum())
