"""The default tokenizer, its training, and the unigram baselines."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import forks
from titan_async.data import (
    TextSource,
    count_tokens,
    ensure_tokenizer,
    load_tokenizer,
    open_documents,
    save_tokenizer,
    shakespeare_tokenizer_folder,
    train_tokenizer,
    unigram_cross_entropy,
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


def test_ensure_trains_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 50)
    source = TextSource(dataset_path=str(tmp_path / "a.txt"))
    made = ensure_tokenizer(tmp_path / "new" / "folder", source, vocab_size=262)
    assert made.get_vocab_size() == 262
    (tmp_path / "a.txt").unlink()
    again = ensure_tokenizer(tmp_path / "new" / "folder", source, vocab_size=999)
    assert again.to_str() == made.to_str()
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 2


def test_ensure_in_two_processes_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 1000)
    code = (
        "import sys; from titan_async.data import *; "
        "tokenizer = ensure_tokenizer(sys.argv[2], TextSource(dataset_path=sys.argv[1]), 300); "
        "assert tokenizer.get_vocab_size() > 257"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.txt"), str(tmp_path / "new")]
    processes = [forks.Forked(command) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert len(list((tmp_path / "new").iterdir())) == 2


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


def test_count_tokens_counts_labels() -> None:
    tokenizer = load_tokenizer(shakespeare_tokenizer_folder())
    texts = ["To be or not to be", "That is the question"] * 200
    counts = count_tokens(iter(texts), tokenizer)
    labels = np.concatenate([[*tokenizer.encode(text).ids, 0] for text in texts])
    assert (counts == np.bincount(labels, minlength=2048)).all()


def test_unigram_measures() -> None:
    counts = np.array([8, 4, 4, 0])
    assert unigram_entropy(counts) == pytest.approx(1.5 * math.log(2))
    assert unigram_cross_entropy(np.array([0, 0]), np.array([1, 3])) == pytest.approx(math.log(2))
    large = counts * 10**6
    assert unigram_cross_entropy(large, large) == pytest.approx(unigram_entropy(large), abs=1e-5)
    with pytest.raises(UserError, match="no validation text"):
        unigram_cross_entropy(counts, np.array([0, 0, 0, 0]))


@pytest.mark.slow  # it encodes all of the plays
def test_unigram_baseline_of_the_default_dataset() -> None:
    tokenizer = load_tokenizer(shakespeare_tokenizer_folder())
    train, validation = (
        count_tokens(open_documents(TextSource(split=split)), tokenizer) for split in ("train", "validation")
    )
    assert unigram_entropy(train) == pytest.approx(6.096, abs=0.001)
    assert unigram_cross_entropy(train, validation) == pytest.approx(6.111, abs=0.001)
