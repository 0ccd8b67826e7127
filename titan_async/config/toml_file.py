"""Reads recipe files: TOML, the files that it includes, and the line of a key.

`overrides` interprets the keys. `tomllib` keeps no positions, so the line of a key is found by parsing
prefixes of the text, only when a message needs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_async.config.field_values import check_value, parse_toml
from titan_async.config.recipe_list import recipe_files
from titan_async.config.suggestions import nearest
from titan_async.errors import UserError
from titan_async.file_io import read_regular_file

__all__ = ["Path", "RecipeSource", "TomlFile", "dotted", "read_recipe_file", "read_toml"]

Path = tuple[str | int, ...]
"""Keys from the root of a configuration to a field; an integer is the index of a list."""

_MAX_BYTES = 2**18
"""Maximum size of a recipe file; those of the project have about a thousand bytes."""

_MAX_PARSED = 2**23
"""Characters that may be parsed to find a line."""

_MAX_INCLUDES = 32
"""Maximum length of a chain of includes."""


def dotted(path: Sequence[str | int]) -> str:
    """Returns a path as users write it: ("optimizer", "param_groups", 0) is optimizer.param_groups.0."""
    return ".".join(str(key) for key in path)


@dataclass(frozen=True)
class TomlFile:
    """A parsed TOML file. Errors about its keys start with file and line."""

    name_shown: str
    text: str
    data: dict[str, Any] = field(repr=False)

    def name(self, path: Path) -> str:
        return dotted(path)

    def error(self, path: Path, message: str) -> UserError:
        return UserError(f"{self.name_shown}:{self.line_of(path)}: {message}")

    def line_of(self, path: Path) -> int:
        """Returns the number of the line on which the key at `path` is first written (1 if absent)."""
        lines = self.text.split("\n")
        # The longest prefix that is valid TOML without the key, and the shortest one known to contain it.
        without, within, found = 0, len(lines) + 1, False
        parsed = 0
        while without + 1 < within:
            middle, data = (without + within) // 2, None
            for end in range(middle, within):
                prefix = "\n".join(lines[:end]) + "\n"
                parsed += len(prefix)
                if parsed > _MAX_PARSED:
                    return 1
                with contextlib.suppress(tomllib.TOMLDecodeError):  # of a value that spans lines
                    data = tomllib.loads(prefix)
                    break
            if data is not None and not _contains(data, path):
                without = end
            else:
                found, within = found or data is not None, middle
        return without + 1 if found else 1


def _contains(data: Any, path: Path) -> bool:
    for key in path:
        if isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        elif isinstance(data, dict) and str(key) in data:
            data = data[str(key)]
        else:
            return False
    return True


def read_toml(path: str) -> TomlFile:
    """Reads one TOML file.

    Raises:
        UserError: the file is missing, is a directory or a pipe, is too large, cannot be read, is not UTF-8
            or not TOML.
    """
    try:
        raw = read_regular_file(path, _MAX_BYTES)
    except FileNotFoundError:
        ours = {name.removesuffix(".toml") for name in recipe_files()}
        close = nearest(os.path.basename(path).removesuffix(".toml"), ours, cutoff=0.7)
        hint = f"; did you mean {close}.toml, which comes with titan_async?" if close else ""
        raise UserError(f"{path}: no such file{hint}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: this is a directory; name a recipe file (.toml)") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read: {reason}; name a recipe file (.toml)") from None
    try:
        # Some editors write a byte order mark, which TOML does not allow.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
    text = text.replace("\r\n", "\n")
    try:
        data = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, error) from None
    except ValueError as error:
        raise UserError(f"{path}: not a recipe file: one of its values {error}") from None
    return TomlFile(name_shown=path, text=text, data=data)


def _syntax_error(path: str, text: str, error: tomllib.TOMLDecodeError) -> UserError:
    message = str(error)
    position = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if position:
        line, message = int(position[1]), message[: position.start()]
    else:
        line = text.rstrip("\n").count("\n") + 1
        message = message.removesuffix(" (at end of document)") + " at the end of the file"
    return UserError(f"{path}:{line}: not valid TOML: {message[:1].lower() + message[1:]}")


@dataclass(frozen=True)
class RecipeSource:
    """A recipe file and the files that it includes."""

    path: str
    recipe: str | None
    """The name of the recipe function, of the outermost file that gives one."""
    recipe_file: TomlFile
    """The file that names the recipe."""
    tables: list[tuple[TomlFile, dict[str, Any]]]
    """The files with their keys, included ones first: later ones override earlier ones."""


def read_recipe_file(path: str) -> RecipeSource:
    """Reads a recipe file and the files that it includes.

    If `path` does not exist and is a bare name, it is looked up among the project's recipe files.

    Raises:
        UserError: `read_toml` raises, files include each other in a cycle, or `recipe` or `include` is not a
            string.
    """
    return _read(_existing_or_own(path, named=path), including=())


def _existing_or_own(path: str, *, named: str) -> str:
    """Returns `path`, or the project's recipe file called `named` if `path` does not exist."""
    if os.path.exists(path) or named not in recipe_files():
        return path
    return str(recipe_files()[named])


def _read(path: str, *, including: tuple[str, ...]) -> RecipeSource:
    file = read_toml(path)
    data = dict(file.data)
    recipe, include = (_pop_string(file, data, key) for key in ("recipe", "include"))
    if "module" in data:
        raise file.error(("module",), "module names code to import; give it as the flag --module")
    if include is None:
        return RecipeSource(path, recipe, file, [(file, data)])
    base_path = os.path.normpath(os.path.join(os.path.dirname(path), include))
    base_path = _existing_or_own(base_path, named=include)
    chain = (*including, os.path.realpath(path))
    problem = None
    if os.path.realpath(base_path) in chain:
        problem = f"{include} includes this file again; remove one of the includes"
    elif len(chain) > _MAX_INCLUDES:
        problem = f"the chain of includes has more than {_MAX_INCLUDES} files; merge some of them"
    elif not os.path.exists(base_path):
        problem = f"the included file {base_path} does not exist"
    if problem:
        raise file.error(("include",), problem)
    base = _read(base_path, including=chain)
    recipe, recipe_file = (base.recipe, base.recipe_file) if recipe is None else (recipe, file)
    return RecipeSource(path, recipe, recipe_file, [*base.tables, (file, data)])


def _pop_string(file: TomlFile, data: dict[str, Any], key: str) -> str | None:
    value = data.pop(key, None)
    if value is not None and not isinstance(value, str):
        raise file.error((key,), f'{key} must be a string, as in {key} = "..."')
    try:
        check_value(value)
    except ValueError as error:
        raise file.error((key,), f"{key} {error}") from None
    return value
