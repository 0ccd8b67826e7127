"""One change to a configuration, and where the user wrote it.

Recipe files and command-line flags both become lists of `Edit`, so that one place
(`editor`) judges names and values, and every message still points at what was typed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_async.errors import UserError

__all__ = ["Edit", "FlagOrigin", "Origin", "Path", "dotted", "nearest", "unknown_name"]

Path = tuple[str | int, ...]
"""Keys from the root of the configuration; an integer indexes a list."""


def dotted(path: Sequence[str | int]) -> str:
    """Returns a path as users write it: ("optimizer", "param_groups", 0) -> "optimizer.param_groups.0"."""
    return ".".join(str(key) for key in path)


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the candidate most like `word`, or None when none is alike."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def unknown_name(field: str, value: str, known: Iterable[str]) -> str:
    """Returns the sentence about a value that is none of the known names, with the one that was meant."""
    known = list(known)
    lowered = {name.lower(): name for name in known}
    close = nearest(value.lower(), lowered, cutoff=0.4)
    hint = f"; did you mean {lowered[close]}?" if close else ""
    return f'{field} is "{value}", which is none of {", ".join(known)}{hint}'


class Origin(Protocol):
    """Where an edit was written; it words the errors about it."""

    lax: bool
    """Whether values are strings to be parsed (flags) rather than typed values (TOML)."""

    def name(self, path: Path) -> str:
        """Returns how the user spells this path."""
        ...

    def unknown(self, path: Path, suggestion: Path | None, *, is_section: bool) -> UserError:
        """Returns the error for a path that does not exist."""
        ...

    def error(self, path: Path, message: str) -> UserError:
        """Returns an error that points at this path."""
        ...


@dataclass(frozen=True)
class Edit:
    """Set the field at `path` to `value`; a dict sets the fields of a section one by one."""

    path: Path
    value: object
    origin: Origin


@dataclass(frozen=True)
class FlagOrigin:
    """An edit that came from a command-line flag."""

    flag: str
    """The flag as typed, without its value."""

    lax: bool = True

    def name(self, path: Path) -> str:
        return "--" + dotted(path)

    def unknown(self, path: Path, suggestion: Path | None, *, is_section: bool) -> UserError:
        hint = f"; did you mean {self.name(suggestion)}?" if suggestion else ""
        return UserError(f"unknown flag {self.flag}{hint}")

    def error(self, path: Path, message: str) -> UserError:
        return UserError(message)
