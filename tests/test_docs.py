"""The site of the documentation builds without a warning and contains every public name."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import titan_async

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

# Building the site is slow.
pytestmark = pytest.mark.slow

ROOT = Path(titan_async.__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("layer", ["pipelining", "optim", "data"])
def test_every_exported_name_is_in_the_api(site: Path, layer: str) -> None:
    text = (site / "api" / f"{layer}.html").read_text(encoding="utf-8")
    for name in importlib.import_module(f"titan_async.{layer}").__all__:
        assert f'id="titan_async.{layer}.{name}"' in text, name


def test_every_public_layer_has_a_page(site: Path) -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    layers = {name.split(".")[1] for name in packages if name.count(".") == 1}
    without = {"cli", "rehearsal", "recipes", "toml_configs"}  # commands, and configurations
    assert {path.stem for path in (site / "api").glob("*.html")} == layers - without


def test_pages_outside_docs_link_to_those_inside(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    for page in ("recipes.html", "study.html", "CONTRIBUTING.html"):
        assert f'href="{page}"' in home
    assert 'src="images/watch.svg"' in home and (site / "images" / "watch.svg").is_file()
