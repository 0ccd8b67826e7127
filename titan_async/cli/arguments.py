"""Words and flags of verbs that take no recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence

from titan_async.errors import UserError

__all__ = ["Arguments", "step_range"]


class Arguments:
    """A command line of words and of flags with a value each, in any order.

    Args:
        verb: for messages.
        argv: what follows it.
        flags: that it knows.

    Raises:
        UserError: for another flag, one that is given twice, or one without a value.
    """

    def __init__(self, verb: str, argv: Sequence[str], flags: Sequence[str]) -> None:
        self.words: list[str] = []
        self._values: dict[str, str] = {}
        left = list(argv)
        while left:
            word = left.pop(0)
            name, equals, value = word.partition("=")
            if not word.startswith("-"):
                self.words.append(word)
                continue
            if name not in flags:
                from titan_async.training.edit import nearest

                close = nearest(name, [*flags, "--help"])
                hint = f"did you mean {close}?" if close else f"there are {', '.join(flags)} and --help"
                raise UserError(f"unknown flag {name} of titan-async {verb}; {hint}")
            if not equals:
                value = left.pop(0) if left and not left[0].startswith("-") else ""
            if not value:
                raise UserError(f"{name} needs a value, as in titan-async {verb} --help")
            if name in self._values:
                raise UserError(f"{name} is given twice: keep one")
            self._values[name] = value

    def value(self, flag: str) -> str | None:
        """What was given with a flag; None if it was not."""
        return self._values.get(flag)


def step_range(text: str | None, there: range, latest: int) -> range:
    """The steps that "A-B", "A-" or "A" mean.

    Args:
        text: as the user wrote it; None for the `latest`.
        there: steps that can be had; the range may name others.
        latest: how many without `text`.

    Raises:
        UserError: if it is none of these.
    """
    if text is None:
        return there[-latest:]
    match = re.fullmatch(r"([1-9]\d{0,9})(-(\d{0,10}))?", text)
    if match is None:
        raise UserError(f"--steps is {text}: write A-B, A- or A, for example 10-12")
    first = int(match[1])
    last = first if match[2] is None else int(match[3]) if match[3] else max(first, there.stop - 1)
    if last < first:
        raise UserError(f"--steps is {text}: its first step is after its last")
    return range(first, last + 1)
