"""Lists the recipes, by parsing their source without importing it, and the recipe files.

The recipes are in the package `titan_async.recipes`, which is the top-level folder `recipes/` of a checkout.
An installation maps one to the other, and `toml_configs/` to `titan_async/toml_configs`; a checkout that is
not installed is handled here.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import titan_async

__all__ = ["Recipe", "import_recipe_module", "list_recipes", "recipe_files", "recipes_folder"]

_PACKAGE = "titan_async.recipes"


@dataclass(frozen=True)
class Recipe:
    """A recipe function, not imported."""

    name: str
    module: str
    """Its module's name inside `titan_async.recipes`."""
    summary: str
    """The first line of its docstring."""
    takes_model: bool = False
    """Whether it takes the model from the section `[model]` of the recipe file."""


def recipes_folder() -> Path | None:
    """Returns the folder of the recipes, or None if the installation has none."""
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except ModuleNotFoundError:
        spec = None
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    folder = Path(__file__).resolve().parents[2] / "recipes"  # of a checkout
    return folder if (folder / "__init__.py").is_file() else None


def recipe_files() -> dict[str, Path]:
    """Returns the project's recipe files by name, sorted."""
    package = Path(titan_async.__file__).parent
    folders = (package / "toml_configs", package.parent / "toml_configs")  # installed, in a checkout
    folder = next((folder for folder in folders if folder.is_dir()), None)
    return {} if folder is None else {path.name: path for path in sorted(folder.glob("*.toml"))}


def list_recipes(folder: Path | None = None) -> list[Recipe]:
    """Returns the recipes of a folder (default: the project's), sorted by name.

    A recipe is a public function at a module's top level whose return annotation is some
    `Trainer.Config`. A file with a syntax error is skipped: importing it reports the error.
    """
    folder = folder or recipes_folder()
    if folder is None:
        return []
    found = []
    for path in sorted(folder.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and _is_recipe(node):
                summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
                found.append(Recipe(node.name, path.stem, summary, takes_model=bool(node.args.args)))
    return sorted(found, key=lambda recipe: recipe.name)


def _is_recipe(node: ast.FunctionDef) -> bool:
    if node.name.startswith("_") or node.returns is None:
        return False
    return ast.unparse(node.returns).strip("'\"").endswith("Trainer.Config")


def import_recipe_module(name: str) -> object:
    """Imports the module `name` of `titan_async.recipes`."""
    folder = recipes_folder()
    if importlib.util.find_spec(_PACKAGE) is None and folder is not None:
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[_PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_PACKAGE}.{name}")
