"""Splits the command line of `titan-async train` into a recipe file, options, and flags that set fields.

Flags are spelled as in torchtitan: `--training.steps 300`, `--training.steps=300`, dashes or underscores,
`--compile.enable` and `--compile.no-enable`, lists as `model,loss`. `field_values.from_flag` converts the
words after a flag by the type of the field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_async.config.field_values import MAX_DEPTH
from titan_async.config.suggestions import nearest
from titan_async.config.toml_file import Path, dotted
from titan_async.errors import UserError

__all__ = ["Arguments", "Flag", "parse_arguments"]

_SUBCOMMAND = re.compile(r"([a-z][a-z_-]*):([a-z][a-z_-]*)")
"""torchtitan's spelling of a choice among classes: `activation_checkpoint:full`."""


@dataclass(frozen=True)
class Flag:
    """A flag that sets a field of the configuration."""

    flag: str
    """As typed, without its value."""
    words: list[str]
    """The words after it, up to the next flag."""

    @property
    def path(self) -> Path:
        return tuple(self.flag.removeprefix("--").replace("-", "_").split("."))

    @property
    def table(self) -> dict[str, Any]:
        """The words, nested in a table for each key, as in a recipe file."""
        value: Any = self.words
        for key in reversed(self.path):
            value = {key: value}
        return value

    def name(self, path: Path) -> str:
        return "--" + dotted(path)

    def error(self, path: Path, message: str) -> UserError:
        return UserError(message)


@dataclass(frozen=True)
class Arguments:
    """A command line, split."""

    recipe_file: str
    module: str | None = None
    """`--module`: the Python module of the recipe function, if it is not one of the project's."""
    dry_run: bool = False
    """`--dry-run`: print the configuration instead of training."""
    flags: list[Flag] = field(default_factory=list)


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parses `RECIPE.toml [--flag value ...]`.

    Raises:
        UserError: the first argument is not a recipe file, a word belongs to no flag, or `--module` has no
            value.
    """
    if not argv or (argv[0].startswith("-") and argv[0] != "-"):
        what = f"not {argv[0]}" if argv else "as in titan-async train debug_cpu.toml"
        raise UserError(f"the first argument must be a recipe file (.toml), {what}")
    module, dry_run, flags = None, False, []
    for flag in _split(argv[1:]):
        name, words = flag.flag, flag.words
        if name == "--module":
            if len(words) != 1:
                raise UserError("--module takes one value: the Python module of the recipe")
            module = words[0]
        elif name in ("--dry-run", "--dry_run"):
            if words:
                raise UserError(f"--dry-run takes no value, not {words[0]}")
            dry_run = True
        elif name == "--live":
            raise UserError(
                "--live takes no value, and requires that titan-async train starts the processes; otherwise "
                "use titan-async watch RUN_DIR in another terminal"
            )
        elif len(flag.path) > MAX_DEPTH:
            raise UserError(f"unknown flag {name[:60]}...; no field is nested so deeply")
        elif close := nearest(name, ("--dry-run", "--module", "--live"), cutoff=0.8):
            raise UserError(f"unknown flag {name}; did you mean {close}?")
        else:
            flags.append(flag)
    # A class must be selected before its fields are set, regardless of the order of the flags. The sort is
    # stable, so the last of several equal flags overrides the others.
    flags.sort(key=lambda flag: (len(flag.path), flag.path[-1] != "mode"))
    return Arguments(recipe_file=argv[0], module=module, dry_run=dry_run, flags=flags)


def _split(argv: Sequence[str]) -> list[Flag]:
    flags: list[Flag] = []
    closed = True  # whether the last flag already has its value, after "="
    for word in argv:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word.partition("=")
            flags.append(Flag(name, [value] if equals else []))
            closed = bool(equals)
        elif re.match(r"-[A-Za-z]", word):
            raise UserError(f"unknown flag {word}; flags start with two dashes")
        elif (closed or flags[-1].words) and (choice := _SUBCOMMAND.fullmatch(word)):
            flags.append(Flag(f"--{choice[1]}", [choice[2]]))
            closed = True
        elif closed:
            raise UserError(f"unexpected argument {word}; every field is set by --section.key value")
        else:
            flags[-1].words.append(word)
    return flags
