"""The project's recipes and recipe files: sizes, tokens, stages, optimizers, synchronous twins."""

import importlib
import re
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titan_async.config.recipe_file import resolve, resolve_recipe
from titan_async.config.recipe_list import list_recipes
from titan_async.data import shakespeare_tokenizer_folder
from titan_async.training._titan_internals import keep_modules, split_layers
from titan_async.training.models.hf_architecture import describe
from titan_async.training.optimizer.config import match_group
from titan_async.training.preflight.check import check

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = sorted(path for path in (ROOT / "toml_configs").glob("*.toml") if "_sync" not in path.name)
NAMES = [recipe.name for recipe in list_recipes() if not recipe.takes_model]
ON_GPUS = [name for name in NAMES if not name.startswith("debug")]

OFFLINE = (
    *("--hf_assets_path", str(shakespeare_tokenizer_folder())),
    *("--dataloader.dataset", "shakespeare", "--dataloader.dataset_config", "none"),
    *("--validator.dataloader.dataset", "shakespeare", "--validator.dataloader.dataset_config", "none"),
    # The plays are short: the recipes' 5 % are less than a sequence for each of 16 ranks.
    *("--dataloader.validation_fraction", "0.5", "--validator.dataloader.validation_fraction", "0.5"),
)
"""Flags with which a recipe for GPUs finds a tokenizer and text without a network."""


@dataclass(frozen=True)
class Size:
    """A model's parameters."""

    total: int
    active: int
    embedding: int
    """Of the embedding; the head is as large, or tied to it."""
    outside: int
    """Of the embedding and the head."""


@cache
def recipe(name: str) -> Any:
    (found,) = [recipe for recipe in list_recipes() if recipe.name == name]
    return getattr(importlib.import_module(f"titan_async.recipes.{found.module}"), name)()


@cache
def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return recipe(name).model_spec.model.build()


def size(name: str) -> Size:
    model = on_meta(name)
    total = routed = 0
    for key, parameter in model.named_parameters():
        total += parameter.numel()
        routed += parameter.numel() if ".routed_experts." in key else 0
    moe = recipe(name).model_spec.model.layers[0].moe
    idle = 0 if moe is None else routed * (moe.num_experts - moe.router.top_k) // moe.num_experts
    embedding = model.tok_embeddings.weight.numel()
    return Size(total, total - idle, embedding, embedding if is_tied(name) else 2 * embedding)


def is_tied(name: str) -> bool:
    return recipe(name).model_spec.model.enable_weight_tying


def batch(name: str) -> int:
    """Sequences of a batch."""
    training = recipe(name).training
    return training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size


def tokens(name: str) -> int:
    return recipe(name).training.steps * batch(name) * recipe(name).training.seq_len


PROMISED = {
    # least and most parameters, of which active, and tokens
    "debug": ((1e6, 5e6), (1e6, 5e6), (6e5, 7e5)),
    "debug_moe": ((1e6, 5e6), (1e6, 5e6), (6e5, 7e5)),
    "dense_135m": ((162e6, 164e6), (162e6, 164e6), (3.25e9, 3.27e9)),
    "dense_360m": ((408e6, 410e6), (408e6, 410e6), (8.16e9, 8.2e9)),
    "smollm2_135m": ((134e6, 135e6), (134e6, 135e6), (2.68e9, 2.7e9)),
    "smollm2_360m": ((361e6, 362e6), (361e6, 362e6), (7.22e9, 7.25e9)),
    "dense_1b": ((1.16e9, 1.18e9), (1.16e9, 1.18e9), (23.4e9, 23.6e9)),
    "moe_2b": ((1.9e9, 2.1e9), (0.38e9, 0.42e9), (39.8e9, 40.2e9)),
    "moe_10b_200b": ((9.7e9, 10.3e9), (1e9, 2e9), (198e9, 202e9)),
}


def test_every_recipe_is_listed() -> None:
    assert sorted(PROMISED) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_tokens(name: str) -> None:
    for value, (least, most) in zip(
        (size(name).total, size(name).active, tokens(name)), PROMISED[name], strict=True
    ):
        assert least <= value <= most


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("dense", "smollm2"))])
def test_dense_models_see_twenty_tokens_per_parameter(name: str) -> None:
    assert tokens(name) == pytest.approx(20 * size(name).total, rel=1e-3)


def test_the_dense_shapes_are_those_of_their_names() -> None:
    """With tied embeddings, SmolLM2's models have 134 515 008 and 361 821 120 parameters."""
    for name, known in (("135m", 134_515_008), ("360m", 361_821_120)):
        untied, tied = size(f"dense_{name}"), size(f"smollm2_{name}")
        assert untied.total - untied.embedding == tied.total == known


def test_smollm2_is_what_its_config_says() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_attention_heads": 15,
        "num_hidden_layers": 32,
        "num_key_value_heads": 5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    ours = describe(recipe("smollm2_360m").model_spec, 8192)
    assert {name: ours[name] for name in config} == config
    config |= {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    config |= {"num_attention_heads": 9, "num_key_value_heads": 3}
    ours = describe(recipe("smollm2_135m").model_spec, 8192)
    assert {name: ours[name] for name in config} == config


@pytest.mark.parametrize("name", ON_GPUS)
def test_learning_rate_and_batch_follow_the_law(name: str) -> None:
    """arXiv 2401.02954, with the operations of the layers only; batches may be smaller."""
    config, sizes = recipe(name), size(name)
    model, training = config.model_spec.model, config.training
    matrices = sizes.active - sizes.outside
    per_token = 6 * matrices + 12 * len(model.layers) * model.dim * training.seq_len
    operations = per_token * tokens(name)
    for rate in (config.optimizer.muon.lr, config.optimizer.adamw.lr):
        assert rate == pytest.approx(0.3118 * operations**-0.125, rel=0.06)
    law = 0.2920 * operations**0.3271
    assert 0.4 * law < batch(name) * training.seq_len < 1.1 * law


@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_of_the_learning_rate_is_the_papers(name: str) -> None:
    config = recipe(name)
    assert config.lr_scheduler.resolved_warmup_steps(config.training.steps) == config.training.steps // 10
    assert (config.lr_scheduler.decay_type, config.lr_scheduler.min_lr_factor) == ("cosine", 0.1)
    assert config.training.max_norm == 1.0
    assert config.optimizer.muon.weight_decay == config.optimizer.adamw.weight_decay == 0.1
    assert config.optimizer.error_feedback.enable and config.optimizer.error_feedback.strength == 1.0


STAGES = {
    "debug": (1, 2, 4),
    "debug_moe": (1, 2, 4),
    "dense_135m": (1, 2, 3, 4, 6),
    "dense_360m": (1, 2, 3, 4, 6, 9),
    "smollm2_135m": (1, 2, 3, 4, 6),
    "smollm2_360m": (1, 2, 3, 4, 6, 9),
    "dense_1b": (1, 2),
    "moe_2b": (1, 2, 4, 8),
    "moe_10b_200b": (1, 2, 4, 8),
}
"""Numbers of stages over which a recipe's docstring says that it splits evenly."""


@pytest.mark.parametrize("name", NAMES)
def test_stages_are_even_and_make_up_the_model(name: str) -> None:
    config, whole = recipe(name), on_meta(name)
    parallelism = config.parallelism
    assert parallelism.pipeline_parallel_degree in STAGES[name]
    costs = {
        "tok_embeddings": parallelism.pipeline_parallel_first_stage_less_layers,
        "lm_head": parallelism.pipeline_parallel_last_stage_less_layers,
        "norm": 0,
    }
    for stages in STAGES[name]:
        parts = split_layers(stages, len(whole.layers), costs["tok_embeddings"], costs["lm_head"])
        assert len({sum(costs.get(part, 1) for part in stage) for stage in parts}) == 1
    parts = split_layers(
        parallelism.pipeline_parallel_degree, len(whole.layers), costs["tok_embeddings"], costs["lm_head"]
    )
    found = [name for stage in parts for name, _ in keep_modules(whole, stage).named_parameters()]
    copies = ["lm_head.weight"] if is_tied(name) else []  # of the last stage
    assert sorted(found) == sorted([*(name for name, _ in whole.named_parameters()), *copies])


HIDDEN = re.compile(
    r"layers\.\d+\.(attention\.(qkv_linear\.w[qkv]|wo)|(feed_forward|moe\.shared_experts)\.w[123])\.weight"
    r"|layers\.\d+\.moe\.routed_experts\.inner_experts\.(w1_EFD|w2_EDF|w3_EFD)"
)


@pytest.mark.parametrize("name", NAMES)
def test_muon_gets_the_hidden_matrices_and_nothing_else(name: str) -> None:
    groups = recipe(name).optimizer.resolved_groups()
    given = {
        key: groups[match_group(key, groups)].optimizer_name for key, _ in on_meta(name).named_parameters()
    }
    assert set(given.values()) == {"Muon", "AdamW"}
    for key, optimizer in given.items():
        assert (optimizer == "Muon") == bool(HIDDEN.fullmatch(key)), key


def runs() -> list[Any]:
    """Each recipe file and its twin, as they are, and with the flags that their comments give."""
    found = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        # "1 GPU", or "16 GPUs", and what to change for them
        lines = re.findall(r"^#   (?:(\d+) GPUs? +)?(--\S.*)$", text, re.MULTILINE)
        for number, flags in [("", ""), *lines]:
            world = int(number) if number else None
            found.append(pytest.param(path, world, flags.split(), id=f"{path.stem} {flags}".strip()))
            if not flags:
                twin = path.with_name(f"{path.stem}_sync.toml")
                found.append(pytest.param(twin, world, [], id=twin.stem))
    return found


@pytest.mark.parametrize(("path", "world", "flags"), runs())
def test_recipe_files_pass_all_checks(
    path: Path, world: int | None, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    gpus = OFFLINE if "FineWeb" in (path.parent / path.name.replace("_sync", "")).read_text() else ()
    config = resolve([str(path), *gpus, *flags, "--dump_folder", str(tmp_path)])
    parallelism = config.parallelism
    degrees = parallelism.pipeline_parallel_degree, abs(parallelism.data_parallel_shard_degree)
    check(config, world_size=world or prod(degrees))


@pytest.mark.parametrize("name", ["dense_135m", "dense_360m", "smollm2_135m", "smollm2_360m"])
def test_small_dense_models_take_eight_gpus_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = resolve([f"toml_configs/{name}.toml", *OFFLINE, "--dump_folder", str(tmp_path)])
    check(config, world_size=8)


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_twin_differs_in_schedule_and_error_feedback_alone(path: Path) -> None:
    asynchronous = resolve_recipe([str(path)])
    twin = resolve_recipe([str(path.with_name(f"{path.stem}_sync.toml"))])
    one, other = asynchronous.to_toml().splitlines(), twin.to_toml().splitlines()
    assert len(one) == len(other)
    name = asynchronous.recipe
    different = [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]]
    if is_tied(name):  # no other schedule divides it
        one_stage = ("pipeline_parallel_degree = 4", "pipeline_parallel_degree = 1")
        batches = [pair for pair in different if pair[0].startswith("local_batch_size")]
        assert one_stage in different and len(batches) == 1
        different = [pair for pair in different if pair not in (one_stage, *batches)]
    if asynchronous.config.pipeline.overlap:  # which 1F1B does not have
        different.remove(("overlap = true", "overlap = false"))
    assert different == [
        (f'dump_folder = "./outputs/{name}"', f'dump_folder = "./outputs/{name}_sync"'),
        ("enable = true", "enable = false"),
        ('pipeline_parallel_schedule = "Async2BW"', 'pipeline_parallel_schedule = "1F1B"'),
    ]
    assert not twin.config.optimizer.error_feedback.enable


def test_every_recipe_has_a_file_and_every_file_a_twin() -> None:
    assert sorted(resolve_recipe([str(path)]).recipe for path in FILES) == sorted(NAMES)
    twins = {path.name for path in (ROOT / "toml_configs").glob("*_sync.toml")}
    assert twins == {f"{path.stem}_sync.toml" for path in FILES}


def rounded(value: float) -> str:
    """As in the README's table: three digits, in thousands, millions or billions."""
    unit, letter = next(each for each in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if value >= 0.9995 * each[0])
    return f"{float(f'{value / unit:.3g}'):g} {letter}"


def test_the_table_in_the_readme_is_correct() -> None:
    rows = re.findall(r"^\| `(\w+)\.toml` \|(.*?)\|(.*?)\|(.*?)\|.*\|$", README, re.MULTILINE)
    assert [row[0] for row in rows] == [
        f"{name}_cpu" if name.startswith("debug") else name for name in PROMISED
    ]
    for file, *cells in rows:
        name = file.removesuffix("_cpu")
        total, active, seen = (cell.strip() for cell in cells)
        assert total == rounded(size(name).total)
        assert active == ("" if size(name).active == size(name).total else rounded(size(name).active))
        assert seen == rounded(tokens(name))
