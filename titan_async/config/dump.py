"""Writes a resolved configuration as a recipe file that resolves to the same configuration."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from titan_async.config.field_values import NONE_WORD
from titan_async.config.overrides import MODE, choices_of, field_types, is_settable
from titan_async.config.suggestions import dotted

__all__ = ["dump_config"]

_FOLDERS = (("dump_folder",), ("hf_assets_path",), ("checkpoint", "initial_load_path"))
"""Where one machine has what a run reads and writes; another one has other folders."""


def dump_config(
    config: Any,
    *,
    recipe: str,
    base: Any,
    module: str | None = None,
    model: Mapping[str, Any] | None = None,
    portable: bool = False,
) -> str:
    """Returns the text of a recipe file for `config`.

    What a recipe file cannot set (the model, code) is listed in comments. A None is written only
    where the recipe has something else, as "none".

    Args:
        config: the configuration to write.
        recipe: the name of the recipe that it was made from.
        base: what that recipe returns.
        module: the `--module` that the recipe comes from, if it is not one of the project's.
        model: the section `[model]`, if the recipe takes one.
        portable: for other machines: of absolute paths the names alone, and none of the run's folders.
    """
    dump = _Dump(portable)
    table = dump.table(config, base, ()) | ({"model": dict(model)} if model else {})
    # A table's own keys come before its sections, or TOML would count them to the last section.
    body = tomli_w.dumps({"recipe": recipe, **dict(sorted(table.items(), key=_is_section))})
    comments = [f"# The recipe is found with --module {module}"] if module else []
    comments += [f"# {dotted(path)}: {text}" for path, text in dump.unwritten]
    return "".join(line + "\n" for line in comments) + ("\n" if comments else "") + body


def _is_section(item: tuple[str, Any]) -> bool:
    value = item[1]
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)
    )


class _Dump:
    def __init__(self, portable: bool) -> None:
        self._portable = portable
        self.unwritten: list[tuple[tuple[str | int, ...], str]] = []

    def table(self, config: Any, base: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, hint in field_types(type(config)).items():
            value, here = getattr(config, name), (*path, name)
            if name.startswith("_") or (here in _FOLDERS and self._is_of_machine(value)):
                continue
            if name == "model_spec":
                self.unwritten.append((here, _model_words(value)))
            elif not is_settable(name, hint) or here == ("override", "imports"):
                if value:
                    self.unwritten.append((here, _words(value)))
            elif value is None:
                if getattr(base, name, None) is not None:
                    result[name] = NONE_WORD
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                old = getattr(base, name, None)
                section = self.table(value, old if type(old) is type(value) else None, here)
                choices = choices_of(hint)
                if len(choices) > 2:
                    mode = next(word for word, cls in choices.items() if cls is type(value))
                    section = {MODE: mode, **section}
                if section:
                    result[name] = section
            elif value != {}:
                self._put(result, name, value, here)
        return dict(sorted(result.items(), key=_is_section))

    def _put(self, result: dict[str, Any], name: str, value: Any, path: tuple[str | int, ...]) -> None:
        try:
            result[name] = self._value(value, path)
        except TypeError:
            self.unwritten.append((path, _words(value)))

    def _value(self, value: Any, path: tuple[str | int, ...]) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.table(value, None, path)
        if value is None:
            return NONE_WORD
        if isinstance(value, enum.Enum):
            return self._value(value.value, path)
        if isinstance(value, Path | str):
            return Path(value).name if self._is_of_machine(value) else str(value)
        if isinstance(value, bool | int | float):
            return value
        if isinstance(value, list | tuple):
            return [self._value(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, dict):
            result: dict[str, Any] = {}
            for key, item in value.items():
                self._put(result, str(key), item, (*path, str(key)))
            return result
        raise TypeError(f"TOML has no {type(value).__name__}")

    def _is_of_machine(self, value: Any) -> bool:
        """Whether it is a path that is to be kept from other machines."""
        return self._portable and isinstance(value, str | Path) and str(value).startswith(("/", "~", "file:"))


def _words(value: Any) -> str:
    """A value that TOML does not have, without the address that a function's own words end with."""
    if isinstance(value, dict):
        return ", ".join(f"{key} is {_words(item)}" for key, item in value.items())
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else f"{value!r}"[:200].replace("\n", " ")


def _model_words(spec: Any) -> str:
    name, flavor = getattr(spec, "name", None), getattr(spec, "flavor", None)
    return f"{name} {flavor}, by the recipe" if name else "by the recipe"
