"""Exported tokenizers encode prompts as training encodes documents, in transformers and `tokenizers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from titan_async.data import DocumentEncoder, shakespeare_tokenizer_folder
from titan_async.huggingface.tokenizer_files import export_tokenizer

VOCABULARY = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
BOTH = {"bos_token": "<s>", "eos_token": "</s>"}


def template(single: str) -> processors.TemplateProcessing:
    pair = f"{single} {single.replace('$A', '$B')}"
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[("<s>", 0), ("</s>", 1)])


BYTES = processors.ByteLevel(trim_offsets=True)


def written(folder: Path, processor: Any, config: dict[str, Any] | None) -> Path:
    """A tokenizer whose tokens are characters."""
    tokenizer = Tokenizer(models.BPE(VOCABULARY, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if processor is not None:
        tokenizer.post_processor = processor
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def exported(source: Path) -> Path:
    target = source.with_name("exported")
    target.mkdir()
    export_tokenizer(str(source), target)
    return target


@pytest.mark.parametrize(
    ("processor", "config", "before"),
    [
        (None, BOTH, [0]),
        (BYTES, BOTH, [0]),
        (template("<s> $A"), BOTH, [0]),
        (processors.Sequence([BYTES, template("<s> $A")]), BOTH, [0]),
        (template("<s> $A </s>"), BOTH, [0]),
        (processors.Sequence([BYTES, template("$A </s>")]), BOTH, [0]),
        (processors.RobertaProcessing(("</s>", 1), ("<s>", 0)), BOTH, [0]),
        (None, {"bos_token": {"content": "</s>", "__type": "AddedToken"}, "eos_token": "</s>"}, [1]),
        (template("</s> $A"), {"bos_token": "</s>", "eos_token": "</s>"}, [1]),
        (None, {"bos_token": "<new>", "eos_token": "</s>"}, [4]),  # a token that tokenizer.json lacks
        (BYTES, {"eos_token": "</s>", "add_eos_token": True}, []),
        (None, None, []),
    ],
)
def test_prompt_has_bos_once_and_no_eos(
    tmp_path: Path, processor: Any, config: dict[str, Any] | None, before: list[int]
) -> None:
    source = written(tmp_path / "source", processor, config)
    target = exported(source)
    encode = Tokenizer.from_file(str(target / "tokenizer.json")).encode
    assert encode("ab").ids == [*before, 2, 3]
    assert encode("").ids == before
    assert encode("ab", add_special_tokens=False).ids == [2, 3]
    assert encode("a", "b").ids == [*before, 2, *before, 3]
    transformers = pytest.importorskip("transformers")
    (target / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert dict(tokenizer("ab")) == {"input_ids": [*before, 2, 3], "attention_mask": [1] * (len(before) + 2)}
    # A run that continues from the export encodes documents as the run before.
    [ours], [theirs] = DocumentEncoder(source)(["ab"]), DocumentEncoder(target)(["ab"])
    assert theirs.tolist() == ours.tolist()


@pytest.mark.parametrize("processor", [template("<s> $A"), processors.Sequence([BYTES, template("<s> $A")])])
def test_tokenizer_that_adds_bos_is_copied(tmp_path: Path, processor: Any) -> None:
    config = {
        **BOTH, "tokenizer_class": "LlamaTokenizerFast", "chat_template": "{{ bos_token }}", "legacy": False
    }  # fmt: skip
    source = written(tmp_path / "source", processor, config)
    (source / "special_tokens_map.json").write_text("{}")
    target = exported(source)
    for name in ("tokenizer.json", "special_tokens_map.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    kept = json.loads((target / "tokenizer_config.json").read_text())
    assert kept == config | {
        "model_input_names": ["input_ids", "attention_mask"],
        "add_bos_token": True,
        "add_eos_token": False,
    }


def test_exported_tokenizer_encodes_as_training(tmp_path: Path) -> None:
    """The pre-tokenizer of the file is used, here with single digits as in SmolLM2, not that of a class."""
    transformers = pytest.importorskip("transformers")
    source = tmp_path / "source"
    source.mkdir()
    tokenizer = Tokenizer.from_file(str(shakespeare_tokenizer_folder() / "tokenizer.json"))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    tokenizer.save(str(source / "tokenizer.json"))
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "tokenizer_class": "LlamaTokenizer"}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    target = exported(source)
    (target / "config.json").write_text('{"model_type": "llama"}')
    text = "ROMEO: Whät's in 10 or 1999?\n"
    theirs = transformers.AutoTokenizer.from_pretrained(target)
    [tokens] = DocumentEncoder(source)([text])
    assert theirs(text).input_ids == tokens.tolist()[:-1]  # all but the end
    assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text


def test_export_of_the_default_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export_tokenizer(str(shakespeare_tokenizer_folder()), tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("To be").input_ids == [0, 409, 305]


def test_local_paths_are_removed(tmp_path: Path) -> None:
    paths = {"name_or_path": "/home/me/model", "special_tokens_map_file": "/home/me/map.json"}
    target = exported(written(tmp_path / "source", None, BOTH | paths))
    assert "/home" not in (target / "tokenizer_config.json").read_text()
