"""Writes a configuration as a recipe file that resolves to the same configuration."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from titan_async.config.field_values import NONE_WORD
from titan_async.config.overrides import MODE, choices_of, field_types, is_config, is_settable
from titan_async.config.toml_file import dotted

__all__ = ["dump_config"]

_FOLDERS = (("dump_folder",), ("hf_assets_path",), ("checkpoint", "initial_load_path"))
"""Fields that name a run's own folders, which another machine does not have."""


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

    Fields that a recipe file cannot set (the model, code) are listed in comments. None is written as "none",
    and only where the recipe has another value.

    Args:
        config: the configuration to write.
        recipe: the name of the recipe that it is based on.
        base: the result of that recipe.
        module: the `--module` of the recipe, if it is not one of the project's.
        model: the section `[model]`, if the recipe takes one.
        portable: omit the run's folders, and shorten absolute paths to their names, for other machines.
    """
    dump = _Dump(portable)
    table = dump.table(config, base, ()) | ({"model": dict(model)} if model else {})
    body = tomli_w.dumps({"recipe": recipe, **table})
    comments = [f"# The recipe is found with --module {module}"] if module else []
    comments += [f"# {dotted(path)}: {text}" for path, text in dump.unwritten]
    return "".join(line + "\n" for line in comments) + ("\n" if comments else "") + body


class _Dump:
    def __init__(self, portable: bool) -> None:
        self._portable = portable
        self.unwritten: list[tuple[tuple[str | int, ...], str]] = []

    def table(self, config: Any, base: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, hint in field_types(type(config)).items():
            value, here = getattr(config, name), (*path, name)
            if name.startswith("_") or (here in _FOLDERS and self._is_local(value)):
                continue
            if name == "model_spec":
                self.unwritten.append((here, _describe_model(value)))
            elif not is_settable(name, hint) or here == ("override", "imports"):
                if value:
                    self.unwritten.append((here, _describe(value)))
            elif value is None:
                if getattr(base, name, None) is not None:
                    result[name] = NONE_WORD
            elif is_config(value):
                old = getattr(base, name, None)
                section = self.table(value, old if type(old) is type(value) else None, here)
                choices = choices_of(hint)
                if len(choices) > 2:
                    section = {MODE: next(k for k, cls in choices.items() if cls is type(value)), **section}
                if section:
                    result[name] = section
            elif value != {}:
                self._put(result, name, value, here)
        return result

    def _put(self, result: dict[str, Any], name: str, value: Any, path: tuple[str | int, ...]) -> None:
        try:
            result[name] = self._value(value, path)
        except TypeError:
            self.unwritten.append((path, _describe(value)))

    def _value(self, value: Any, path: tuple[str | int, ...]) -> Any:
        if is_config(value):
            return self.table(value, None, path)
        if value is None:
            return NONE_WORD
        if isinstance(value, enum.Enum):
            return self._value(value.value, path)
        if isinstance(value, Path | str):
            return Path(value).name if self._is_local(value) else str(value)
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

    def _is_local(self, value: Any) -> bool:
        """Returns whether a value is a path of this machine to omit."""
        return self._portable and isinstance(value, str | Path) and str(value).startswith(("/", "~", "file:"))


def _describe(value: Any) -> str:
    """Returns a value that TOML cannot represent as text, without the address in the repr of a function."""
    if isinstance(value, dict):
        return ", ".join(f"{key} is {_describe(item)}" for key, item in value.items())
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else f"{value!r}"[:200].replace("\n", " ")


def _describe_model(spec: Any) -> str:
    name, flavor = getattr(spec, "name", None), getattr(spec, "flavor", None)
    return f"{name} {flavor}, by the recipe" if name else "by the recipe"
