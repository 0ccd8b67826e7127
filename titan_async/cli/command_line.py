"""What stands on the command line of a verb: words, flags of its own, and flags of the recipe."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from titan_async.errors import UserError

__all__ = ["CommandLine", "parse"]

_MOST_DIGITS = 18

D = TypeVar("D", int, None)


@dataclass(frozen=True)
class CommandLine:
    """A command line, taken apart."""

    verb: str
    words: list[str] = field(default_factory=list)
    """What belongs to no flag; of a verb that takes a recipe's flags, what comes before all of these."""
    values: dict[str, str | None] = field(default_factory=dict)
    """The verb's own flags that were given, without dashes; None for one without a value."""
    recipe_flags: list[str] = field(default_factory=list)
    """The other flags with their values, for `resolve_recipe`."""

    def value(self, flag: str) -> str | None:
        """What was given with a flag; None if it was not."""
        return self.values.get(flag)

    def whole(self, flag: str, default: D, *, least: int = 1, most: int | None = None) -> int | D:
        """A flag's value as a number, `default` if it was not given.

        Raises:
            UserError: it is no whole number from `least` on, or above `most`.
        """
        text = self.values.get(flag)
        if text is None:
            return default
        if not re.fullmatch(rf"\d{{1,{_MOST_DIGITS}}}", text) or int(text) < least:
            raise UserError(f"--{flag} must be a whole number from {least} on, not {text}")
        if most is not None and int(text) > most:
            raise UserError(f"--{flag} is {text}: set it to at most {most}")
        return int(text)


def parse(
    verb: str,
    argv: Sequence[str],
    flags: Collection[str],
    *,
    switches: Collection[str] = (),
    optional: Collection[str] = (),
    recipe: bool = False,
) -> CommandLine:
    """Takes a command line apart; flags may stand anywhere.

    Args:
        verb: for messages.
        argv: what follows it.
        flags: of the verb, without dashes, that have a value each.
        switches: those that have none.
        optional: those that may have one.
        recipe: whether other flags are a recipe's, and not mistakes.

    Raises:
        UserError: a flag has no value, or one too many, comes twice, or is unknown.
    """
    line = CommandLine(verb)
    own = (*flags, *switches, *optional)
    left = list(argv)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        flag = name.removeprefix("--")
        if not (word.startswith("--") and flag in own):
            if not word.startswith("-") and not line.recipe_flags:
                line.words.append(word)
            else:
                _refuse_unknown(name, verb, own, recipe)
                line.recipe_flags.append(word)
            continue
        if flag in line.values:
            raise UserError(f"{name} is given twice: keep one")
        follows = bool(left) and left[0].removeprefix("--").partition("=")[0] not in own
        if flag in switches:
            if equals:
                raise UserError(f"{name} takes no value, as in titan-async {verb} --help")
            line.values[flag] = None
        elif equals and value:
            line.values[flag] = value
        elif flag in flags and (equals or not follows):
            raise UserError(f"{name} needs a value, as in titan-async {verb} --help")
        else:
            takes = flag in flags or (follows and not left[0].startswith("--"))
            line.values[flag] = left.pop(0) if takes else None
    return line


def _refuse_unknown(name: str, verb: str, own: Sequence[str], recipe: bool) -> None:
    from titan_async.config.suggestions import nearest

    known = [f"--{flag}" for flag in own]
    if recipe:
        close = nearest(name, [*known, "--module"], cutoff=0.8) if name.startswith("--") else None
        if close and close != name and "." not in name:
            raise UserError(f"unknown flag {name}; did you mean {close}?")
        return
    close = nearest(name, [*known, "--help"])
    hint = f"did you mean {close}?" if close else f"there are {', '.join([*known, '--help'])}"
    raise UserError(f"unknown flag {name} of titan-async {verb}; {hint}")
