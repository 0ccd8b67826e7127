"""Splits a decoder into pipeline stages by measured times instead of numbers of layers."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torchtitan.config import ParallelismConfig
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_async.training.pipeline.layer_costs import Costs, PartTimer, measure_costs
from titan_async.training.pipeline.schedule import PipelineConfig, is_async
from titan_async.training.telemetry.reporter import Reporter

__all__ = [
    "KNOWN_MODULES",
    "balance_model_spec",
    "balanced_split",
    "count_stages",
    "measures_balance",
    "stage_modules",
]

KNOWN_MODULES = ("tok_embeddings", "layers", "norm", "lm_head")
"""The children of a model that this module can split: torchtitan's text-only decoders."""


def balanced_split(layers: Sequence[int], num_stages: int, *, first: int = 0, last: int = 0) -> list[int]:
    """The number of layers of each stage that minimizes the time of the slowest stage.

    Among equal splits, the most even one (least sum of squares); among these, the one with the fewest layers
    on the early stages, which keep the most activations.

    Args:
        layers: the cost of each layer, in any unit; integers, so that ties are exact.
        num_stages: at most `len(layers) + 2`.
        first: the cost of the first stage besides its layers; it may have none.
        last: the same for the last stage. Every other stage gets at least one layer.

    Raises:
        ValueError: if there are too many stages, or fewer than one.

    Examples:
        Eight layers on four stages, with a head that costs as much as two layers:

        >>> balanced_split([1] * 8, 4, last=2)
        [2, 2, 3, 1]
    """
    if not 1 <= num_stages <= len(layers) + 2:
        raise ValueError(f"{len(layers)} layers do not split into {num_stages} stages")
    slowest = _best_split(layers, num_stages, first, last, evenest_below=None)[0]
    return list(_best_split(layers, num_stages, first, last, evenest_below=slowest)[1])


def _best_split(
    layers: Sequence[int], num_stages: int, first: int, last: int, *, evenest_below: int | None
) -> tuple[int, tuple[int, ...]]:
    """The least (value, layers of each stage), by dynamic programming over stages.

    The value is the largest cost of a stage or, with `evenest_below`, the sum of squares among the
    splits without a larger cost than that.
    """
    done = {0: (0, ())}  # layers on the stages so far -> the best way to place them there
    for stage in range(num_stages):
        at_an_end = stage in (0, num_stages - 1)
        fixed = first * (stage == 0) + last * (stage == num_stages - 1)
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (value, counts) in done.items():
            cost = fixed
            for end in range(start, len(layers) + 1):
                cost += layers[end - 1] if end > start else 0
                if (end == start and not at_an_end) or (evenest_below is not None and cost > evenest_below):
                    continue
                new = max(value, cost) if evenest_below is None else value + cost * cost
                candidate = (new, (*counts, end - start))
                following[end] = min(following.get(end, candidate), candidate)
        done = following
    return done[len(layers)]


def stage_modules(counts: Sequence[int]) -> list[list[str]]:
    """The modules of each stage, in the form of `parallelism.module_fqns_per_model_part`.

    Args:
        counts: how many layers each stage has.
    """
    stages, start = [], 0
    for count in counts:
        stages.append([f"layers.{index}" for index in range(start, start + count)])
        start += count
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages


def count_stages(parallelism: ParallelismConfig) -> int:
    """The number of stages that torchtitan builds: one per rank, or two for interleaved schedules.

    Raises:
        ValueError: if the schedule is unknown.
    """
    name = parallelism.pipeline_parallel_schedule
    single = is_async(parallelism) or issubclass(get_schedule_class(name), PipelineScheduleSingle)
    return parallelism.pipeline_parallel_degree * (1 if single else 2)


def measures_balance(config: Trainer.Config) -> bool:
    """Whether a run splits its model by measured times."""
    return config.pipeline.balance == "measured" and config.parallelism.pipeline_parallel_degree > 1


def balance_model_spec(model_spec: ModelSpec, pipeline: PipelineConfig) -> ModelSpec:
    """A copy of a model's spec that splits the model according to `pipeline.balance`."""
    if pipeline.balance == "layers" or model_spec.pipelining_fn is None:
        return model_spec
    return dataclasses.replace(
        model_spec, pipelining_fn=partial(_pipeline_balanced, model_spec.pipelining_fn)
    )


def _pipeline_balanced(
    pipelining_fn, model: nn.Module, *, parallelism: ParallelismConfig, parallelize_fn: Any, **kwargs: Any
) -> Any:
    timer = PartTimer(model=model, parallelism=parallelism, **kwargs)
    counts = _agree_on_split(timer, count_stages(parallelism))
    parallelism = dataclasses.replace(parallelism, module_fqns_per_model_part=stage_modules(counts))
    return pipelining_fn(model, parallelism=parallelism, parallelize_fn=parallelize_fn, **kwargs)


def _agree_on_split(timer: PartTimer, num_stages: int) -> list[int]:
    """Measure and choose a split on rank 0, print it, and broadcast it."""
    counts: list[int] = []
    if dist.get_rank() == 0:
        costs = measure_costs(timer)
        counts = balanced_split(costs.layers, num_stages, first=costs.embedding, last=costs.head)
        Reporter(is_logging_rank=True, steps=0).log(_describe(counts, costs))
    message = [counts]
    dist.broadcast_object_list(message, src=0)
    return message[0]


def _describe(counts: Sequence[int], costs: Costs) -> str:
    stages, start = [], 0
    for count in counts:
        stages.append(sum(costs.layers[start : start + count]))
        start += count
    stages[0] += costs.embedding
    stages[-1] += costs.head
    slowest, even = max(stages) / 1e6, sum(stages) / len(stages) / 1e6
    return (
        f"stages balanced by measurement: {'+'.join(map(str, counts))} layers, "
        f"slowest stage {slowest:.1f} ms per microbatch ({even:.1f} ms if even)"
    )
