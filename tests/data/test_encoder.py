"""Encoding of documents, compared with torchtitan's tokenizer for several kinds of tokenizers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from titan_async.data import DocumentEncoder, PackedDataset, TextSource, shakespeare_tokenizer_folder
from titan_async.errors import UserError

TEXTS = ["To be, or not to be", "naïve <|endoftext|> <|pad|> \U0001f600", "", "x" * 999, "<s> a </s>"]
END = "<|endoftext|>"


def adds(single: str, **ids: int) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=list(ids.items())
        )

    return change


def cuts(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16, pad_id=5)


MADE: dict[str, tuple[dict | None, Callable[[Tokenizer], None] | None]] = {
    "without a configuration": (None, None),
    "both tokens the same": ({"bos_token": END, "eos_token": END}, None),
    # As SmolLM's, whose tokens are described at length.
    "described in full": (
        {
            "bos_token": END,
            "eos_token": END,
            "unk_token": END,
            "added_tokens_decoder": {
                "0": {"content": END, "lstrip": False, "normalized": False, "rstrip": False, "special": True}
            },
        },
        None,
    ),
    "EOS only": ({"eos_token": {"content": END, "__type": "AddedToken"}}, None),
    "neither token": ({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None}, None),
    "new tokens": ({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|pad|>"}, None),
    "added by the tokenizer": ({"bos_token": "<s>", "eos_token": "</s>"}, adds("<s> $A", **{"<s>": 2048})),
    "the same token, added by the tokenizer": (
        {"bos_token": END, "eos_token": END},
        adds(f"{END} $A", **{END: 0}),
    ),
    "both added by the tokenizer": (
        {"bos_token": END, "eos_token": END},
        adds(f"{END} $A {END}", **{END: 0}),
    ),
    "a token that is not there": ({"bos_token": END, "eos_token": END, "added_tokens_decoder": {}}, None),
}


def make(folder: Path, config: dict | None, change: Callable[[Tokenizer], None] | None) -> Path:
    tokenizer = Tokenizer.from_file(str(shakespeare_tokenizer_folder() / "tokenizer.json"))
    if config and config.get("bos_token") == "<s>" and change:
        tokenizer.add_special_tokens(["<s>", "</s>"])
    if change:
        change(tokenizer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", MADE)
def test_same_tokens_as_torchtitan(tmp_path: Path, name: str) -> None:
    tokenizers = pytest.importorskip("torchtitan.components.tokenizer")
    folder = make(tmp_path / "made", *MADE[name])
    reference = tokenizers.HuggingFaceTokenizer(tokenizer_path=str(folder))
    encoder = DocumentEncoder(folder)
    assert (encoder.bos_id, encoder.eos_id) == (reference.bos_id, reference.eos_id)
    assert encoder.vocab_size == reference.get_vocab_size()
    texts = [text for text in TEXTS if "<" not in text]
    expected = [reference.encode(text, add_bos=True, add_eos=True) for text in texts]
    if name == "the same token, added by the tokenizer":  # torchtitan then adds no EOS
        expected = [[*tokens, 0] for tokens in expected]
    assert [tokens.tolist() for tokens in encoder(texts)] == expected


@pytest.mark.parametrize("name", MADE)
def test_spelling_of_a_special_token_is_text(tmp_path: Path, name: str) -> None:
    encoder = DocumentEncoder(make(tmp_path / "made", *MADE[name]))
    special = {encoder.bos_id, encoder.eos_id, encoder.pad_id, 0, 2048, 2049}
    decode = Tokenizer.from_file(str(shakespeare_tokenizer_folder() / "tokenizer.json")).decode
    for text, tokens in zip(TEXTS, encoder(TEXTS), strict=True):
        ids = tokens.tolist()
        inner = ids[ids[:1] == [encoder.bos_id] : len(ids) - (ids[-1:] == [encoder.eos_id])]
        assert not special & set(inner)
        assert decode(inner, skip_special_tokens=False) == text


def test_bos_and_eos(tmp_path: Path) -> None:
    def ends(name: str) -> tuple[int, int]:
        tokens = DocumentEncoder(make(tmp_path / name, *MADE[name]))(["word"])[0].tolist()
        return tokens[0], tokens[-1]

    assert ends("both tokens the same") == ends("both added by the tokenizer") == (0, 0)
    assert ends("the same token, added by the tokenizer") == (0, 0)
    assert ends("new tokens") == ends("added by the tokenizer") == (2048, 2049)
    assert ends("EOS only")[1] == 0 != ends("EOS only")[0]
    assert 0 not in ends("neither token") + ends("without a configuration")


def test_saved_truncation_is_disabled(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from tests.data.test_loader import build

    text = "what light through yonder window breaks " * 40
    folder = make(tmp_path / "cuts", {"bos_token": END, "eos_token": END}, cuts)
    plain = make(tmp_path / "plain", {"bos_token": END, "eos_token": END}, None)
    encoder = DocumentEncoder(folder)
    assert encoder([text])[0].tolist() == DocumentEncoder(plain)([text])[0].tolist()
    assert len(encoder(["word"])[0]) < 8
    # The data loader's, too, which tokenizes as it reads.
    (tmp_path / "a.txt").write_text(text)
    reference = PackedDataset(
        TextSource(dataset_path=str(tmp_path / "a.txt")),
        lambda document: encoder([document])[0].tolist(),
        seq_len=64,
        infinite=True,
    )
    loader = build(
        HuggingFaceTokenizer(tokenizer_path=str(folder)), dataset_path=str(tmp_path / "a.txt"), shuffle=False
    )
    fields, _ = next(iter(loader))
    assert fields["input"][0].tolist() == next(iter(reference))[0]["input"].tolist()


def test_unused_ids_count_as_rows_of_the_embedding(tmp_path: Path) -> None:
    shutil.copytree(shakespeare_tokenizer_folder(), tmp_path / "gaps")
    file = tmp_path / "gaps" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] = 5000
    file.write_text(json.dumps(content))
    assert DocumentEncoder(tmp_path / "gaps").vocab_size == 5001


def test_user_errors_of_the_encoder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no tokenizer.json: set hf_assets_path"):
        DocumentEncoder(tmp_path)
    folder = make(tmp_path / "made", None, None)
    for content in ("{", "[]", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")):
        (folder / "tokenizer_config.json").write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=r"tokenizer_config.json (can't be read|is not a JSON object)"):
            DocumentEncoder(folder)
