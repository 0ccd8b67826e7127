"""Ranges of steps, as users write them."""

from __future__ import annotations

import re

from titan_async.errors import UserError

__all__ = ["step_range"]


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
