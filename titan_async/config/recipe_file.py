"""Resolves `RECIPE.toml [flags]` to a complete `Trainer.Config`.

A recipe file names a recipe function, which returns a complete configuration, and overrides fields of it, by
torchtitan's names of sections and fields. Flags override the file:

    recipe = "debug"
    include = "base.toml"     # optional, read first: in the same folder, or one of the project's

    [training]
    steps = 300

A file cannot name code to import: a recipe is one of the project's, or is in the module that the user gives
on the command line with `--module`. A recipe of the project that takes a model is called with the section
`[model]`, plain values that describe one.

Only `resolve` imports torchtitan, after `ensure_device`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_async.config.flags import Arguments, parse_arguments
from titan_async.config.recipe_list import import_recipe_module, list_recipes
from titan_async.config.suggestions import nearest
from titan_async.config.toml_file import RecipeSource, TomlFile, read_recipe_file
from titan_async.errors import UserError

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

__all__ = ["Resolved", "resolve", "resolve_model", "resolve_recipe"]

_ADOPTION = "titan_async.training.adopt"


@dataclass(frozen=True)
class Resolved:
    """A configuration, and the recipe that it is based on."""

    config: Trainer.Config
    recipe: str
    base: Trainer.Config
    """The result of the recipe function, without file and flags."""
    module: str | None
    dry_run: bool
    model: Mapping[str, Any] | None = None
    """The section `[model]`, if the recipe takes one."""

    def to_toml(self, *, portable: bool = False) -> str:
        """Returns a recipe file that resolves to the same configuration.

        Args:
            portable: omit the folders of this machine, and shorten other absolute paths to their names.
        """
        from titan_async.config.dump import dump_config

        return dump_config(
            self.config,
            recipe=self.recipe,
            base=self.base,
            module=self.module,
            model=self.model,
            portable=portable,
        )


def resolve(argv: Sequence[str]) -> Trainer.Config:
    """Returns the configuration that `[RECIPE.toml, flags...]` describes.

    Raises:
        UserError: a file or flag is wrong; the message is one line that names the place and the fix.

    Examples:
        >>> config = resolve(["debug_cpu.toml", "--training.steps", "7", "--optimizer.muon.lr", "5e-3"])
        >>> config.training.steps, config.optimizer.muon.lr, config.parallelism.pipeline_parallel_schedule
        (7, 0.005, 'Async2BW')
    """
    return resolve_recipe(argv).config


def resolve_recipe(argv: Sequence[str]) -> Resolved:
    """Like `resolve`, and also returns the recipe that was used.

    Raises:
        UserError: as `resolve` does.
    """
    arguments = parse_arguments(argv)
    return _resolve(read_recipe_file(arguments.recipe_file), arguments)


def resolve_model(recipe: str, model: Mapping[str, Any], *, shown: str, flags: Sequence[str]) -> Resolved:
    """Like `resolve_recipe`, for a recipe that takes a model.

    Args:
        recipe: the name of the recipe.
        model: the section `[model]`.
        shown: the file that errors are attributed to.
        flags: the flags after the recipe file.

    Raises:
        UserError: as `resolve` does.
    """
    file = TomlFile(name_shown=shown, text="", data={})
    source = RecipeSource(shown, recipe, file, [(file, {"model": model})])
    return _resolve(source, parse_arguments([shown, *flags]))


def _resolve(source: RecipeSource, arguments: Arguments) -> Resolved:
    make_recipe, takes_model = _find_recipe(source, arguments.module)

    from titan_async.config.checks import check_folders, check_numbers
    from titan_async.config.overrides import apply_overrides

    assert source.recipe is not None
    model = None
    if takes_model:
        model = _pop_model(source)
        try:
            base = make_recipe(model)
        except ValueError as error:
            raise UserError(f"{source.path}: {error}") from None
    else:
        base = _configuration(make_recipe, source)
    config = apply_overrides(base, source.tables, arguments.flags, shown=arguments.recipe_file)
    check_numbers(config)
    check_folders(config)
    return Resolved(config, source.recipe, base, arguments.module, arguments.dry_run, model)


def _configuration(make_recipe: Callable[[], Any], source: RecipeSource) -> Trainer.Config:
    """Returns the result of a recipe function as a configuration of the project's trainer."""
    assert source.recipe is not None
    try:
        config = make_recipe()
    except (ValueError, NotImplementedError, ImportError, AssertionError) as error:
        sentence = " ".join(f"{error}".split()) or type(error).__name__
        raise source.recipe_file.error(("recipe",), f"the recipe {source.recipe}: {sentence}") from error
    # Imported by name: the trainer is in a layer above, as are the recipes that return its configuration.
    adopt = importlib.import_module(_ADOPTION).adopt
    return adopt(config, recipe=source.recipe)  # type: ignore[no-any-return]


def _pop_model(source: RecipeSource) -> dict[str, Any]:
    """Removes the section `[model]` from all files and returns it. Later files override earlier ones."""
    model: dict[str, Any] = {}
    for file, table in source.tables:
        section = table.pop("model", {})
        if not isinstance(section, Mapping):
            raise file.error(("model",), "model is a section, as in [model]")
        model |= section
    if not model:
        raise source.recipe_file.error(
            ("recipe",),
            f"the recipe {source.recipe} needs a section [model], such as titan-async import writes",
        )
    return model


def _find_recipe(source: RecipeSource, module: str | None) -> tuple[Callable[..., Any], bool]:
    """Returns the recipe function, and whether it takes a model."""
    name = source.recipe
    known = {} if module is not None else {recipe.name: recipe for recipe in list_recipes()}
    if name is None:
        choice = f": one of {', '.join(known)}" if known else ""
        raise UserError(f'{source.path}: no recipe is named; add recipe = "..."{choice}')
    if module is None and name not in known:
        raise _unknown_recipe(source, name, list(known))
    from titan_async.config.device import ensure_device

    ensure_device()  # before torchtitan, whose modules bind the device when they are imported
    if module is None:
        return getattr(import_recipe_module(known[name].module), name), known[name].takes_model
    imported = _import_user_module(module)
    function = getattr(imported, name, None)
    if name.startswith("_") or not callable(function) or isinstance(function, type):
        public = [key for key, value in vars(imported).items() if _looks_like_recipe(key, value)]
        raise _unknown_recipe(source, name, public, of=f" in {imported.__name__}")
    return function, False


def _unknown_recipe(source: RecipeSource, name: str, known: list[str], of: str = "") -> UserError:
    close = nearest(name, known)
    hint = f"; did you mean {close}?" if close else ";"
    listed = f" (known{of}: {', '.join(sorted(known))})" if known else f" there are none{of}"
    return source.recipe_file.error(("recipe",), f'unknown recipe "{name}"{hint}{listed}')


def _looks_like_recipe(name: str, value: object) -> bool:
    returns = getattr(value, "__annotations__", {}).get("return")
    words = returns if isinstance(returns, str) else getattr(returns, "__qualname__", "")
    return not name.startswith("_") and words.endswith("Trainer.Config")


def _import_user_module(module: str) -> Any:
    """Imports the module of `--module`, as torchtitan does: one of its models, a module, or a package whose
    `config_registry` has the recipes."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise UserError(
            f"--module {module}: not a name of a Python module; write it as in an import, such as my_recipes"
        )
    # `python -m`, as under torchrun, has the working directory on its path; a console command does not.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    candidates = [f"{module}.config_registry", module]
    if "." not in module:
        candidates.insert(0, f"torchtitan.models.{module}.config_registry")
    for candidate in candidates:
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            # If the candidate exists and imports a missing module, that is the error to report.
            if not (candidate == error.name or candidate.startswith(f"{error.name}.")):
                raise UserError(f"--module {module}: importing {candidate} failed: {error}") from error
    raise UserError(f"--module {module}: there is no such Python module")
