"""The default tokenizer, its training, and the unigram entropy."""

import math
from pathlib import Path

import numpy as np
import pytest

from titan_async.data import (
    TextSource,
    load_tokenizer,
    open_documents,
    save_tokenizer,
    shakespeare_tokenizer_folder,
    train_tokenizer,
    unigram_entropy,
)
from titan_async.errors import UserError


@pytest.mark.slow
def test_default_tokenizer_equals_the_trained_one(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(open_documents(TextSource(shuffle=False))), tmp_path)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (shakespeare_tokenizer_folder() / name).read_bytes()


def test_decoding_restores_any_text() -> None:
    tokenizer = load_tokenizer(shakespeare_tokenizer_folder())
    assert tokenizer.get_vocab_size() == 2048
    for text in (" To be,  or\nnot\tto be", "naïve — 你好 \U0001f600", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_user_errors_of_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"can't be read .* fetch it again"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="257 or more"):
        train_tokenizer(["text"], vocab_size=100)
    with pytest.raises(UserError, match="no text to train"):
        train_tokenizer([])


def test_unigram_entropy() -> None:
    counts = np.array([8, 4, 4, 0])
    assert unigram_entropy(counts) == pytest.approx(1.5 * math.log(2))
