from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from titan_async.config.recipe_file import Resolved, resolve_recipe

RECIPE = 'recipe = "llama3_debugmodel"\n'
"""A recipe of torchtitan, which has every section and does not depend on the project's recipes."""


@pytest.fixture
def recipe_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Resolved]:
    """Resolves the text of a recipe file, which gets the name x.toml, with flags."""
    monkeypatch.chdir(tmp_path)

    def resolve(text: str | bytes, *flags: str) -> Resolved:
        Path("x.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return resolve_recipe(["x.toml", "--module", "llama3", *flags])

    return resolve
