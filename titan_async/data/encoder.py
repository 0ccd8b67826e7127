"""Encoding of documents, with BOS and EOS tokens.

`tokenizer_config.json` names the BOS and EOS tokens; one that the tokenizer adds itself is not added twice.
The spelling of a special token in a document, such as `<|endoftext|>`, is encoded as plain text. Truncation
and padding that were saved with a tokenizer are disabled.

Otherwise the tokens are those of torchtitan's `HuggingFaceTokenizer.encode(text, add_bos=True,
add_eos=True)`, for many documents at once and without torchtitan. That function encodes such a spelling as
the special token, and omits EOS if the tokenizer adds the same token as BOS.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from titan_async.data.tokenizer import load_tokenizer
from titan_async.errors import UserError
from titan_async.file_io import read_json

__all__ = ["DocumentEncoder", "adds_bos_eos", "encode_plainly", "entries_of", "tokens_around"]

_TOKEN_FIELDS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class DocumentEncoder:
    """The tokenizer of a Hugging Face folder: `tokenizer.json`, and `tokenizer_config.json` if it exists.

    Called with documents it returns the tokens of each, uint32 of shape (tokens,), with BOS and EOS if the
    tokenizer has them.

    Raises:
        UserError: The folder has no tokenizer, or it can't be read.

    Examples:
        >>> from titan_async.data import shakespeare_tokenizer_folder
        >>> encoder = DocumentEncoder(shakespeare_tokenizer_folder())
        >>> [tokens.tolist() for tokens in encoder(["To be", "or not"])]
        [[0, 409, 305, 0], [0, 272, 323, 0]]
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._tokenizer = load_tokenizer(folder)
        encode_plainly(self._tokenizer)
        config = _read_config(Path(folder) / "tokenizer_config.json")
        try:
            self._tokenizer.add_special_tokens(_special_tokens(config))
        except (TypeError, UnicodeEncodeError) as error:
            raise UserError(
                f"The tokenizer_config.json in {folder} describes no tokens ({error}): fetch it again or "
                "remove it."
            ) from error
        self.bos_id = self._id_of(config.get("bos_token"))
        """The BOS token; None without one."""
        self.eos_id = self._id_of(config.get("eos_token"))
        """The EOS token; None without one."""
        self.pad_id = self._id_of(config.get("pad_token"))
        """The padding token; None without one."""
        adds_bos, adds_eos = adds_bos_eos(self._tokenizer, self.bos_id, self.eos_id)
        self._before = [] if self.bos_id is None or adds_bos else [self.bos_id]
        self._after = [] if self.eos_id is None or adds_eos else [self.eos_id]
        self.vocab_size = entries_of(self._tokenizer)
        """Rows that an embedding needs; see `entries_of`."""
        self.sha256 = hashlib.sha256((Path(folder) / "tokenizer.json").read_bytes()).hexdigest()
        """Hash of `tokenizer.json`."""

    def __call__(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The tokens of each document."""
        return [
            np.array([*self._before, *encoding.ids, *self._after], dtype=np.uint32)
            for encoding in self._tokenizer.encode_batch_fast(list(texts))
        ]

    def token_of(self, number: int) -> str:
        """The text of a token of the vocabulary."""
        return self._tokenizer.id_to_token(number)

    def _id_of(self, token: Any) -> int | None:
        content = _content(token)
        return None if content is None else self._tokenizer.token_to_id(content)


def encode_plainly(tokenizer: Tokenizer) -> None:
    """Disables truncation, padding, and the parsing of special tokens in texts."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True


def adds_bos_eos(tokenizer: Tokenizer, bos_id: int | None, eos_id: int | None) -> tuple[bool, bool]:
    """Whether a tokenizer itself adds `bos_id` before a text, and whether it adds `eos_id` after it."""
    ids = tokenizer.encode("a").ids
    around = tokens_around(ids, tokenizer.encode("a", add_special_tokens=False).ids)
    before, after = around or (ids, ids)  # a vocabulary without that letter
    return bos_id in before, eos_id in after


def tokens_around(ids: list[int], text: list[int]) -> tuple[list[int], list[int]] | None:
    """The tokens of `ids` before and after those of `text`; None if `text` is empty or not in `ids`."""
    for start in range(len(ids)):
        if text and ids[start : start + len(text)] == text:
            return ids[:start], ids[start + len(text) :]
    return None


def entries_of(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs: one more than the highest token id, even if some ids are unused."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _read_config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The tokenizer's {file} can't be read ({error}): fetch it again or remove it."
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"The tokenizer's {file} is not a JSON object: fetch it again or remove it.")
    return config


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: dict[str, Any]) -> list[AddedToken]:
    described = [config.get(key) for key in _SPECIAL]
    decoder = config.get("added_tokens_decoder")
    described += decoder.values() if isinstance(decoder, dict) else []
    tokens = []
    for token in described:
        content = _content(token)
        if content is None:
            continue
        given = token if isinstance(token, dict) else {}
        # torchtitan's defaults: a token described by a dictionary is normalized unless that is false.
        fields = {"normalized": bool(given), "special": True}
        fields |= {key: given[key] for key in _TOKEN_FIELDS if key in given}
        tokens.append(AddedToken(content, **fields))
    return tokens
