"""A recipe file is looked up at its path, and then, if that is a bare name, among the project's."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_async.config.recipe_list import recipe_files
from titan_async.config.toml_file import read_recipe_file
from titan_async.errors import UserError

OURS = "debug_cpu.toml"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tables(path: str) -> list[object]:
    return [table for _, table in read_recipe_file(path).tables]


def test_a_bare_name_is_a_project_recipe_unless_the_file_exists() -> None:
    assert read_recipe_file(OURS).path == str(recipe_files()[OURS])
    Path(OURS).write_text('recipe = "mine"\n')
    found = read_recipe_file(OURS)
    assert (found.path, found.recipe) == (OURS, "mine")


def test_an_include_by_a_bare_name_is_a_project_recipe_unless_the_file_exists() -> None:
    Path("folder").mkdir()
    Path("folder/mine.toml").write_text(f'include = "{OURS}"\ntraining.seq_len = 64\n')
    assert tables("folder/mine.toml") == [*tables(OURS), {"training": {"seq_len": 64}}]
    Path("folder", OURS).write_text('recipe = "mine"\n')
    assert read_recipe_file("folder/mine.toml").recipe == "mine"
    assert tables("folder/mine.toml") == [{}, {"training": {"seq_len": 64}}]


def test_a_file_may_have_the_name_of_the_one_it_includes_elsewhere() -> None:
    Path("folder").mkdir()
    Path("folder", OURS).write_text('recipe = "mine"\n')
    Path(OURS).write_text(f'include = "folder/{OURS}"\n')
    assert read_recipe_file(OURS).recipe == "mine"


@pytest.mark.parametrize("path", [f"toml_configs/{OURS}", "debug_gpu.toml", "debug_cpu", "debug"])
def test_a_path_similar_to_a_project_recipe(path: str) -> None:
    with pytest.raises(UserError) as error:
        read_recipe_file(path)
    assert str(error.value) == f"{path}: no such file; did you mean {OURS}, which comes with titan_async?"


def test_a_path_that_does_not_exist() -> None:
    with pytest.raises(UserError) as error:
        read_recipe_file("mine.toml")
    assert str(error.value) == "mine.toml: no such file"
