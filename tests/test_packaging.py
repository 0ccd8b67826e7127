"""The wheel contains all files for users, and works without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import titan_async

ROOT = Path(titan_async.__file__).parents[1]

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel, as in site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools leaves files where it builds
    for name in ("titan_async", "recipes", "toml_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=source, check=True, capture_output=True, timeout=120
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


def run(installed: Path, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs `titan-async` of the wheel outside of the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "titan_async.cli", *argv],
        cwd=folder, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )  # fmt: skip


def test_the_wheel_contains_every_file(installed: Path) -> None:
    there = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    wanted = {
        f"titan_async/{inside}{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in (
            ("titan_async", ""),
            ("recipes", "recipes/"),
            ("toml_configs", "toml_configs/"),
        )
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name in ("py.typed", "data/assets/shakespeare_bpe2048/tokenizer.json", "toml_configs/debug_cpu.toml"):
        assert f"titan_async/{name}" in wanted
    (metadata,) = installed.glob("*.dist-info")
    outside = {name for name in there if not name.startswith(f"{metadata.name}/")}
    assert outside == wanted
    assert "titan-async = titan_async.cli.main:main" in (metadata / "entry_points.txt").read_text()


def test_its_recipe_files_are_listed(installed: Path, tmp_path: Path) -> None:
    shown = run(installed, tmp_path, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"recipe files, of {installed}/titan_async/toml_configs:\n" in shown.stdout


@pytest.mark.slow
def test_its_recipe_files_are_found_by_name(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('include = "debug_cpu.toml"\ntraining.steps = 7\n')
    resolved = run(installed, tmp_path, "train", "mine.toml", "--dry-run")
    assert (resolved.returncode, resolved.stderr) == (0, "")
    config = tomllib.loads(resolved.stdout)
    assert (config["recipe"], config["training"]["steps"]) == ("debug", 7)
    assert Path(config["hf_assets_path"]).is_relative_to(installed)
