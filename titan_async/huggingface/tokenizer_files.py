"""Export of a run's tokenizer: transformers then encodes prompts as training encoded documents."""

import json
from pathlib import Path
from typing import Any

from titan_async.data import DocumentEncoder
from titan_async.data.encoder import encode_plainly, tokens_around
from titan_async.data.tokenizer import load_tokenizer
from titan_async.errors import UserError
from titan_async.file_io import read_json
from titan_async.huggingface.sampling import PromptTokenizer

__all__ = ["export_tokenizer", "special_tokens"]

_COPIED = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt")

_PROBE = "a"
"""A text without special tokens."""

_LOCAL_PATHS = ("name_or_path", "special_tokens_map_file", "tokenizer_file", "cache_dir")
"""Keys of `tokenizer_config.json` for which old versions of transformers wrote local paths."""


def special_tokens(folder: str) -> dict[str, int]:
    """The ids of the special tokens of documents and of padding, by their names in `config.json`.

    Raises:
        UserError: there is no tokenizer in the folder, or it cannot be read.
    """
    encoder = DocumentEncoder(folder)
    ids = {"bos_token_id": encoder.bos_id, "eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}
    return {name: number for name, number in ids.items() if number is not None}


def export_tokenizer(source: str, target: Path) -> None:
    """Writes a tokenizer with which `AutoTokenizer` encodes a prompt as `titan-async sample` does.

    The post-processor in `tokenizer.json` adds to a prompt the tokens that begin a document in training, and
    none that end one. The file is copied unchanged if the tokenizer already adds these.

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
    prompt = PromptTokenizer(source).encode(_PROBE) if text else []
    around = tokens_around(prompt, text)
    if around and tokenizer.encode(_PROBE).ids != prompt:
        content = _with_special_tokens(json.loads(content), *around, encoder)
    (target / "tokenizer.json").write_bytes(content)
    config = _config(Path(source) / "tokenizer_config.json", adds_bos=encoder.bos_id is not None)
    (target / "tokenizer_config.json").write_bytes(_json_bytes(config, indent=2))


def _with_special_tokens(
    tokenizer: dict[str, Any], before: list[int], after: list[int], encoder: DocumentEncoder
) -> bytes:
    """A `tokenizer.json` whose post-processor adds these tokens before and after each text."""

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        pieces = [("SpecialToken", encoder.token_of(token)) for token in before]
        pieces += [("Sequence", sequence)]
        pieces += [("SpecialToken", encoder.token_of(token)) for token in after]
        return [{piece: {"id": name, "type_id": type_id}} for piece, name in pieces]

    names = {encoder.token_of(token): token for token in (*before, *after)}
    template = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in names.items()},
    }
    existing = tokenizer.get("post_processor") or {}
    # All other types add special tokens.
    kept = [each for each in existing.get("processors", [existing]) if each.get("type") == "ByteLevel"]
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [*kept, template]} if kept else template
    return _json_bytes(tokenizer, separators=(",", ":"))


def _config(file: Path, *, adds_bos: bool) -> dict[str, Any]:
    """The `tokenizer_config.json` of the exported tokenizer: that of `file`, adapted."""
    config = read_json(file) if file.is_file() else {}
    # Without a class, transformers 4 uses that of the model's family, with its own special tokens.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    return {key: value for key, value in config.items() if key not in _LOCAL_PATHS} | {
        # The models have no input for token types, which transformers 4 would pass.
        "model_input_names": ["input_ids", "attention_mask"],
        "add_bos_token": adds_bos,
        "add_eos_token": False,
    }


def _json_bytes(content: dict[str, Any], **style: Any) -> bytes:
    return (json.dumps(content, **style) + "\n").encode()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
