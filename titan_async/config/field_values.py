"""Converts TOML values and flags to values of configuration fields, by the type of the field.

TOML values are converted strictly (the string "3" is not an integer), the words after a flag leniently. Each
error is a `ValueError` whose message continues the name of the field: "training.steps" + " is ...".
"""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Union

__all__ = [
    "MAX_DEPTH",
    "NONE_WORD",
    "check_value",
    "format_value",
    "from_flag",
    "from_toml",
    "parse_toml",
    "plain",
    "union_members",
    "untyped_from_flag",
    "untyped_from_toml",
]

NONE_WORD = "none"
"""None in a recipe file or a flag."""

MAX_DEPTH = 32
"""Maximum nesting of tables and arrays."""

_LONG_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH + 1}}}"""
)
"""A dotted key that exceeds it: tomllib's time and memory are quadratic in its length."""

_INTEGER_LIMIT = 2**64
"""TOML guarantees 64-bit integers, and no field needs more."""


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML.

    Raises:
        tomllib.TOMLDecodeError: the text is not valid TOML.
        ValueError: it is nested too deeply, or an integer has thousands of digits. The message continues
            "one of its values".
    """
    if _LONG_KEY.search(text):
        raise ValueError("is nested too deeply")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's limit for the digits of an integer
        raise ValueError("is too large a number") from None
    _flatten(data)
    return data


def check_value(value: object) -> None:
    """Checks for values that no field accepts.

    Raises:
        ValueError: the value is nested too deeply, NaN, an integer beyond 64 bits, or a string with U+0000.
    """
    for item in _flatten(value):
        if isinstance(item, str) and "\0" in item:
            raise ValueError("contains the character U+0000, which is not allowed")
        if isinstance(item, int | float) and item != item:
            raise ValueError("must be a number, not nan")
        if isinstance(item, int) and abs(item) >= _INTEGER_LIMIT:
            raise ValueError("is too large a number")


def _flatten(value: object) -> list[object]:
    """Returns a value and everything nested in it."""
    items, pending = [], [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ValueError("is nested too deeply")
        items.append(item)
        if isinstance(item, dict):
            pending += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list | tuple):
            pending += [(inner, depth + 1) for inner in item]
    return items


def plain(hint: Any) -> Any:
    """Returns a type hint without its `Annotated` markers."""
    while typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    return hint


def union_members(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union with their markers; another type is its only member."""
    hint = plain(hint)
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def format_value(value: object) -> str:
    """Formats a value for an error message."""
    if isinstance(value, dict):
        return "a table"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:  # a date
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def from_toml(hint: Any, value: object) -> Any:
    """Returns a TOML value as an instance of the type.

    Raises:
        ValueError: the value is of another type, or `check_value` raises.
    """
    if value == NONE_WORD and type(None) in union_members(hint):
        return None
    check_value(value)
    # Strict JSON accepts a list for a tuple and a string for a path, which TOML does not have.
    return _validated(hint, value, json_text=json.dumps(value, default=str))


def from_flag(hint: Any, words: Sequence[str]) -> Any:
    """Returns the words after a flag as an instance of the type.

    Raises:
        ValueError: there are too few or too many words, they are of another type, or `check_value` raises.
    """
    members = [plain(member) for member in union_members(hint)]
    others = [member for member in members if member is not type(None)]
    kind = others[0] if len(others) == 1 else plain(hint)
    origin = typing.get_origin(kind)
    if not words:
        if kind is bool:
            return True
        name = kind.__name__ if isinstance(kind, type) and not origin else str(kind).removeprefix("typing.")
        raise ValueError(f"needs a value of type {name}")
    if len(words) == 1 and words[0].lower() == NONE_WORD and len(others) < len(members):
        return None
    if origin in (list, tuple, Sequence, set):
        if len(words) == 1 and words[0].lstrip().startswith("["):
            return from_toml(kind, _parse_word(words[0]))
        value: Any = _validated(hint, [item for word in words for item in word.split(",") if item])
    elif origin in (dict, Mapping):
        return from_toml(kind, _parse_word(_single(words)))
    else:
        value = _validated(hint, _single(words))
    check_value(value)
    return value


def untyped_from_toml(current: object, value: object) -> Any:
    """Returns a value of a table whose values have no declared type, such as `optimizer_kwargs`.

    The value that it replaces determines the type: a string cannot replace a number. Arrays become tuples,
    like the `betas` of optimizers, unless they replace a list.

    Raises:
        ValueError: the value is of another type than the one it replaces, or `check_value` raises.
    """
    check_value(value)
    if value == NONE_WORD:
        return None
    for kind, hint in ((bool, bool), (int | float, int | float), (tuple | list, list)):
        if isinstance(current, kind):
            value = from_toml(hint, value)
            break
    return value if isinstance(current, list) else _as_tuples(value)


def untyped_from_flag(current: object, words: Sequence[str]) -> Any:
    """Returns the words after a flag, read as TOML, as `untyped_from_toml` does.

    Raises:
        ValueError: there are too many words, or `untyped_from_toml` raises.
    """
    if not words:
        value: object = True
    elif isinstance(current, tuple | list):
        text = ",".join(words)
        value = _parse_word(text if text.startswith("[") else f"[{text}]")
    else:
        value = _parse_word(_single(words))
    return untyped_from_toml(current, value)


def _validated(hint: Any, value: object, *, json_text: str | None = None) -> Any:
    """Returns a value validated by pydantic: strictly if it is JSON, else leniently."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        if json_text is not None:
            return adapter.validate_json(json_text, strict=True)
        return adapter.validate_python(value)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        if any(isinstance(key, int) for key in first["loc"]):
            found = f"has the item {format_value(first['input'])}"
        else:
            found = f"is {format_value(value)}"
        messages = [detail["msg"][:1].lower() + detail["msg"][1:] for detail in (first, *others)]
        or_none = f', or "{NONE_WORD}"' if type(None) in union_members(hint) else ""
        raise ValueError(f"{found}: {' or '.join(dict.fromkeys(messages))}{or_none}") from None


def _single(words: Sequence[str]) -> str:
    if len(words) > 1:
        raise ValueError(f"takes one value, not {len(words)}: {' '.join(words)}")
    return words[0]


def _parse_word(word: str) -> object:
    """Returns a word as a TOML value, or unchanged if it is not valid TOML."""
    try:
        return parse_toml(f"value = {word}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return word


def _as_tuples(value: object) -> object:
    if isinstance(value, list):
        return tuple(_as_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: None if item == NONE_WORD else _as_tuples(item) for key, item in value.items()}
    return value
