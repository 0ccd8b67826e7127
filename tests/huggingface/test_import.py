"""`titan-async import`: round trips, and models that do not match the recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.support.saved_runs import DENSE, MOE, random_weights, save_run
from titan_async.checkpoint.dcp import SavedTensors
from titan_async.cli.main import main
from titan_async.config.recipe_file import resolve_recipe
from titan_async.training.checkpoint.folders import complete_steps

RECIPES = pytest.mark.parametrize("recipe", [DENSE, MOE], ids=["dense", "moe"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in Hugging Face's format, `dense` and `moe`."""
    folder = tmp_path_factory.mktemp("models")
    for name, recipe in (("dense", DENSE), ("moe", MOE)):
        save_run(folder / "runs" / name, recipe)
        size = ["--max-shard-size", "3MB"]
        assert main(["convert", str(folder / "runs" / name), str(folder / name), *size]) == 0
    return folder


@RECIPES
def test_imported_weights_are_the_converted_ones(recipe: Path, models: Path, tmp_path: Path) -> None:
    model = models / ("moe" if recipe == MOE else "dense")
    assert main(["import", str(model), str(tmp_path / "run")]) == 0
    assert complete_steps(tmp_path / "run/checkpoint") == [0]
    whole = random_weights(recipe, seed=7)
    loaded = {key: torch.empty_like(value) for key, value in whole.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "run/checkpoint/step-0")
    assert all(torch.equal(loaded[key], value) for key, value in whole.items())
    assert SavedTensors(tmp_path / "run/checkpoint/step-0").tensors.keys() == whole.keys()


@pytest.mark.covering(1)
@RECIPES
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_round_trip_gives_the_same_files(recipe: Path, dtype: str, models: Path, tmp_path: Path) -> None:
    run = models / "runs" / ("moe" if recipe == MOE else "dense")
    size = ["--max-shard-size", "3MB"]
    assert main(["convert", str(run), str(tmp_path / "first"), "--dtype", dtype, *size]) == 0
    assert main(["import", str(tmp_path / "first"), str(tmp_path / "run"), str(recipe)]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "second"), *size]) == 0
    names = {path.name for path in (tmp_path / "first").iterdir()} - {"README.md", "recipe.toml"}
    assert len(names) > 6
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_model_saved_by_transformers_is_imported(models: Path, tmp_path: Path) -> None:
    """transformers' own file names and fields, with its layout of experts."""
    transformers = pytest.importorskip("transformers")
    for name, recipe in (("dense", DENSE), ("moe", MOE)):
        model = transformers.AutoModelForCausalLM.from_pretrained(models / name)
        model.save_pretrained(tmp_path / name)
        assert main(["import", str(tmp_path / name), str(tmp_path / f"{name}-run"), str(recipe)]) == 0
        saved = SavedTensors(tmp_path / f"{name}-run/checkpoint/step-0")
        for key, value in random_weights(recipe, seed=7).items():
            assert torch.equal(saved.read(key), value), key


def test_tied_model_round_trip(tmp_path: Path) -> None:
    (tmp_path / "tied.toml").write_text('recipe = "tied_llama"\n')
    recipe, module = tmp_path / "tied.toml", ("--module", "tests.support.recipes")
    whole = save_run(tmp_path / "run", recipe, *module)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), *module]) == 0
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "back"), str(recipe), *module]) == 0
    saved = SavedTensors(tmp_path / "back/checkpoint/step-0")
    assert saved.tensors.keys() == whole.keys() and "lm_head.weight" not in whole
    assert all(torch.equal(saved.read(key), value) for key, value in whole.items())


def test_recipe_of_the_imported_run(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(models / "dense"), "run", "--training.steps", "20"]) == 0
    config = resolve_recipe(["run/recipe.toml"]).config
    assert config.training.steps == 20
    assert config.lr_scheduler.resolved_warmup_steps(20) == 2
    assert config.dump_folder == str(tmp_path / "run")
    assert config.hf_assets_path == str(models / "dense")
    other = resolve_recipe([str(DENSE)]).config.hf_assets_path
    assert main(["import", str(models / "dense"), "other", f"--hf-assets-path={other}"]) == 0
    assert resolve_recipe(["other/recipe.toml"]).config.hf_assets_path == other


def without_config(model: Path) -> None:
    (model / "config.json").unlink()


def with_fewer_layers(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))


def of_another_kind(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "gpt2"}')


def without_a_file(model: Path) -> None:
    (model / "model-00002-of-00005.safetensors").unlink()


def with_pickles_only(model: Path) -> None:
    for file in model.glob("*.safetensors*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"")


def rewritten(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        weights = {k: v for file in model.glob("*.safetensors") for k, v in load_file(file).items()}
        for file in model.glob("*.safetensors*"):
            file.unlink()
        change(weights)
        save_file(weights, model / "model.safetensors")

    return damage


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (without_config, "{model} has no config.json: name a folder with a Hugging Face model"),
        (with_fewer_layers, "{model}/config.json has num_hidden_layers = 5, where the model of debug has 6"),
        (of_another_kind, '{model}/config.json has model_type = "gpt2", where the model of debug has'),
        (without_a_file, "{model}/model-00002-of-00005.safetensors, which {model}/model.safetensors.index"),
        (with_pickles_only, "{model} has only pickled weights, which can run code when they are loaded"),
        (rewritten(lambda w: w.pop(NORM)), "{model} has no tensor model.norm.weight: fetch the complete "),
        (rewritten(lambda w: w.update({NORM: torch.ones(3)})),
         "model.norm.weight in {model} is [3], where the recipe's model has [192]: name a recipe of"),
        (rewritten(lambda w: w.update(more=torch.ones(3))),
         "{model} has a tensor more, which the recipe's model does not have"),
    ],
)  # fmt: skip
def test_model_that_does_not_match_is_a_user_error(
    damage: Callable[[Path], None],
    sentence: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models / "dense", model)
    damage(model)
    capsys.readouterr()
    assert main(["import", str(model), str(tmp_path / "run")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(sentence.format(model=model))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["{model}"], "titan-async import takes HF_DIR RUN_DIR [RECIPE.toml], not {model}"),
        (["{model}", "{out}", "{moe}"], '{model}/config.json has model_type = "llama", where the model of'),
        (["{model}", "{model}"], "{model} exists already; remove it, or name another folder"),
        (["{model}", "{out}", "--checkpoint.no-enable"], "checkpoint.enable is false, so training would not"),
        (
            ["{model}", "{out}", "--training.stpes", "3"],
            "unknown flag --training.stpes; did you mean",
        ),
    ],
)
def test_user_error_is_one_line(
    argv: list[str], sentence: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"model": models / "dense", "out": tmp_path / "out", "moe": MOE}
    assert main(["import", *(word.format(**names) for word in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(sentence.format(**names))
    assert not any(tmp_path.iterdir())
