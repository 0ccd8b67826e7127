"""The files of a tokenizer, beside a model: with them a prompt begins as documents began in training."""

import json
from pathlib import Path
from typing import Any

from titan_async.data import DocumentEncoder
from titan_async.data.encoder import encode_plainly, tokens_around
from titan_async.data.tokenizer import load_tokenizer
from titan_async.errors import UserError
from titan_async.file_io import read_json
from titan_async.huggingface.sampling import Vocabulary

__all__ = ["export_tokenizer", "special_tokens"]

_COPIED = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt")

_PROBE = "a"
"""A text of ordinary tokens."""

_OF_A_MACHINE = ("name_or_path", "special_tokens_map_file", "tokenizer_file", "cache_dir")
"""Keys of `tokenizer_config.json` under which old versions of transformers left paths."""


def special_tokens(folder: str) -> dict[str, int]:
    """The ids of the tokens that begin and end documents and fill them up, under `config.json`'s names.

    Raises:
        UserError: there is no tokenizer in the folder, or it cannot be read.
    """
    encoder = DocumentEncoder(folder)
    ids = {"bos_token_id": encoder.bos_id, "eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}
    return {name: number for name, number in ids.items() if number is not None}


def export_tokenizer(source: str, target: Path) -> None:
    """Writes a tokenizer with which `AutoTokenizer` encodes a prompt as `titan-async sample` does.

    A prompt gets the tokens that begin a document in training and none that end one, from the post-processor
    in `tokenizer.json`. That file stays as it is where the tokenizer adds just these by itself.

    Raises:
        UserError: a file cannot be read.
    """
    for name in _COPIED:
        file = Path(source) / name
        if file.is_file():
            (target / name).write_bytes(_read(file))
    encoder, tokenizer = DocumentEncoder(source), load_tokenizer(source)
    encode_plainly(tokenizer)
    content = _read(Path(source) / "tokenizer.json")
    text = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    prompt = Vocabulary(source).begin(_PROBE) if text else []
    around = tokens_around(prompt, text)
    if around and tokenizer.encode(_PROBE).ids != prompt:
        content = _with_special_tokens(json.loads(content), *around, encoder)
    (target / "tokenizer.json").write_bytes(content)
    config = _config(Path(source) / "tokenizer_config.json", begins=encoder.bos_id is not None)
    (target / "tokenizer_config.json").write_bytes(_json_bytes(config, indent=2))


def _with_special_tokens(
    tokenizer: dict[str, Any], before: list[int], after: list[int], encoder: DocumentEncoder
) -> bytes:
    """A `tokenizer.json` that puts these tokens before and after every text."""

    def around(sequence: str, kind: int) -> list[dict[str, Any]]:
        parts = [("SpecialToken", encoder.token_of(token)) for token in before]
        parts += [("Sequence", sequence)]
        parts += [("SpecialToken", encoder.token_of(token)) for token in after]
        return [{part: {"id": name, "type_id": kind}} for part, name in parts]

    names = {encoder.token_of(token): token for token in (*before, *after)}
    template = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in names.items()},
    }
    known = tokenizer.get("post_processor") or {}
    # The others than this one add special tokens of their own.
    kept = [each for each in known.get("processors", [known]) if each.get("type") == "ByteLevel"]
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [*kept, template]} if kept else template
    return _json_bytes(tokenizer, separators=(",", ":"))


def _config(file: Path, *, begins: bool) -> dict[str, Any]:
    """A `tokenizer_config.json` with all that the one in `file` has, for the exported `tokenizer.json`."""
    config = read_json(file) if file.is_file() else {}
    # Where none is named, transformers 4 would take the class of the model's family, with its own tokens.
    named = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    return {key: value for key, value in named.items() if key not in _OF_A_MACHINE} | {
        # The models take no token types, which transformers 4 would give them.
        "model_input_names": ["input_ids", "attention_mask"],
        "add_bos_token": begins,
        "add_eos_token": False,
    }


def _json_bytes(content: dict[str, Any], **style: Any) -> bytes:
    return (json.dumps(content, **style) + "\n").encode()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
