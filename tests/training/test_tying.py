"""A tied weight on two stages trains and is saved as the one weight of a single process."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import spmd_types as spmd
import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import derive
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.llama3.model import Llama3Model

from tests.support.poison import poison
from tests.support.recipes import tied_llama
from tests.support.selection import slow
from tests.support.trainer_loop import (
    Trained,
    Trainers,
    Values,
    arguments,
    distance,
    loop,
    merged,
    whole,
)
from titan_async.checkpoint.dcp import SavedTensors
from titan_async.checkpoint.safetensors_files import SafetensorsFolder
from titan_async.errors import UserError
from titan_async.training._titan_internals import keep_modules
from titan_async.training.models.tying import EMBEDDING, HEAD, store_once, untied
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.preflight.check import build_on_meta
from titan_async.training.preflight.layout import check_layout
from titan_async.training.telemetry.not_finite import NonFiniteSearch

P = "--parallelism."
STAGES = f"{P}pipeline_parallel_degree"
SHARDED = (f"{P}data_parallel_shard_degree", 2)
TENSOR = (f"{P}tensor_parallel_degree", 2)
AVERAGE = ("--ema.decay", 0.75)


def of_one_model(values: Values) -> Values:
    """The values of all stages under the names of a tied model; the copies must be equal."""
    assert torch.equal(values[HEAD], values[EMBEDDING])
    return {name: value for name, value in values.items() if name != HEAD}


def at_the_start(results: list[Trained]) -> Values:
    """The initial weights, without the last stage's copy, which differs until the first batch."""
    return {name: v for name, v in merged([r.before for r in results]).items() if name != HEAD}


@pytest.mark.parametrize(
    ("ranks", "shares", "flags"),
    [
        slow(2, 1, (), id="2 stages"),
        slow(4, 1, (STAGES, 4), id="4 stages"),
        pytest.param(4, 2, SHARDED, id="FSDP"),
        slow(4, 1, TENSOR, id="TP"),
        slow(2, 1, ("--pipeline.balance", "measured"), id="balanced by measurement"),
    ],
)
def test_training_follows_the_recurrence_of_one_shared_weight(
    runs: Trainers, tmp_path: Path, ranks: int, shares: int, flags: tuple[object, ...]
) -> None:
    argv = arguments(tmp_path, "tied_llama", *flags)
    results = runs(ranks, argv)
    before, after = at_the_start(results), of_one_model(merged([r.after for r in results]))
    wanted = loop(argv, before, shares=shares)
    assert distance(after, wanted.after) < 3e-6
    assert distance(after, loop(argv, before, shares=shares, delay=0).after) > 1e-3
    for result in results:
        assert result.losses == pytest.approx(wanted.losses, abs=1e-5)
    # The weight counts once in the norm. Checkpoints after steps 4 and 6, a validation after step 3.
    norms = wanted.norms
    latest = [None, norms[0], norms[2], norms[3], norms[3], norms[5]]
    for found, norm in zip(results[0].norms, latest, strict=True):
        assert found == (None if norm is None else pytest.approx(norm, rel=1e-4))


def poisoned(trainer: Any, trained: Trained) -> None:
    """Poison two batches, and keep this stage's average of the tied weight."""
    poison(trainer, {1, 4})
    update = trainer.average.update

    def updated(skip: torch.Tensor) -> None:
        update(skip)
        if EMBEDDING in trainer.average.state_dict():
            trained.extra["average"] = whole(trainer.average.state_dict()[EMBEDDING])

    trainer.average.update = updated


Run = tuple[Path, list[Trained]]


@pytest.fixture(scope="module")
def run(runs: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """For an optimizer: six steps on two stages, with skipped updates, feedback and an average."""

    @functools.cache
    def run(optimizer: str) -> Run:
        folder = tmp_path_factory.mktemp(optimizer)
        argv = arguments(folder, "tied_llama", *AVERAGE, "--optimizer.name", optimizer)
        return folder, runs(2, argv, poisoned)

    return run


OPTIMIZERS = pytest.mark.parametrize("optimizer", ["muon", slow("lion")])


@OPTIMIZERS
def test_both_stages_keep_equal_copies(run: Callable[[str], Run], optimizer: str) -> None:
    _, (first, last) = run(optimizer)
    of_one_model(first.after | last.after)
    kept = [key for key in first.state if EMBEDDING in key]
    assert {f"state.{EMBEDDING}.error_feedback_update", EMBEDDING} < set(kept)
    for key in kept:
        assert torch.equal(first.state[key], last.state[key]), key
    assert not any("lm_head" in key for key in last.state)
    assert not torch.equal(first.state[EMBEDDING], first.after[EMBEDDING]), "the weights of the next batch"
    assert torch.equal(first.extra["average"], last.extra["average"])
    assert float((first.extra["average"] - first.after[EMBEDDING]).abs().max()) > 1e-5


@OPTIMIZERS
def test_a_checkpoint_has_the_tied_weight_once(run: Callable[[str], Run], optimizer: str) -> None:
    folder, (first, _) = run(optimizer)
    saved = SavedTensors(folder / "checkpoint/step-6")
    assert not any("lm_head" in key for key in saved.tensors)
    for key, value in [
        (EMBEDDING, first.after[EMBEDDING]),
        (f"train_state.next_weights.{EMBEDDING}", first.state[EMBEDDING]),
        (f"train_state.ema_weights.{EMBEDDING}", first.extra["average"]),
    ]:
        assert torch.equal(saved.read(key), value), key


def resuming(folder: Path, target: Path, *flags: object) -> list[str]:
    """Arguments of a run that resumes from step 4 of another."""
    shutil.copytree(folder / "checkpoint/step-4", target / "checkpoint/step-4")
    return arguments(target, "tied_llama", *AVERAGE, *flags)


SIX = ("--lr_scheduler.total_steps", 6)
"""The learning rates of six steps, for runs of fewer."""


@pytest.mark.parametrize("ranks", [1, slow(4)])
def test_the_tied_weight_is_loaded_at_another_number_of_stages(
    run: Callable[[str], Run], runs: Trainers, tmp_path: Path, ranks: int
) -> None:
    folder, _ = run("muon")
    flags = ("--optimizer.name", "muon", "--training.steps", 4, *SIX, STAGES, ranks)
    results = runs(ranks, resuming(folder, tmp_path, *flags))
    saved = SavedTensors(folder / "checkpoint/step-4")
    weights, state = merged([r.after for r in results]), merged([r.state for r in results])
    if ranks > 1:
        weights = of_one_model(weights)
        assert EMBEDDING in state, "of the next batch, which one stage does not keep"
    assert f"state.{EMBEDDING}.exp_avg" in state
    for name, value in weights.items():
        assert torch.equal(value, saved.read(name)), name
    for name, value in state.items():
        of_optimizer = name.startswith("state.")
        key = f"optimizer.{name}" if of_optimizer else f"train_state.next_weights.{name}"
        assert torch.equal(value, saved.read(key)), key


@pytest.mark.slow
def test_training_resumes_at_another_number_of_stages(runs: Trainers, tmp_path: Path) -> None:
    """By SGD, which does not amplify rounding."""
    whole_run = runs(2, arguments(tmp_path / "2", "tied_llama", *AVERAGE))
    wanted = of_one_model(merged([r.after for r in whole_run]))
    further = runs(4, resuming(tmp_path / "2", tmp_path / "4", STAGES, 4))
    assert distance(of_one_model(merged([r.after for r in further])), wanted) < 1e-6
    # One stage is synchronous. The first delayed batch that resumes from it reads the newest weights, too.
    runs(1, arguments(tmp_path / "1", "tied_llama", *AVERAGE, STAGES, 1, "--training.steps", 4, *SIX))
    one = ("--training.steps", 5, *SIX)
    [alone] = runs(1, resuming(tmp_path / "1", tmp_path / "alone", *one, STAGES, 1))
    delayed = runs(2, resuming(tmp_path / "1", tmp_path / "delayed", *one))
    assert distance(of_one_model(merged([r.after for r in delayed])), alone.after) < 1e-6


@pytest.mark.slow
def test_weights_in_hugging_faces_format(runs: Trainers, tmp_path: Path) -> None:
    """A last save in it, from which runs on other numbers of stages start."""
    hf = ("--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only", "--training.steps", 2)
    results = runs(2, arguments(tmp_path / "hf", "tied_llama", *hf))
    wanted = of_one_model(merged([r.after for r in results]))
    saved = SafetensorsFolder(tmp_path / "hf/checkpoint/step-2")
    assert "lm_head.weight" not in saved.tensors
    assert torch.equal(saved.read("model.embed_tokens.weight"), wanted[EMBEDDING])
    source = ("--checkpoint.initial_load_path", tmp_path / "hf/checkpoint/step-2")
    flags = (*source, "--checkpoint.initial_load_in_hf", "--training.steps", 0)
    for ranks in (1, 3):
        argv = arguments(tmp_path / f"{ranks}", "tied_llama", *flags, STAGES, ranks)
        loaded = merged([r.after for r in runs(ranks, argv)])
        assert distance(loaded if ranks == 1 else of_one_model(loaded), wanted) == 0


@pytest.fixture
def ends() -> tuple[nn.Module, nn.Module]:
    """The first and the last stage of two, without ranks."""
    model = untied(tied_llama().model_spec.model).build()
    parts = [
        keep_modules(model, names)
        for names in (["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "lm_head"])
    ]
    for part in parts:
        store_once(part)
        with torch.no_grad():
            part.init_states()
    return parts[0], parts[1]


def test_it_is_initialized_as_on_a_single_process(ends: tuple[nn.Module, nn.Module]) -> None:
    """torchtitan initializes a tied weight as the head; a separate embedding would have unit variance."""
    alone = tied_llama().model_spec.model.build()
    with torch.no_grad():
        alone.init_states()
    spread = float(alone.tok_embeddings.weight.detach().std())
    assert spread < 0.5
    assert float(ends[0].tok_embeddings.weight.detach().std()) == pytest.approx(spread, rel=0.03)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("Muon", {"lr": 0.02, "momentum": 0.95}),
        ("AdamW", {"lr": 0.003}),
        ("Lion", {"lr": 0.003, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_one_pattern_gives_both_copies_the_same_updates(
    ends: tuple[nn.Module, nn.Module], optimizer: str, options: dict[str, Any]
) -> None:
    groups = [
        ParamGroupConfig(pattern="^tok_embeddings", optimizer_name=optimizer, optimizer_kwargs=options),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1.0}),
    ]
    copies = [ends[0].tok_embeddings.weight, ends[1].lm_head.weight]
    copies[1].data.copy_(copies[0])
    start = copies[0].detach().clone()
    optimizers = [AsyncOptimizers.Config(param_groups=groups).build(model_parts=[part]) for part in ends]
    for _ in range(3):
        gradient = torch.randn_like(start)
        for part, copy_, each in zip(ends, copies, optimizers, strict=True):
            for parameter in part.parameters():
                parameter.grad = torch.randn_like(parameter)
            copy_.grad = gradient.clone()
            each.step()
    assert torch.equal(*copies) and not torch.equal(copies[0], start)
    one, other = (
        {key: value for key, value in each.state_dict().items() if EMBEDDING in key} for each in optimizers
    )
    assert one.keys() == other.keys() and any("error_feedback" in key for key in one)
    for key, value in one.items():
        assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key], key


def test_stages_load_the_weight_by_the_name_of_the_embedding(ends: tuple[nn.Module, nn.Module]) -> None:
    first, last = ends
    for part in ends:
        state = {name: torch.randn_like(value) for name, value in part.state_dict().items()}
        assert EMBEDDING in state and HEAD not in state
        part.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in part.state_dict().items())
    assert not torch.equal(first.tok_embeddings.weight, last.lm_head.weight)


def test_a_model_on_one_stage_is_saved_alike() -> None:
    spec = tied_llama().model_spec
    model = spec.model.build()
    store_once(model)
    state = model.state_dict()
    assert EMBEDDING in state and HEAD not in state
    model.load_state_dict({name: torch.ones_like(value) for name, value in state.items()})  # strictly
    assert model.lm_head.weight is model.tok_embeddings.weight and bool((model.lm_head.weight == 1).all())


@pytest.mark.usefixtures("group_of_one")
def test_a_non_finite_gradient_is_located_in_the_order_of_the_backward(
    ends: tuple[nn.Module, nn.Module],
) -> None:
    """Not in the head, although its gradient includes the embedding's."""
    search = NonFiniteSearch(enumerate(ends))
    search.begin_batch()
    search.check_gradients()
    assert search.end_update(finite=False) == ""
    search.begin_batch()
    for part in ends:
        for parameter in part.parameters():
            parameter.grad = torch.zeros_like(parameter)
    for tensor in (ends[0].layers["1"].attention.wo, ends[0].tok_embeddings, ends[1].lm_head):
        tensor.weight.grad[0, 0] = torch.nan
    search.check_gradients()
    assert search.end_update(finite=False) == (
        ", first in the gradient of layers.1.attention.wo.weight on stage 0 (rank 0)"
    )


class Lopsided(Llama3Model):
    """A Llama whose head is sharded along another dimension than its embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        def update_from_config(self, *, config: Any, **others: Any) -> None:
            Llama3Model.Config.update_from_config(self, config=config, **others)
            across = {"weight": dense_param_placement(tp=spmd.S(1))}
            self.lm_head.sharding_config = dataclasses.replace(
                self.lm_head.sharding_config, state_shardings=across
            )


def test_settings_that_would_make_the_copies_differ_are_refused() -> None:
    config = tied_llama()
    build_on_meta(config)
    lopsided = derive(config.model_spec.model, Lopsided.Config)
    spec = dataclasses.replace(config.model_spec, model=lopsided)
    with pytest.raises(UserError, match="are tied, but tensor parallelism would shard them differently"):
        build_on_meta(dataclasses.replace(config, model_spec=spec))
    theirs = OptimizersContainer.Config(param_groups=[])
    with pytest.raises(UserError, match="may update the copies differently"):
        check_layout(dataclasses.replace(config, optimizer=theirs), world_size=2)
