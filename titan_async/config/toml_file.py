"""Reads recipe files: TOML text, the files they include, and the line of any key.

Nothing here knows what the keys mean; `editor` does. `tomllib` keeps no positions, so the
line of a key is found only when a message needs it, by parsing prefixes of the text.
"""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from dataclasses import dataclass, field
from typing import Any

from titan_async.config.edit import Edit, Path, dotted, nearest
from titan_async.config.recipe_list import recipe_files
from titan_async.config.toml_values import check_value, parse_toml
from titan_async.errors import UserError
from titan_async.file_io import read_regular_file

__all__ = ["RecipeSource", "TomlFile", "read_recipe_file", "read_toml"]

_MOST_BYTES = 2**18
"""Of a recipe file; those of the project have about a thousand."""

_MOST_PARSED = 2**23
"""Characters that may be parsed to find a line."""

_MOST_INCLUDES = 32
"""Files that include each other in a row."""


@dataclass(frozen=True)
class TomlFile:
    """A parsed TOML file; as an `Origin` it words errors as `file:line: message`."""

    name_shown: str
    text: str
    data: dict[str, Any] = field(repr=False)
    lax: bool = False

    def name(self, path: Path) -> str:
        return dotted(path)

    def unknown(self, path: Path, suggestion: Path | None, *, is_section: bool) -> UserError:
        what = "section" if is_section else "key"
        hint = f"; did you mean {dotted(suggestion)}?" if suggestion else ""
        return self.error(path, f"unknown {what} {dotted(path)}{hint}")

    def error(self, path: Path, message: str) -> UserError:
        line = self.line_of(path)
        return UserError(f"{self.name_shown}:{line}: {message}")

    def line_of(self, path: Path) -> int:
        """Returns the number of the line on which the key at `path` is first written (1 if absent)."""
        lines = self.text.split("\n")
        # The longest prefix known to be TOML by itself and to lack the key, and where to look no further.
        without, within, found = 0, len(lines) + 1, False
        parsed = 0
        while without + 1 < within:
            middle, data = (without + within) // 2, None
            for end in range(middle, within):
                prefix = "\n".join(lines[:end]) + "\n"
                parsed += len(prefix)
                if parsed > _MOST_PARSED:
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
        raw = read_regular_file(path, _MOST_BYTES)
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
        # A byte order mark is what some editors leave; TOML does not allow it, but it harms nothing.
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
    """What a recipe file and the files it includes say."""

    path: str
    recipe: str | None
    """The name of the recipe function, of the outermost file that gives one."""
    recipe_file: TomlFile
    """The file that names the recipe."""
    edits: list[Edit]
    """Base files' edits first: a later one wins."""


def read_recipe_file(path: str) -> RecipeSource:
    """Reads a recipe file and, first, the files it includes.

    A bare name that is no file in its folder is that of one of the project's recipe files.

    Raises:
        UserError: for what `read_toml` refuses, a cycle of includes, or a `recipe` or `include` that
            is not a string.
    """
    return _read(_or_own(path, named=path), including=())


def _or_own(path: str, *, named: str) -> str:
    """The project's recipe file called `named`, where there is nothing at `path`."""
    if os.path.exists(path) or named not in recipe_files():
        return path
    return str(recipe_files()[named])


def _read(path: str, *, including: tuple[str, ...]) -> RecipeSource:
    file = read_toml(path)
    data = dict(file.data)
    recipe = _pop_string(file, data, "recipe")
    if "module" in data:
        raise file.error(("module",), "module names code to import; give it as the flag --module")
    include = _pop_string(file, data, "include")
    edits: list[Edit] = []
    recipe_file = file
    if include is not None:
        base_path = os.path.normpath(os.path.join(os.path.dirname(path), include))
        base_path = _or_own(base_path, named=include)
        real = os.path.realpath(base_path)
        chain = (*including, os.path.realpath(path))
        if real in chain:
            raise file.error(("include",), f"{include} includes this file again; remove one of the includes")
        if len(chain) > _MOST_INCLUDES:
            raise file.error(
                ("include",), f"{_MOST_INCLUDES} files include each other in a row; put them into fewer"
            )
        if not os.path.exists(base_path):
            raise file.error(("include",), f"the included file {base_path} does not exist")
        base = _read(base_path, including=chain)
        edits += base.edits
        if recipe is None:
            recipe, recipe_file = base.recipe, base.recipe_file
    edits += [Edit(path=(key,), value=value, origin=file) for key, value in data.items()]
    return RecipeSource(path=path, recipe=recipe, recipe_file=recipe_file, edits=edits)


def _pop_string(file: TomlFile, data: dict[str, Any], key: str) -> str | None:
    value = data.pop(key, None)
    if value is not None and not isinstance(value, str):
        raise file.error((key,), f'{key} must be a string, as in {key} = "..."')
    try:
        check_value(value)
    except ValueError as error:
        raise file.error((key,), f"{key} {error}") from None
    return value
