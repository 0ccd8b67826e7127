"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest", "unknown_name"]


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the candidate most similar to `word`, or None if none is similar."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def unknown_name(field: str, value: str, known: Iterable[str]) -> str:
    """Returns the message for a value that is not a known name, with a similar name if there is one."""
    known = list(known)
    lowered = {name.lower(): name for name in known}
    close = nearest(value.lower(), lowered, cutoff=0.4)
    hint = f"; did you mean {lowered[close]}?" if close else ""
    return f'{field} is "{value}", which is none of {", ".join(known)}{hint}'
