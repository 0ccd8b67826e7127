"""Stages by measured times: the split is optimal, the same on every rank, and training follows it."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes import Pools, WorkerPool
from tests.support.selection import slow
from tests.support.training import RECIPE, train
from titan_async.config.device import ensure_device
from titan_async.training.prepare import adapt_to_cpu

ensure_device()

from torchtitan.config import derive  # noqa: E402
from torchtitan.models.llama3 import Llama3Model  # noqa: E402

from titan_async.errors import UserError  # noqa: E402
from titan_async.recipes.debug import debug  # noqa: E402
from titan_async.training.pipeline import balance, layer_costs  # noqa: E402
from titan_async.training.pipeline.balance import balanced_split, count_stages, stage_modules  # noqa: E402
from titan_async.training.pipeline.layer_costs import Costs, PartTimer, measure_costs  # noqa: E402
from titan_async.training.pipeline.schedule import PipelineConfig  # noqa: E402
from titan_async.training.preflight.check import check  # noqa: E402


class WithEncoder(Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.vision_encoder = config.lm_head.build()


def stage_costs(counts: tuple[int, ...], layers: list[int], first: int, last: int) -> list[int]:
    ends = list(itertools.accumulate(counts))
    stages = [sum(layers[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    stages[0] += first
    stages[-1] += last
    return stages


def all_splits(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for counts in itertools.product(range(num_layers + 1), repeat=num_stages):
        if sum(counts) == num_layers and all(counts[1:-1]):
            yield counts


@given(
    layers=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    num_stages=st.integers(1, 5),
    first=st.integers(0, 20),
    last=st.integers(0, 20),
)
def test_no_split_is_better(layers: list[int], num_stages: int, first: int, last: int) -> None:
    if num_stages > len(layers) + 2:
        with pytest.raises(ValueError, match=f"{len(layers)} layers do not split into {num_stages} stages"):
            balanced_split(layers, num_stages, first=first, last=last)
        return

    def badness(counts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        stages = stage_costs(counts, layers, first, last)
        return max(stages), sum(cost**2 for cost in stages), counts

    best = min(all_splits(len(layers), num_stages), key=badness)
    assert balanced_split(layers, num_stages, first=first, last=last) == list(best)


@pytest.mark.parametrize(
    ("layers", "num_stages", "head", "counts"),
    [
        ([10] * 8, 2, 0, [4, 4]),
        ([10] * 8, 2, 20, [5, 3]),
        ([10] * 4, 3, 40, [2, 2, 0]),  # the head alone
        ([10] * 5, 2, 0, [2, 3]),  # early stages keep more activations
        ([1000, 10, 10, 10], 2, 0, [1, 3]),
        ([10] * 3, 1, 5, [3]),
    ],
)
def test_splits_by_hand(layers: list[int], num_stages: int, head: int, counts: list[int]) -> None:
    assert balanced_split(layers, num_stages, last=head) == counts


def test_a_deep_model_splits_at_once() -> None:
    assert balanced_split([7_000_000] * 126, 64, first=1_000_000, last=20_000_000) == [2] * 63 + [0]


def test_stage_modules_are_those_of_torchtitan() -> None:
    from titan_async.training._titan_internals import split_layers

    assert stage_modules([1, 2, 2, 1]) == split_layers(4, 6, 1, 1)
    assert stage_modules([0, 2, 0]) == [["tok_embeddings"], ["layers.0", "layers.1"], ["norm", "lm_head"]]


def test_count_stages() -> None:
    def stages(schedule: str) -> int:
        parallelism = dataclasses.replace(
            debug().parallelism, pipeline_parallel_degree=4, pipeline_parallel_schedule=schedule
        )
        return count_stages(parallelism)

    assert [stages(name) for name in ("Async2BW", "1f1b", "GPipe")] == [4, 4, 4]
    assert [stages(name) for name in ("Interleaved1F1B", "ZBVZeroBubble")] == [8, 8]


def timer_of(config, **changes) -> PartTimer:
    """A timer of a recipe's model, built as the trainer builds it on a machine without accelerator."""
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.config.override import apply_overrides

    config = adapt_to_cpu(config)
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    if config.override.imports:
        apply_overrides(config.override, config)
    with torch.device("meta"):
        model = model_config.build().to(TORCH_DTYPE_MAP[config.training.dtype])
    fields = {
        "model": model,
        "model_config": model_config,
        "device": torch.device("cpu"),
        "training": config.training,
        "parallelism": config.parallelism,
        "parallel_dims": None,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": "",
        "loss_fn": config.loss.build(compile_config=config.compile),
    }
    return PartTimer(**fields | changes)


def small(seq_len: int = 32, **changes):
    config = debug()
    muon = dataclasses.replace(config.optimizer.muon, compute_dtype="float32")
    fields = {
        "training": dataclasses.replace(config.training, seq_len=seq_len),
        "optimizer": dataclasses.replace(config.optimizer, muon=muon),
    }
    return dataclasses.replace(config, **fields | changes)


def test_a_wider_layer_costs_more_and_kinds_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.common.config_utils import make_ffn_config

    config = small(seq_len=64)
    layers = config.model_spec.model.layers
    norm = layers[0].feed_forward.w1.param_init
    wide = make_ffn_config(dim=192, hidden_dim=4096, w1_param_init=norm, w2w3_param_init=norm)
    layers[2] = dataclasses.replace(layers[2], feed_forward=wide)
    timed = []
    time = PartTimer.time
    monkeypatch.setattr(PartTimer, "time", lambda self, *names: timed.append(names) or time(self, *names))
    costs = measure_costs(timer_of(config))
    assert timed == [("tok_embeddings",), ("layers.0",), ("layers.2",), ("norm", "lm_head")]
    narrow = costs.layers[0]
    assert costs.layers == (narrow, narrow, costs.layers[2], narrow, narrow, narrow)
    assert costs.layers[2] > 1.5 * narrow > 0 and costs.embedding > 0 and costs.head > 0


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"_WARM_UPS": 1, "_REPETITIONS": 2, "_STEPS": 1}.items():
        monkeypatch.setattr(layer_costs, name, number)


def test_measuring_leaves_the_random_state_and_the_model(few_steps: None) -> None:
    timer = timer_of(small())
    before = torch.get_rng_state()
    measure_costs(timer)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in timer.model.parameters())
    assert len(timer.model.layers) == 6


def test_a_part_has_the_runs_dtype_and_checkpointing(few_steps: None) -> None:
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common.feed_forward import FeedForward

    config = small(activation_checkpoint=FullAC.Config(), loss=ChunkedLossWrapper.Config(num_chunks=2))
    config = dataclasses.replace(
        config,
        parallelism=dataclasses.replace(config.parallelism, pipeline_parallel_schedule="1F1B"),
        training=dataclasses.replace(config.training, mixed_precision_param="bfloat16"),
    )
    timer = timer_of(config)
    outputs: list[torch.Tensor] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: outputs.append(output) if isinstance(module, FeedForward) else None
    )
    with hook:
        timer.time("layers.1")
    assert [output.dtype for output in outputs] == [torch.bfloat16] * 2 * 3  # three steps, each twice
    assert timer.time("norm", "lm_head") > 0
    assert timer.loss_fn.lm_head is None


@pytest.mark.parametrize(
    ("family", "flavor"), [slow("qwen3", "debugmodel_moe"), ("deepseek_v3", "debugmodel")]
)
def test_other_decoders_are_measured(few_steps: None, family: str, flavor: str) -> None:
    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry(flavor)
    parallelism = dataclasses.replace(debug().parallelism, pipeline_parallel_schedule="1F1B")
    costs = measure_costs(timer_of(small(model_spec=spec, parallelism=parallelism)))
    assert len(costs.layers) == len(spec.model.layers)
    kinds = {layer.moe is None for layer in spec.model.layers}
    assert len(set(costs.layers)) == len(kinds)
    assert min(costs.embedding, *costs.layers, costs.head) > 0


def run(rank, group, folder, schedule, *, costs=None, stages=None):
    """Train three steps with stages balanced by measurement, by the given `costs`, or split into `stages`.

    Returns the modules of this rank's stages and their weights.
    """
    os.environ.update(LOCAL_RANK=str(rank), LOG_RANK="0,1")
    measured = balance.measure_costs
    if costs is not None:
        balance.measure_costs = lambda timer: costs[rank]
    config = small(
        dump_folder=folder,
        pipeline=PipelineConfig(balance="layers" if stages else "measured"),
        validator=dataclasses.replace(debug().validator, enable=False),
        checkpoint=dataclasses.replace(debug().checkpoint, enable=False),
        lr_scheduler=dataclasses.replace(debug().lr_scheduler, warmup_steps=1),
    )
    parallelism = dataclasses.replace(
        config.parallelism,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule=schedule,
        module_fqns_per_model_part=stages,
    )
    training = dataclasses.replace(config.training, steps=3)
    trainer = dataclasses.replace(config, parallelism=parallelism, training=training).build()
    try:
        trainer.train()
        weights = {
            name: getattr(weight, "full_tensor", lambda weight=weight: weight)().detach().clone()
            for part in trainer.model_parts
            for name, weight in part.named_parameters()
        }
        return [list(part.layers) for part in trainer.model_parts], weights
    finally:
        balance.measure_costs = measured
        trainer.close()


@pytest.fixture(scope="module")
def pool(trainer_pools: Pools) -> WorkerPool:
    return trainer_pools(2)


@pytest.mark.parametrize(
    ("schedule", "layers"),
    [
        ("Async2BW", [[["0", "1", "2", "3"]], [["4", "5"]]]),
        slow("1F1B", [[["0", "1", "2", "3"]], [["4", "5"]]]),
        slow("Interleaved1F1B", [[["0", "1"], ["4", "5"]], [["2", "3"], []]]),
    ],
)
def test_all_ranks_build_the_split_of_rank_0(pool: WorkerPool, tmp_path: Path, schedule, layers) -> None:
    costs = [Costs(1, (10,) * 6, 20), Costs(90, (10, 10, 10, 10, 10, 90), 1)]
    results = pool.run(2, run, str(tmp_path), schedule, costs=costs, timeout=240)
    assert [names for names, _ in results] == layers


def test_training_equals_a_run_with_that_split(pool: WorkerPool, tmp_path: Path) -> None:
    measured = pool.run(2, run, str(tmp_path), "Async2BW", timeout=240)
    stages = stage_modules([len(names[0]) for names, _ in measured])
    prescribed = pool.run(2, run, str(tmp_path), "Async2BW", stages=stages, timeout=240)
    for (names, weights), (other_names, other_weights) in zip(measured, prescribed, strict=True):
        assert names == other_names and weights.keys() == other_weights.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, other_weights[name]), name


@pytest.mark.slow
def test_a_run_resumes_from_a_checkpoint_of_another_split(tmp_path: Path) -> None:
    flags = ("--validator.no-enable", "--lr_scheduler.warmup_steps", 1, "--metrics.log_freq", 1)
    uneven = ("--parallelism.pipeline_parallel_last_stage_less_layers", 5)
    first = train(tmp_path, "--training.steps", 2, *flags, *uneven, recipe=RECIPE)
    assert (first.status, first.err) == (0, "")
    assert "balanced" not in first.out
    second = train(tmp_path, "--training.steps", 4, *flags, "--pipeline.balance", "measured", recipe=RECIPE)
    assert (second.status, second.err, second.steps) == (0, "", [3, 4])
    pattern = (
        r"^stages balanced by measurement: (\d)\+(\d) layers, "
        r"slowest stage [\d.]+ ms per microbatch \([\d.]+ ms if even\)$"
    )
    (counts,) = re.findall(pattern, second.out, re.MULTILINE)
    assert sum(map(int, counts)) == 6


def refusal(config, **parallelism) -> str:
    config = dataclasses.replace(
        config,
        pipeline=PipelineConfig(balance="measured"),
        parallelism=dataclasses.replace(config.parallelism, **parallelism),
    )
    degrees = config.parallelism.pipeline_parallel_degree, config.parallelism.data_parallel_shard_degree
    with pytest.raises(UserError) as caught:
        check(config, world_size=degrees[0] * max(degrees[1], 1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("parallelism", "words"),
    [
        (
            {"module_fqns_per_model_part": [["tok_embeddings"], ["norm", "lm_head"]]},
            ['pipeline.balance = "measured"', "unset module_fqns_per_model_part", '"layers"'],
        ),
        (
            {"pipeline_parallel_layers_per_stage": 4},
            ['pipeline.balance = "measured"', "unset pipeline_parallel_layers_per_stage", '"layers"'],
        ),
        (
            {"pipeline_parallel_degree": 9, "pipeline_parallel_schedule": "1F1B"},
            ["6 layers", "9 stages", "lower parallelism.pipeline_parallel_degree"],
        ),
        (
            {"pipeline_parallel_degree": 5, "pipeline_parallel_schedule": "Interleaved1F1B"},
            ["6 layers", "10 stages", "lower parallelism.pipeline_parallel_degree"],
        ),
        (
            {
                "data_parallel_shard_degree": 2,
                "expert_parallel_degree": 2,
                "pipeline_parallel_schedule": "1F1B",
            },
            ['pipeline.balance = "measured"', "expert_parallel_degree = 2", "set it to 1", '"layers"'],
        ),
    ],
)
def test_mistakes(tmp_path: Path, parallelism: dict, words: list[str]) -> None:
    line = refusal(small(dump_folder=str(tmp_path)), **parallelism)
    assert [word for word in words if word not in line] == []


def test_a_model_with_other_parts_is_refused(tmp_path: Path) -> None:
    model = debug().model_spec.model
    spec = dataclasses.replace(debug().model_spec, model=derive(model, WithEncoder.Config))
    line = refusal(small(dump_folder=str(tmp_path), model_spec=spec))
    assert 'pipeline.balance = "measured"' in line
    assert "llama3 has layers, lm_head, norm, tok_embeddings, vision_encoder" in line


def test_one_stage_is_not_balanced(tmp_path: Path) -> None:
    config = small(dump_folder=str(tmp_path), pipeline=PipelineConfig(balance="measured"))
    parallelism = dataclasses.replace(
        config.parallelism, pipeline_parallel_degree=1, pipeline_parallel_layers_per_stage=4
    )
    check(dataclasses.replace(config, parallelism=parallelism), world_size=1)
