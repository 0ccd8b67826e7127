"""The configurations of valid recipe files and flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RECIPE
from titan_async.config.recipe_file import Resolved, resolve_recipe
from titan_async.config.recipe_list import list_recipes


def get(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config[int(key)] if key.isdigit() else getattr(config, key)
    return config


FLAGS = [
    ("--training.steps 300", "training.steps", 300),
    ("--training.steps=300", "training.steps", 300),
    ("--training.steps 300 --training.steps 301", "training.steps", 301),
    ("--training.seq-len 64", "training.seq_len", 64),
    ("--training.global_batch_size -1", "training.global_batch_size", -1),
    ("--lr_scheduler.decay_ratio 1e-1", "lr_scheduler.decay_ratio", 0.1),
    ("--compile.enable", "compile.enable", True),
    ("--compile.enable true", "compile.enable", True),
    ("--compile.enable=False", "compile.enable", False),
    ("--compile.no-enable", "compile.enable", False),
    ("--training.no_disable_cuda_graphs", "training.disable_cuda_graphs", False),
    ("--compile.components model,loss", "compile.components", ["model", "loss"]),
    ("--compile.components model loss", "compile.components", ["model", "loss"]),
    ("--compile.components=", "compile.components", []),
    ("--checkpoint.exclude_from_loading ['a']", "checkpoint.exclude_from_loading", ["a"]),
    (
        "--parallelism.module_fqns_per_model_part [['a'],['b','c']]",
        "parallelism.module_fqns_per_model_part",
        [["a"], ["b", "c"]],
    ),
    ("--debug.seed none", "debug.seed", None),
    ("--debug.seed 3", "debug.seed", 3),
    ("--parallelism.context_parallel_load_balancer None", "parallelism.context_parallel_load_balancer", None),
    ("--dump-folder none", "dump_folder", "none"),
    ("--activation_checkpoint none", "activation_checkpoint", None),
    ("activation_checkpoint:none", "activation_checkpoint", None),
    ("--training.steps 3 activation-checkpoint:none", "activation_checkpoint", None),
    ("--override.imports torchtitan.x.y", "override.imports", ["torchtitan.x.y"]),
]


@pytest.mark.parametrize(("flags", "path", "value"), FLAGS)
def test_flags(recipe_in: Callable[..., Resolved], flags: str, path: str, value: object) -> None:
    assert get(recipe_in(RECIPE, *flags.split()).config, path) == value


FILES = [
    ("[training]\nsteps = 300", "training.steps", 300),
    ("training.steps = 300", "training.steps", 300),
    ('dump_folder = "d"', "dump_folder", "d"),
    ("[training]\nmax_norm = 2", "training.max_norm", 2),
    ("[lr_scheduler]\nmin_lr_factor = 1", "lr_scheduler.min_lr_factor", 1.0),
    ("[dataloader]\ninfinite = false", "dataloader.infinite", False),  # of the recipe's own class
    ("[loss.loss_fn]\nglobal_vocab_size = 5", "loss.loss_fn.global_vocab_size", 5),
    ('[lr_scheduler]\ndecay_ratio = "none"', "lr_scheduler.decay_ratio", None),
    ("[compile]\ncomponents = []", "compile.components", []),
    ("\ufeff[training]\r\nsteps = 300\r\n", "training.steps", 300),
]


@pytest.mark.parametrize(("text", "path", "value"), FILES)
def test_file(recipe_in: Callable[..., Resolved], text: str, path: str, value: object) -> None:
    text = text.replace("\ufeff", "\ufeff" + RECIPE) if text.startswith("\ufeff") else RECIPE + text
    assert get(recipe_in(text).config, path) == value


def test_flags_override_the_file_and_the_file_its_include(recipe_in: Callable[..., Resolved]) -> None:
    Path("base.toml").write_text(RECIPE + "[training]\nsteps = 1\nseq_len = 11\nlocal_batch_size = 21")
    Path("middle.toml").write_text('include = "base.toml"\n[training]\nseq_len = 12\nlocal_batch_size = 22')
    resolved = recipe_in(
        'include = "middle.toml"\n[training]\nlocal_batch_size = 23', "--training.gc_freq", "7"
    )
    training = resolved.config.training
    assert (training.steps, training.seq_len, training.local_batch_size, training.gc_freq) == (1, 12, 23, 7)
    assert resolved.recipe == "llama3_debugmodel"
    assert recipe_in('include = "base.toml"', "--training.steps", "9").config.training.steps == 9


def test_post_init_sees_final_values_only(recipe_in: Callable[..., Resolved]) -> None:
    # Each of these alone is refused: the degree needs the switch, and 3 does not divide 8.
    config = recipe_in(
        RECIPE + "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3",
        "--training.local_batch_size", "9", "--training.disable_cuda_graphs",
    ).config  # fmt: skip
    assert config.parallelism.pipeline_parallel_degree == 2


def test_activation_checkpoint_modes(recipe_in: Callable[..., Resolved]) -> None:
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    def mode(text: str, *flags: str) -> Any:
        return recipe_in(RECIPE + text, *flags).config.activation_checkpoint

    assert mode('activation_checkpoint = "full"') == FullAC.Config()
    budget = '[compile]\nenable = true\n[activation_checkpoint]\nmemory_budget = 0.25\nmode = "memory_budget"'
    assert mode(budget) == MemoryBudgetAC.Config(memory_budget=0.25)
    # Another mode starts from its own defaults; keys of the first one in the file are discarded.
    assert mode(budget, "--activation_checkpoint", "selective") == SelectiveAC.Config()
    assert mode("[activation_checkpoint]\ndebug = true") == SelectiveAC.Config(debug=True)
    flags = ["--activation_checkpoint.debug", "--activation-checkpoint.mode", "full"]
    assert mode('activation_checkpoint = "none"', *flags) == FullAC.Config(debug=True)


def test_param_groups_one_key_or_a_new_list(recipe_in: Callable[..., Resolved]) -> None:
    default = recipe_in(RECIPE).config.optimizer.param_groups[0].optimizer_kwargs
    edited = recipe_in(
        RECIPE + "[optimizer.param_groups.0.optimizer_kwargs]\nlr = 0.5",
        "--optimizer.param-groups.0.optimizer-kwargs.betas", "0.8,0.9",
        "--optimizer.param_groups.0.optimizer_kwargs.foreach",
    ).config.optimizer.param_groups  # fmt: skip
    assert edited[0].optimizer_kwargs == {**default, "lr": 0.5, "betas": (0.8, 0.9), "foreach": True}

    groups = recipe_in(
        RECIPE + '[[optimizer.param_groups]]\npattern = "bias"\noptimizer_name = "Adam"\n'
        '[[optimizer.param_groups]]\npattern = ".*"\noptimizer_name = "AdamW"\n'
        'optimizer_kwargs = {lr = 1e-3, betas = [0.9, 0.99], x = {y = "none"}}'
    ).config.optimizer.param_groups
    assert [group.pattern for group in groups] == ["bias", ".*"]
    assert groups[0].optimizer_kwargs == {}
    assert groups[1].optimizer_kwargs == {"lr": 1e-3, "betas": (0.9, 0.99), "x": {"y": None}}


def test_the_recipe_itself_is_not_changed(recipe_in: Callable[..., Resolved]) -> None:
    resolved = recipe_in(RECIPE, "--training.steps", "77", "--optimizer.param_groups.0.pattern", "x")
    assert resolved.base.training.steps == 10
    assert resolved.base.optimizer.param_groups[0].pattern == ".*"


def without_model(config: Any) -> Any:
    return dataclasses.replace(config, model_spec=None)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--training.steps 7 --compile.enable --activation_checkpoint none --debug.seed 3",
        "--parallelism.context_parallel_load_balancer none activation_checkpoint:full",
        "--parallelism.module_fqns_per_model_part [['a']] --training.max_norm inf --compile.components=",
        "--optimizer.param_groups.0.optimizer_kwargs.betas 0.8,0.9 --optimizer.implementation for-loop",
    ],
)
def test_the_output_of_dry_run_resolves_to_the_same_configuration(
    recipe_in: Callable[..., Resolved], flags: str
) -> None:
    resolved = recipe_in(RECIPE, *flags.split())
    Path("printed.toml").write_text(resolved.to_toml(), encoding="utf-8")
    again = resolve_recipe(["printed.toml", "--module", "llama3"])
    assert without_model(again.config) == without_model(resolved.config)
    assert again.to_toml() == resolved.to_toml()
    # The file overrides the recipe.
    if flags:
        assert without_model(resolved.config) != without_model(resolved.base)


def test_dry_run_comments_what_a_file_cannot_set(recipe_in: Callable[..., Resolved]) -> None:
    text = recipe_in(RECIPE, "--override.imports", "torchtitan.x.y").to_toml()
    assert "# model_spec: llama3 debugmodel, by the recipe\n" in text
    assert "# override.imports: ['torchtitan.x.y']\n" in text
    assert "# The recipe is found with --module llama3\n" in text


def test_own_recipes_survive_a_round_trip(tmp_path: Path) -> None:
    for recipe in list_recipes():
        if recipe.takes_model:  # tests/huggingface/test_hub_models.py
            continue
        first, second = tmp_path / "first.toml", tmp_path / "second.toml"
        first.write_text(f'recipe = "{recipe.name}"')
        resolved = resolve_recipe([str(first)])
        second.write_text(resolved.to_toml(), encoding="utf-8")
        again = resolve_recipe([str(second)])
        assert without_model(again.config) == without_model(resolved.config), recipe.name
