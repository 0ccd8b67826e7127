"""Splits the command line of `titan-async train` into a recipe file, options and edits.

Flags are spelled as in torchtitan: `--training.steps 300`, `--training.steps=300`, dashes or
underscores, `--compile.enable` and `--compile.no-enable`, lists as `model,loss`. What the words
after a flag mean is decided later, by the type of the field (`values.from_words`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_async.config.suggestions import Edit, FlagOrigin, nearest
from titan_async.config.toml_values import MOST_NESTED
from titan_async.errors import UserError

__all__ = ["Arguments", "parse_arguments"]

_SUBCOMMAND = re.compile(r"([a-z][a-z_-]*):([a-z][a-z_-]*)")
"""torchtitan's spelling of a choice among classes: `activation_checkpoint:full`."""


@dataclass(frozen=True)
class Arguments:
    """What the command line says."""

    recipe_file: str
    module: str | None = None
    """`--module`: where the recipe function is, if it is not one of the project's."""
    dry_run: bool = False
    """`--dry-run`: print the configuration instead of training."""
    edits: list[Edit] = field(default_factory=list)


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parses `RECIPE.toml [--flag value ...]`.

    Raises:
        UserError: the recipe file is missing or not first, a word belongs to no flag, or `--module`
            has no value.
    """
    if not argv or (argv[0].startswith("-") and argv[0] != "-"):
        what = f"not {argv[0]}" if argv else "as in titan-async train debug_cpu.toml"
        raise UserError(f"the first argument must be a recipe file (.toml), {what}")
    module, dry_run, edits = None, False, []
    for flag, words in _split(argv[1:]):
        if flag == "--module":
            if len(words) != 1:
                raise UserError("--module takes one value: the Python module of the recipe")
            module = words[0]
        elif flag in ("--dry-run", "--dry_run"):
            if words:
                raise UserError(f"--dry-run takes no value, not {words[0]}")
            dry_run = True
        elif flag == "--live":
            raise UserError(
                "--live is for titan-async train where it starts the processes itself, and takes no value; "
                "elsewhere use titan-async watch RUN_DIR in another terminal"
            )
        else:
            path = tuple(flag[2:].replace("-", "_").split("."))
            origin = FlagOrigin(flag=flag)
            if len(path) > MOST_NESTED:
                raise UserError(f"unknown flag {flag[:60]}...; no setting lies so deep")
            close = nearest(flag, ("--dry-run", "--module", "--live"), cutoff=0.8)
            if close:
                raise UserError(f"unknown flag {flag}; did you mean {close}?")
            edits.append(Edit(path=path, value=words, origin=origin))
    # A choice among classes comes before the fields of the chosen class, in whatever order they were
    # typed; the sort is stable, so of two equal flags the last still wins.
    edits.sort(key=lambda edit: (len(edit.path), edit.path[-1] != "mode"))
    return Arguments(recipe_file=argv[0], module=module, dry_run=dry_run, edits=edits)


def _split(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    flags: list[tuple[str, list[str]]] = []
    closed = True  # whether the last flag has its value already, by "="
    for word in argv:
        if re.match(r"--[A-Za-z]", word):
            flag, equals, value = word.partition("=")
            flags.append((flag, [value] if equals else []))
            closed = bool(equals)
        elif re.match(r"-[A-Za-z]", word):
            raise UserError(f"unknown flag {word}; flags start with two dashes")
        elif (closed or flags[-1][1]) and (choice := _SUBCOMMAND.fullmatch(word)):
            flags.append((f"--{choice[1]}", [choice[2]]))
            closed = True
        elif not closed:
            flags[-1][1].append(word)
        else:
            raise UserError(f"unexpected argument {word}; every setting is written --section.key value")
    return flags
