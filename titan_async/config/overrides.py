"""Sets fields of a configuration to the values that recipe files and flags give them.

A configuration is a tree of dataclasses. The fields of a copy are assigned one by one; then each dataclass
that changed is constructed again, from the leaves to the root. So `__post_init__` validates final values
only: two keys that are valid together do not fail because one is set before the other.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from titan_async.config import field_values
from titan_async.config.field_values import NONE_WORD, format_value, plain, union_members
from titan_async.config.flags import Flag
from titan_async.config.suggestions import nearest
from titan_async.config.toml_file import Path, TomlFile, dotted
from titan_async.errors import UserError

__all__ = ["MODE", "apply_overrides", "choices_of", "field_types", "is_config", "is_settable"]

MODE = "mode"
"""The key that selects a class of a union, as `activation_checkpoint.mode` does."""

Table = tuple[TomlFile, Mapping[str, Any]]
"""A recipe file, and the keys that it sets."""


def apply_overrides(config: Any, files: Sequence[Table], flags: Sequence[Flag], *, shown: str) -> Any:
    """Returns a copy of `config` with other values; `config` itself is not changed.

    Args:
        config: a dataclass instance whose fields are values, lists, dicts and further dataclasses.
        files: recipe files with their keys. Later ones override earlier ones.
        flags: override the files.
        shown: the file that errors about combinations of fields are attributed to.

    Raises:
        UserError: a key does not exist, a value is of the wrong type, or values do not fit together.
    """
    root, changed = _copied(config), _Changed()
    for source, table in [*files, *((flag, flag.table) for flag in flags)]:
        _Overrides(root, source, changed).set_section(root, (), table)
    return changed.rebuilt(root, shown)


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Returns the type hints of a dataclass's fields, with their markers, in the order of the fields."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:  # an annotation that names something local to a function
        hints = {}
    return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(cls) if field.init}


def is_settable(name: str, hint: Any) -> bool:
    """Returns whether users may set a field: it is neither private nor suppressed by tyro."""
    if name.startswith("_") or name == "model_spec":
        return False
    if typing.get_origin(hint) is not typing.Annotated:
        return True
    import tyro

    suppress = typing.get_args(tyro.conf.Suppress[int])[1:]
    return not any(marker in suppress for marker in typing.get_args(hint)[1:])


def choices_of(hint: Any) -> dict[str, type | None]:
    """Returns the classes of a union of dataclasses by their names, {} for any other type."""
    choices: dict[str, type | None] = {}
    for member in union_members(hint):
        cls = plain(member)
        if cls is type(None):
            choices[NONE_WORD] = None
        elif dataclasses.is_dataclass(cls):
            markers = typing.get_args(member)[1:] if cls is not member else ()
            names = [name for marker in markers if isinstance(name := getattr(marker, "name", None), str)]
            choices[(names or [cls.__qualname__])[0].replace("-", "_")] = cls
        else:
            return {}
    return choices if len(choices) > 1 else {}


def is_config(value: object) -> bool:
    """Returns whether a value is an instance of a dataclass: a section of the configuration."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _item_class(hint: Any) -> type | None:
    """Returns X for list[X] with X a dataclass."""
    if typing.get_origin(plain(hint)) is not list:
        return None
    item = plain(typing.get_args(plain(hint))[0])
    return item if dataclasses.is_dataclass(item) else None


def _copied(value: Any) -> Any:
    """Returns a copy of a tree of dataclasses, without running `__post_init__`."""
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if not is_config(value):
        return value
    result = copy.copy(value)
    for name in field_types(type(value)):
        if name != "model_spec":
            object.__setattr__(result, name, _copied(getattr(value, name)))
    return result


def _settable_paths(config: Any, prefix: Path = ()) -> Iterator[Path]:
    for name, hint in field_types(type(config)).items():
        if not is_settable(name, hint):
            continue
        yield (*prefix, name)
        value = getattr(config, name, None)
        if is_config(value):
            yield from _settable_paths(value, (*prefix, name))
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if is_config(item):
                yield from _settable_paths(item, (*prefix, name, index))
        if len(choices_of(hint)) > 2:
            yield (*prefix, name, MODE)


class _Changed:
    """The dataclasses that overrides have changed or created."""

    def __init__(self) -> None:
        self._by_id: dict[int, Any] = {}
        self._created: dict[int, tuple[TomlFile | Flag, Path]] = {}

    def add(self, config: Any) -> None:
        self._by_id[id(config)] = config

    def create(self, cls: type, source: TomlFile | Flag, path: Path) -> Any:
        """Returns an instance with its defaults; a field without one is absent until it is set."""
        config = object.__new__(cls)
        for field in dataclasses.fields(cls):
            if field.default is not dataclasses.MISSING:
                object.__setattr__(config, field.name, field.default)
            elif field.default_factory is not dataclasses.MISSING:
                object.__setattr__(config, field.name, field.default_factory())
        self.add(config)
        self._created[id(config)] = source, path
        return config

    def rebuilt(self, value: Any, shown: str) -> Any:
        """Returns a tree in which the changed dataclasses are constructed again, the inner ones first."""
        if isinstance(value, list):
            return [self.rebuilt(item, shown) for item in value]
        if id(value) not in self._by_id:
            return value
        names = list(field_types(type(value)))
        missing = [name for name in names if not hasattr(value, name)]
        if missing:
            source, path = self._created[id(value)]
            raise source.error(path, f"{source.name(path)} lacks {', '.join(missing)}")
        fields = {name: self.rebuilt(getattr(value, name), shown) for name in names}
        try:
            return dataclasses.replace(value, **fields)
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise UserError(f"{shown}: {' '.join(str(error).split())}") from error


class _Overrides:
    """Assigns the fields that one file or one flag sets."""

    def __init__(self, root: Any, source: TomlFile | Flag, changed: _Changed) -> None:
        self._root = root
        self._source = source
        self._changed = changed

    def set_section(self, config: Any, path: Path, table: Mapping[str, Any]) -> None:
        """Sets fields of the dataclass at `path`."""
        self._changed.add(config)
        for key, value in table.items():
            name, value = self._field(config, path, key, value)
            new = self._new_value(config, name, (*path, name), value)
            object.__setattr__(config, name, new)

    def _field(self, config: Any, prefix: Path, key: str, value: Any) -> tuple[str, Any]:
        """Returns the field that a key names, and its value: `--compile.no-enable` is enable = false."""
        hints, path = field_types(type(config)), (*prefix, key)
        if key in hints and is_settable(key, hints[key]):
            return key, value
        if path == ("model_spec",):
            raise self._error(path, "is the model itself and cannot be set; choose another recipe")
        if key in hints and not key.startswith("_"):
            raise self._error(path, "cannot be set here; choose another recipe")
        positive = key.removeprefix("no_")
        is_negation = positive != key and hints.get(positive) is bool
        if is_negation and isinstance(self._source, Flag) and not value:
            return positive, ["false"]
        raise self._unknown(config, path, is_section=isinstance(value, Mapping))

    def _new_value(self, config: Any, name: str, path: Path, value: Any) -> Any:
        hint, current = field_types(type(config))[name], getattr(config, name, None)
        if path == ("override", "imports") and isinstance(self._source, TomlFile):
            raise self._error(path, "names code to run, which a recipe file may not do; give it as the flag "
                              "--override.imports")  # fmt: skip
        choices = choices_of(hint)
        if is_config(current) or choices:
            return self._section(current, choices, path, value)
        if cls := _item_class(hint):
            return self._list(current or [], cls, path, value)
        if typing.get_origin(plain(hint)) is dict:
            return self._merged(current, path, value, typing.get_args(plain(hint))[1])
        if isinstance(value, Mapping) and isinstance(self._source, Flag):
            raise self._unknown(config, path)
        return self._converted(hint, path, value)

    def _section(self, current: Any, choices: Mapping[str, type | None], path: Path, value: Any) -> Any:
        """Returns a dataclass with the fields of the table `value` set, or one of the class it names."""
        if not isinstance(value, Mapping):
            if choices:
                return self._chosen(current, choices, path, value)
            written = " ".join(value) if isinstance(self._source, Flag) else value
            raise self._error(path, f"is a section, and cannot be set to a value ({format_value(written)})")
        mode = self._source.name((*path, MODE))
        if len(choices) > 2 and MODE in value:
            current = self._chosen(current, choices, (*path, MODE), value[MODE])
            value = {key: item for key, item in value.items() if key != MODE}
        if current is None:
            classes = {word: cls for word, cls in choices.items() if cls is not None}
            if len(classes) > 1:
                if not value:
                    return None
                options = ", ".join(f'"{word}"' for word in classes)
                where = self._source.path if isinstance(self._source, Flag) else path
                raise self._error(where, f'has no use while {mode} is "{NONE_WORD}"; set {mode} to one of '
                                  f"{options}")  # fmt: skip
            current = self._changed.create(next(iter(classes.values())), self._source, path)
        for key in value:
            owners = [word for word, cls in choices.items() if cls and key in field_types(cls)]
            if owners and key not in field_types(type(current)):
                raise self._error((*path, key), f'belongs to {mode} "{owners[0]}", which is not set')
        self.set_section(current, path, value)
        return current

    def _chosen(self, current: Any, choices: Mapping[str, type | None], path: Path, value: Any) -> Any:
        """Returns an instance of the class that `value` names: `current`, if it is one."""
        word = value[0] if isinstance(value, list) and len(value) == 1 else value
        key = word.replace("-", "_").lower() if isinstance(word, str) else None
        if key not in choices:
            options = ", ".join(f'"{choice}"' for choice in choices)
            raise self._error(path, f"must be one of {options}, not {format_value(word)}")
        cls = choices[key]
        if cls is None or type(current) is cls:
            return current if cls else None
        return self._changed.create(cls, self._source, path)

    def _list(self, items: list[Any], cls: type, path: Path, value: Any) -> list[Any]:
        """Returns a list of dataclasses: new ones, or `items` with fields set that are named by index."""
        if isinstance(value, list) and all(isinstance(table, Mapping) for table in value):
            items = [self._changed.create(cls, self._source, (*path, index)) for index in range(len(value))]
            value = dict(enumerate(value))
        if not isinstance(value, Mapping):
            raise self._error(path, f"is a list of tables: in the file, write [[{dotted(path)}]]")
        for key, table in value.items():
            index = int(key) if str(key).isdigit() else len(items)
            if index >= len(items):
                have = f"there are {len(items)}, counted from 0" if items else "there is none"
                raise self._error((*path, key), f"does not exist: {have}")
            if not isinstance(table, Mapping):
                raise self._error((*path, index), "is a section: set its keys one by one")
            self.set_section(items[index], (*path, index), table)
        return items

    def _merged(self, current: Any, path: Path, value: Any, hint: Any) -> dict[Any, Any]:
        """Returns a dict with the keys of the table `value` set, at any depth."""
        if not isinstance(value, Mapping):
            raise self._error(path, f"must be a table, not {format_value(value)}")
        merged = dict(current) if isinstance(current, Mapping) else {}
        inner = typing.get_args(plain(hint))[1] if typing.get_origin(plain(hint)) is dict else None
        for key, item in value.items():
            if isinstance(item, Mapping) or inner:
                merged[key] = self._merged(merged.get(key), (*path, key), item, inner or Any)
            else:
                merged[key] = self._converted(hint, (*path, key), item, current=merged.get(key))
        return merged

    def _converted(self, hint: Any, path: Path, value: Any, current: object = None) -> Any:
        is_toml = isinstance(self._source, TomlFile)
        try:
            if path == ("override", "imports"):
                from torchtitan.config.override import parse_cli_imports

                return parse_cli_imports(value)
            if plain(hint) is Any:
                convert = field_values.untyped_from_toml if is_toml else field_values.untyped_from_flag
                return convert(current, value)
            return (field_values.from_toml if is_toml else field_values.from_flag)(hint, value)
        except ValueError as error:
            raise self._error(path, str(error)) from None

    def _error(self, path: Path, message: str) -> UserError:
        return self._source.error(path, f"{self._source.name(path)} {message}")

    def _unknown(self, config: Any, path: Path, *, is_section: bool = False) -> UserError:
        """Returns the error for the last key of `path`, which `config` does not have."""
        what, full = f"{'section' if is_section else 'key'} {dotted(path)}", path
        if isinstance(self._source, Flag):
            what, full = f"flag {self._source.flag}", self._source.path
        similar = (self._sibling(config, path) if full == path else None) or self._similar_path(full)
        hint = f"; did you mean {self._source.name(similar)}?" if similar else ""
        return self._source.error(full, f"unknown {what}{hint}")

    def _sibling(self, config: Any, path: Path) -> Path | None:
        names = [name for name, hint in field_types(type(config)).items() if is_settable(name, hint)]
        close = nearest(str(path[-1]), names, cutoff=0.7)
        return (*path[:-1], close) if close else None

    def _similar_path(self, path: Path) -> Path | None:
        """Returns the path of a field of the same name, else one that is spelled similarly."""
        known = {dotted(known): known for known in _settable_paths(self._root)}
        namesakes = [name for name, keys in known.items() if keys[-1] == path[-1] and len(path) > 1]
        close = nearest(dotted(path), namesakes, cutoff=0.0) or nearest(dotted(path), known, cutoff=0.7)
        return known[close] if close else None
