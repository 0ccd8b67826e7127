"""Turns what a user wrote into the value that a configuration field's type asks for.

TOML values are judged strictly (the string "3" is no integer), words of the command line laxly.
Every refusal is a `ValueError` whose message completes the sentence "training.steps ...".
"""

from __future__ import annotations

import json
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from titan_async.config.toml_values import check_value, parse_toml

__all__ = ["describe", "free_value", "from_toml", "from_words", "members", "plain", "show"]

NONE_WORD = "none"
"""How a file or a flag spells None."""


def plain(hint: Any) -> Any:
    """Returns a type hint without its `Annotated` markers."""
    while typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    return hint


def members(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, markers kept; any other type is its own only member."""
    hint = plain(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _allows_none(hint: Any) -> bool:
    return any(plain(member) is type(None) for member in members(hint))


def describe(hint: Any) -> str:
    """Returns the words for a type, as in "must be an integer"."""
    hint = plain(hint)
    simple = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if hint in simple:
        return simple[hint]
    if hint is type(None):
        return f'"{NONE_WORD}"'
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        options = [json.dumps(option) for option in args]
        return options[0] if len(options) == 1 else "one of " + ", ".join(options)
    if origin in (Union, types.UnionType):
        if float in args:
            args = tuple(arg for arg in args if arg is not int)
        return " or ".join(dict.fromkeys(describe(arg) for arg in args))
    if origin in (list, tuple, Sequence, set):
        item = describe(args[0]) if args else "a value"
        return {"a string": "a list of strings", "an integer": "a list of integers"}.get(
            item, f"a list, each {item}"
        )
    if origin in (dict, Mapping) or hint is dict:
        return "a table"
    return str(getattr(hint, "__qualname__", hint))


def show(value: object) -> str:
    """Returns the words for a value that was refused."""
    if isinstance(value, dict):
        return "a table"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:  # a date
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _adapter(hint: Any) -> TypeAdapter[Any]:
    if typing.get_origin(plain(hint)) is Callable or plain(hint) is Callable:
        raise ValueError("is code and cannot be set here; choose another recipe")
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a type that brings its own pydantic configuration
        return TypeAdapter(hint)


def from_toml(hint: Any, value: object) -> Any:
    """Returns a TOML value as the type asks for it.

    Raises:
        ValueError: the value is of another type, or as `check_value`.
    """
    if value == NONE_WORD and _allows_none(hint):
        return None
    check_value(value)
    adapter = _adapter(hint)
    try:
        # Strict JSON takes a list for a tuple and a string for a path, as TOML has neither.
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError:
        raise ValueError(f"must be {describe(hint)}, not {show(value)}") from None


def from_words(hint: Any, words: Sequence[str]) -> Any:
    """Returns the words after a flag as the type asks for them.

    Raises:
        ValueError: there are too few or too many words, or they are of another type.
    """
    value = _from_words(hint, words)
    check_value(value)
    return value


def _from_words(hint: Any, words: Sequence[str]) -> Any:
    shape = _without_none(hint)
    if shape is bool and not words:
        return True
    if not words:
        raise ValueError(f"needs a value: {describe(hint)}")
    if len(words) == 1 and words[0].lower() == NONE_WORD and _allows_none(hint):
        return None
    if typing.get_origin(shape) in (list, tuple, Sequence, set):
        return _list_from_words(shape, words)
    if len(words) > 1:
        raise ValueError(f"takes one value, not {len(words)}: {' '.join(words)}")
    word = words[0]
    if typing.get_origin(shape) is Literal:
        for option in typing.get_args(shape):
            if word == str(option):
                return option
        raise ValueError(f"must be {describe(hint)}, not {show(word)}")
    if typing.get_origin(shape) in (dict, Mapping):
        return from_toml(shape, _parse_toml(word))
    try:
        return _adapter(hint).validate_python(word)
    except ValidationError:
        raise ValueError(f"must be {describe(hint)}, not {show(word)}") from None


def _without_none(hint: Any) -> Any:
    rest = [plain(member) for member in members(hint) if plain(member) is not type(None)]
    return rest[0] if len(rest) == 1 else plain(hint)


def _list_from_words(hint: Any, words: Sequence[str]) -> Any:
    if len(words) == 1 and words[0].lstrip().startswith("["):
        return from_toml(hint, _parse_toml(words[0]))
    items = [item for word in words for item in word.split(",") if item]
    try:
        return _adapter(hint).validate_python(items)
    except ValidationError:
        raise ValueError(f"must be {describe(hint)}, not {show(' '.join(words))}") from None


def _parse_toml(word: str) -> object:
    """Returns a word as the TOML value it spells, and as a string when it spells none.

    Raises:
        ValueError: as `parse_toml`.
    """
    try:
        return parse_toml(f"value = {word}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return word


def free_value(current: object, value: object, *, words: bool) -> Any:
    """Returns a value of a table whose keys have no declared types, such as `optimizer_kwargs`.

    The value it replaces, if any, says what is expected: a number is not replaced by a string.
    Arrays become tuples, as optimizers spell `betas`, unless they replace a list.

    Raises:
        ValueError: the value is of another kind than the one it replaces, or as `check_value`.
    """
    if words:
        assert isinstance(value, list)
        value = _free_words(current, value)
    check_value(value)
    if value == NONE_WORD:
        return None
    if isinstance(current, bool):
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {show(value)}")
    elif isinstance(current, int | float) and isinstance(value, str | list | dict | bool):
        raise ValueError(f"must be a number, not {show(value)}")
    elif isinstance(current, tuple | list) and not isinstance(value, list):
        raise ValueError(f"must be a list, not {show(value)}")
    return _frozen(value) if not isinstance(current, list) else value


def _free_words(current: object, words: list[str]) -> object:
    if not words:
        return True
    if isinstance(current, tuple | list):
        text = ",".join(words)
        return _parse_toml(text if text.startswith("[") else f"[{text}]")
    if len(words) > 1:
        raise ValueError(f"takes one value, not {len(words)}: {' '.join(words)}")
    return _parse_toml(words[0])


def _frozen(value: object) -> object:
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: None if item == NONE_WORD else _frozen(item) for key, item in value.items()}
    return value
