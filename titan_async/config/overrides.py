"""Applies edits to a tree of configuration dataclasses and rebuilds it.

All edits are collected before anything is built, then every changed dataclass is built once, from
the leaves to the root, with `dataclasses.replace`: each `__post_init__` sees final values only, so
that two keys which are valid together never fail for having been set one after the other.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from titan_async.config import field_values as values
from titan_async.config.suggestions import Edit, Origin, Path, dotted
from titan_async.errors import UserError

__all__ = ["apply_edits", "choices_of", "field_types", "is_settable"]

MODE = "mode"
"""The key that chooses among the classes of a union, as `activation_checkpoint.mode` does."""


def apply_edits(config: Any, edits: Sequence[Edit], *, shown: str) -> Any:
    """Returns a copy of `config` with the edits applied in order; `config` itself is left alone.

    Args:
        config: a dataclass instance whose fields are values, lists, dicts and further dataclasses.
        edits: later ones win.
        shown: the file that errors about combinations of fields are attributed to.

    Raises:
        UserError: an edit names nothing, has a value of the wrong type, or the edited values do not
            fit together.
    """
    editor = _Editor(_Draft(type(config), config), shown)
    for edit in edits:
        editor.apply(editor.root, (), edit.path, edit.value, edit.origin)
    return editor.build(editor.root, ())


def field_types(cls: type) -> dict[str, Any]:
    """Returns the type hints of a dataclass's fields, markers kept, in the order of the fields."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:  # an annotation that only its own function could resolve
        hints = {}
    return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(cls) if field.init}


def is_settable(name: str, hint: Any) -> bool:
    """Returns whether a field is the user's to set: not private, not hidden from flags by tyro."""
    if name.startswith("_") or name == "model_spec":
        return False
    return not (typing.get_origin(hint) is typing.Annotated and _suppressed(hint))


def _suppressed(hint: Any) -> bool:
    import tyro

    markers = typing.get_args(tyro.conf.Suppress[int])[1:]
    return any(marker in markers for marker in typing.get_args(hint)[1:])


def choices_of(hint: Any) -> dict[str, type | None]:
    """Returns the named classes of a union of dataclasses, or {} for any other type."""
    choices: dict[str, type | None] = {}
    for member in values.members(hint):
        cls = values.plain(member)
        if cls is type(None):
            choices[values.NONE_WORD] = None
        elif dataclasses.is_dataclass(cls):
            names = [
                getattr(marker, "name", None)
                for marker in typing.get_args(member)[1:]
                if typing.get_origin(member) is typing.Annotated
            ]
            name = next((name for name in names if isinstance(name, str)), cls.__qualname__)
            choices[name.replace("-", "_")] = typing.cast(type, cls)
        else:
            return {}
    return choices if len(choices) > 1 else {}


class _Draft:
    """A dataclass being edited: the object as it was, and the fields that change."""

    def __init__(self, cls: type, base: Any = None, origin: Origin | None = None) -> None:
        self.cls = cls
        self.base = base
        self.origin = origin  # who asked for a new object, when there was none
        self.hints = field_types(cls)
        self.changes: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        if name in self.changes:
            return self.changes[name]
        if self.base is not None:
            return getattr(self.base, name)
        field = next(field for field in dataclasses.fields(self.cls) if field.name == name)
        if field.default is not dataclasses.MISSING:
            return field.default
        return None if field.default_factory is dataclasses.MISSING else field.default_factory()

    def child(self, name: str) -> Any:
        """Returns the field as a draft or a list of drafts, made on first use, if it holds dataclasses."""
        value = self.get(name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = self.changes[name] = _Draft(type(value), value)
        elif isinstance(value, list) and value and all(dataclasses.is_dataclass(item) for item in value):
            value = self.changes[name] = [_Draft(type(item), item) for item in value]
        return value

    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        """Yields every path that can be set, for suggestions."""
        for name, hint in self.hints.items():
            if not is_settable(name, hint):
                continue
            yield (*prefix, name)
            value = self.child(name)
            if isinstance(value, _Draft):
                yield from value.paths((*prefix, name))
            elif isinstance(value, list) and value and isinstance(value[0], _Draft):
                for index, item in enumerate(value):
                    yield from item.paths((*prefix, name, index))
            if len(choices_of(hint)) > 2:
                yield (*prefix, name, MODE)


class _Editor:
    def __init__(self, root: _Draft, shown: str) -> None:
        self.root = root
        self.shown = shown

    def apply(self, draft: _Draft, prefix: Path, keys: Path, value: object, origin: Origin) -> None:
        """Sets `keys`, read from `draft` which is at `prefix`, to `value`; no keys: value is a section."""
        if not keys:
            if not isinstance(value, Mapping):
                raise self._refuse(origin, prefix, "is a section: set its keys one by one")
            for key, item in value.items():
                self.apply(draft, prefix, (key,), item, origin)
            return
        name, value = self._field(draft, prefix, keys, value, origin)
        path, rest, hint = (*prefix, name), keys[1:], draft.hints[name]
        if path == ("override", "imports") and not origin.lax:
            raise self._refuse(
                origin,
                path,
                "names code to run, which a recipe file may not do; give it as the flag --override.imports",
            )
        current = draft.child(name)
        if isinstance(current, _Draft) or choices_of(hint):
            self._apply_section(draft, name, path, rest, value, origin)
        elif self._item_class(hint):
            self._apply_list(draft, name, path, rest, value, origin)
        elif typing.get_origin(values.plain(hint)) is dict:
            args = typing.get_args(values.plain(hint))
            draft.changes[name] = self._merged(current or {}, path, rest, value, args[1], origin)
        elif rest:
            raise self._unknown(origin, (*path, *rest))
        else:
            draft.changes[name] = self._converted(hint, path, value, origin)

    def _field(
        self, draft: _Draft, prefix: Path, keys: Path, value: object, origin: Origin
    ) -> tuple[str, object]:
        """Returns the field that a key names, and its value: `--compile.no-enable` is enable = false."""
        name = str(keys[0])
        hint = draft.hints.get(name)
        if hint is not None and is_settable(name, hint):
            return name, value
        if name == "model_spec" and not prefix:
            raise self._refuse(
                origin, (name,), "is the model itself and cannot be set; choose another recipe"
            )
        if hint is not None and not name.startswith("_"):
            raise self._refuse(origin, (*prefix, name), "cannot be set here; choose another recipe")
        positive = name.removeprefix("no_")
        if origin.lax and positive != name and draft.hints.get(positive) is bool and value == []:
            return positive, ["false"]
        raise self._unknown(origin, (*prefix, *keys), is_section=isinstance(value, Mapping))

    def _apply_section(
        self, draft: _Draft, name: str, path: Path, rest: Path, value: object, origin: Origin
    ) -> None:
        choices = choices_of(draft.hints[name])
        if choices:
            if not rest and isinstance(value, Mapping) and MODE in value and len(choices) > 2:
                value = dict(value)
                self._choose(draft, name, choices, (*path, MODE), value.pop(MODE), origin)
            elif not rest and not isinstance(value, Mapping):
                self._choose(draft, name, choices, path, value, origin)
                return
            elif rest == (MODE,) and len(choices) > 2:
                self._choose(draft, name, choices, (*path, MODE), value, origin)
                return
            if draft.child(name) is None:
                classes = [cls for cls in choices.values() if cls is not None]
                if len(classes) > 1:
                    if isinstance(value, Mapping) and not value:
                        return
                    options = ", ".join(f'"{choice}"' for choice in choices if choices[choice])
                    where = origin.name((*path, MODE))
                    raise self._refuse(origin, (*path, *rest), f'has no use while {where} is "none"; '
                                       f"set {where} to one of {options}")  # fmt: skip
                draft.changes[name] = _Draft(classes[0], origin=origin)
        child = draft.child(name)
        if not rest and not isinstance(value, Mapping):
            written = values.show(value if not isinstance(value, list) else " ".join(map(str, value)))
            raise self._refuse(origin, path, f"is a section and has no value of its own (got {written})")
        self._check_choice(child, choices, path, rest, value, origin)
        self.apply(child, path, rest, value, origin)

    def _check_choice(
        self,
        child: _Draft,
        choices: Mapping[str, type | None],
        path: Path,
        rest: Path,
        value: object,
        origin: Origin,
    ) -> None:
        """Refuses a key that only another class of the union has, with the mode that has it."""
        keys = rest[:1] or (tuple(value) if isinstance(value, Mapping) else ())
        for key in keys:
            owners = [word for word, cls in choices.items() if cls and key in field_types(cls)]
            if owners and key not in child.hints:
                where = origin.name((*path, MODE))
                raise self._refuse(
                    origin, (*path, key), f'belongs to {where} "{owners[0]}", which is not set'
                )

    def _choose(
        self,
        draft: _Draft,
        name: str,
        choices: Mapping[str, type | None],
        path: Path,
        value: object,
        origin: Origin,
    ) -> None:
        word = value[0] if isinstance(value, list) and len(value) == 1 else value
        key = word.replace("-", "_").lower() if isinstance(word, str) else None
        if key not in choices:
            options = ", ".join(f'"{choice}"' for choice in choices)
            raise self._refuse(origin, path, f"must be one of {options}, not {values.show(word)}")
        cls = choices[key]
        current = draft.child(name)
        if cls is None:
            draft.changes[name] = None
        elif not (isinstance(current, _Draft) and current.cls is cls):
            draft.changes[name] = _Draft(cls, origin=origin)

    def _item_class(self, hint: Any) -> type | None:
        """Returns X for list[X] with X a dataclass."""
        hint = values.plain(hint)
        if typing.get_origin(hint) is list:
            item = values.plain(typing.get_args(hint)[0])
            return typing.cast(type, item) if dataclasses.is_dataclass(item) else None
        return None

    def _apply_list(
        self, draft: _Draft, name: str, path: Path, rest: Path, value: object, origin: Origin
    ) -> None:
        cls = self._item_class(draft.hints[name])
        assert cls is not None
        if rest:
            items = draft.child(name)
            index = str(rest[0])
            if not index.isdigit() or int(index) >= len(items):
                have = f"there are {len(items)}, counted from 0" if items else "there is none"
                raise self._refuse(origin, (*path, rest[0]), f"does not exist: {have}")
            self.apply(items[int(index)], (*path, int(index)), rest[1:], value, origin)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._apply_list(draft, name, path, (key,), item, origin)
        elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            drafts = draft.changes[name] = [_Draft(cls, origin=origin) for _ in value]
            for index, item in enumerate(value):
                self.apply(drafts[index], (*path, index), (), item, origin)
        else:
            raise self._refuse(origin, path, f"is a list of tables: in the file, write [[{dotted(path)}]]")

    def _merged(self, current: Any, path: Path, rest: Path, value: object, hint: Any, origin: Origin) -> Any:
        """Returns a dict with one key (`rest`) or several (`value`) set, at any depth."""
        if not rest and not isinstance(value, Mapping):
            raise self._refuse(origin, path, f"must be a table, not {values.show(value)}")
        merged = dict(current) if isinstance(current, Mapping) else {}
        inner = typing.get_args(values.plain(hint))[1:2] if typing.get_origin(hint) is dict else ()
        changes = {rest[0]: value} if rest else value
        assert isinstance(changes, Mapping)
        for key, item in changes.items():
            key_path, deeper, old = (*path, key), rest[1:], merged.get(key)
            if deeper or isinstance(item, Mapping) or inner:
                merged[key] = self._merged(old, key_path, deeper, item, inner[0] if inner else Any, origin)
            elif values.plain(hint) is Any:
                try:
                    merged[key] = values.free_value(old, item, words=origin.lax)
                except ValueError as error:
                    raise self._refuse(origin, key_path, str(error)) from None
            else:
                merged[key] = self._converted(hint, key_path, item, origin)
        return merged

    def _converted(self, hint: Any, path: Path, value: object, origin: Origin) -> Any:
        try:
            if not origin.lax:
                return values.from_toml(hint, value)
            assert isinstance(value, list)
            if path == ("override", "imports"):
                from torchtitan.config.override import parse_cli_imports

                return parse_cli_imports(value)
            return values.from_words(hint, value)
        except ValueError as error:
            raise self._refuse(origin, path, str(error)) from None

    def _refuse(self, origin: Origin, path: Path, message: str) -> UserError:
        return origin.error(path, f"{origin.name(path)} {message}")

    def _unknown(self, origin: Origin, path: Path, *, is_section: bool = False) -> UserError:
        return origin.unknown(path, self._suggest(path), is_section=is_section)

    def _suggest(self, path: Path) -> Path | None:
        """Returns the settable path that was probably meant: a like name in the same section first,
        then the same name in another section, then the path that reads most alike."""
        known = list(self.root.paths())
        siblings = {str(p[-1]): p for p in known if p[:-1] == path[:-1]}
        like = difflib.get_close_matches(str(path[-1]), siblings, n=1, cutoff=0.7)
        if like:
            return siblings[like[0]]
        if len(path) > 1:
            namesakes = {dotted(p): p for p in known if p[-1] == path[-1]}
            if namesakes:
                close = difflib.get_close_matches(dotted(path), namesakes, n=1, cutoff=0.0)
                return namesakes[close[0]]
        spelled = {dotted(p): p for p in known}
        like = difflib.get_close_matches(dotted(path), spelled, n=1, cutoff=0.7)
        return spelled[like[0]] if like else None

    def build(self, draft: _Draft, path: Path) -> Any:
        """Returns the finished object of a draft, its children finished first."""
        built = {name: self._built(value, (*path, name)) for name, value in draft.changes.items()}
        try:
            if draft.base is not None:
                return dataclasses.replace(draft.base, **built)
            missing = [
                field.name
                for field in dataclasses.fields(draft.cls)
                if field.init
                and field.name not in built
                and field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ]
            if missing:
                assert draft.origin is not None
                raise draft.origin.error(path, f"{draft.origin.name(path)} lacks {', '.join(missing)}")
            return draft.cls(**built)
        except UserError:
            raise
        except (ValueError, NotImplementedError, AssertionError) as error:
            sentence = " ".join(str(error).split())
            raise UserError(f"{self.shown}: {sentence}") from error

    def _built(self, value: Any, path: Path) -> Any:
        if isinstance(value, _Draft):
            return self.build(value, path)
        if isinstance(value, list):
            return [self._built(item, (*path, index)) for index, item in enumerate(value)]
        return value
