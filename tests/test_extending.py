"""The files of docs/extending.md are complete, and train."""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.training import ROOT, train

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = {
    program.split("\n", 1)[0].removeprefix("# "): program
    for program in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
}
(TOML,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
RECIPES = ("my_model", "my_optimizer", "my_data", "my_recipe")
SMALL = ("--training.seq_len", 64, "--training.steps", 6, "--metrics.log_freq", 1, "--validator.steps", 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Contains the files of the page, and is on the module search path."""
    for name, program in FILES.items():
        (tmp_path / name).write_text(program, encoding="utf-8")
    for recipe in RECIPES:
        (tmp_path / f"{recipe}.toml").write_text(TOML.replace("my_model", recipe), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_passes_the_checks_of_a_start(recipe: str, folder: Path) -> None:
    from titan_async.config.recipe_file import resolve_recipe
    from titan_async.training.preflight.check import check

    resolved = resolve_recipe([f"{recipe}.toml", "--module", recipe])
    assert resolved.config.training.steps == 20
    check(resolved.config, world_size=2, make_folder=False)
    (folder / "saved.toml").write_text(resolved.to_toml(), encoding="utf-8")
    again = resolve_recipe(["saved.toml", "--module", recipe]).config
    assert again.dataloader == resolved.config.dataloader
    assert again.optimizer == resolved.config.optimizer


def test_the_options_named_on_the_page_are_those_of_the_call(folder: Path) -> None:
    from titan_async.config.recipe_file import resolve

    (flag,) = re.findall(r"(--optimizer\.param_groups\S+) 0\.9", PAGE)
    config = resolve(["my_optimizer.toml", "--module", "my_optimizer", flag, "0.9"])
    assert config.optimizer.param_groups[0].optimizer_kwargs == {"lr": 3e-4, "momentum": 0.9}


def test_own_model_optimizer_and_dataset_train(folder: Path) -> None:
    run = train(folder, "--module", "my_recipe", *SMALL, recipe="my_recipe.toml")
    assert run.status == 0, run.err
    assert run.steps == [1, 2, 3, 4, 5, 6] and run.losses[-1] < run.losses[0]
    assert (folder / "run" / "checkpoint" / "step-6").is_dir()


@pytest.mark.slow
def test_own_model_optimizer_and_dataset_resume_exactly(folder: Path) -> None:
    flags = ("--module", "my_recipe", *SMALL, "--lr_scheduler.total_steps", 6)
    whole = train(folder, *flags, "--dump_folder", "whole", recipe="my_recipe.toml")
    part = train(folder, *flags, "--training.steps", 3, recipe="my_recipe.toml")
    rest = train(folder, *flags, recipe="my_recipe.toml")
    assert [run.status for run in (whole, part, rest)] == [0, 0, 0], rest.err
    assert part.losses + rest.losses == whole.losses


@pytest.mark.slow
def test_own_schedule_trains_like_1f1b(folder: Path) -> None:
    sys.argv, argv = ["my_schedule.py", "pairs.csv"], sys.argv
    try:
        runpy.run_path(str(folder / "my_schedule.py"), run_name="__main__")
    finally:
        sys.argv = argv
    flags = ("--parallelism.pipeline_parallel_schedule", "1F1B", "--training.local_batch_size", 8, *SMALL)
    own = train(folder, *flags, "--parallelism.pipeline_parallel_schedule_csv", "pairs.csv")
    torchs = train(folder, *flags, "--dump_folder", "torchs")
    assert (own.status, torchs.status) == (0, 0), own.err
    assert own.losses == torchs.losses
