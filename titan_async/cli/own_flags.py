"""Flags of verbs that also take those of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan_async.errors import UserError
from titan_async.training.edit import nearest

__all__ = ["CommandLine", "split_flags"]


@dataclass(frozen=True)
class CommandLine:
    """What stands on a command line."""

    words: list[str]
    """What comes before all flags of the recipe and belongs to no flag."""
    values: dict[str, str]
    """Of the verb's own flags, without dashes."""
    recipe_flags: list[str]
    """The other flags with their values, for `resolve_recipe`."""


def split_flags(verb: str, argv: Sequence[str], own: Sequence[str]) -> CommandLine:
    """Takes a verb's own flags, each of which has a value, from what belongs to the recipe.

    Args:
        verb: for messages.
        argv: what follows it.
        own: flags without dashes.

    Raises:
        UserError: an own flag has no value or comes twice, or a flag is neither of the verb nor of a recipe.
    """
    words: list[str] = []
    values: dict[str, str] = {}
    rest: list[str] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        flag = name.removeprefix("--")
        if word.startswith("--") and flag in own:
            if flag in values:
                raise UserError(f"{name} is given twice: keep one")
            if not equals and not left:
                raise UserError(f"{name} needs a value, as in titan-async {verb} --help")
            values[flag] = value if equals else left.pop(0)
        elif not word.startswith("-") and not rest:
            words.append(word)
        else:
            _refuse_alike(name, own)
            rest.append(word)
    return CommandLine(words, values, rest)


def _refuse_alike(flag: str, own: Sequence[str]) -> None:
    known = [f"--{name}" for name in own]
    close = nearest(flag, [*known, "--module"], cutoff=0.8) if flag.startswith("--") else None
    if close and close != flag and "." not in flag:
        raise UserError(f"unknown flag {flag}; did you mean {close}?")
