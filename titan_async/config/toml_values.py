"""What a value may be, in a recipe file and on the command line, whatever field it is for."""

import re
import tomllib
from typing import Any

__all__ = ["MOST_NESTED", "check_value", "parse_toml"]

MOST_NESTED = 32
"""Tables and arrays within each other."""

_LONG_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_NESTED + 1}}}"""
)
"""A key of so many parts, for which tomllib takes time and memory of the square of its length."""

_MOST_INTEGER = 2**64
"""What TOML promises, and no setting needs more."""


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML.

    Raises:
        tomllib.TOMLDecodeError: it is none.
        ValueError: it is nested too deeply, or has a number of thousands of digits; the message completes the
            sentence "one of its values ...".
    """
    if _LONG_KEY.search(text):
        raise ValueError("is nested too deeply")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # of Python's limit for the digits of integers
        raise ValueError("is too large a number") from None
    _check_nesting(data)
    return data


def check_value(value: object) -> None:
    """Refuses a value that no setting can have.

    Raises:
        ValueError: it is nested too deeply, not a number (NaN), too large a number, or text with a character
            that no file name can have; the message completes the sentence "training.steps ...".
    """
    for item in _check_nesting(value):
        if isinstance(item, str) and "\0" in item:
            raise ValueError("has the character U+0000 in it, which no text here may have")
        if isinstance(item, int | float) and item != item:
            raise ValueError("must be a number, not nan")
        if isinstance(item, int) and abs(item) >= _MOST_INTEGER:
            raise ValueError("is too large a number")


def _check_nesting(value: object) -> list[object]:
    """All that a value consists of, itself included."""
    parts, left = [], [(value, 0)]
    while left:
        item, depth = left.pop()
        if depth > MOST_NESTED:
            raise ValueError("is nested too deeply")
        parts.append(item)
        if isinstance(item, dict):
            left += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list | tuple):
            left += [(inner, depth + 1) for inner in item]
    return parts
