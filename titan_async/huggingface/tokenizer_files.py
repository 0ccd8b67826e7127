"""The files of a tokenizer, beside a model."""

from pathlib import Path

from titan_async.data import DocumentEncoder
from titan_async.errors import UserError

__all__ = ["copy_tokenizer", "special_tokens"]

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def special_tokens(folder: str) -> dict[str, int]:
    """The ids of the tokens that begin and end documents and fill them up, under `config.json`'s names.

    Raises:
        UserError: there is no tokenizer in the folder, or it cannot be read.
    """
    encoder = DocumentEncoder(folder)
    ids = {"bos_token_id": encoder.bos_id, "eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}
    return {name: number for name, number in ids.items() if number is not None}


def copy_tokenizer(source: str, target: Path) -> None:
    """Copies a tokenizer's files, such that `AutoTokenizer` loads it from `target` alone.

    Raises:
        UserError: a file cannot be read.
    """
    for name in _FILES:
        file = Path(source) / name
        if file.is_file():
            try:
                content = file.read_bytes()
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror}") from error
            (target / name).write_bytes(content)
