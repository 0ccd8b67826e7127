"""Checks that the save plans of all ranks cover a checkpoint completely and without overlap."""

import itertools
import logging
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from titan_async.rehearsal.narrow_config import narrowed, prepared
from titan_async.training.checkpoint.ema import keeps_average
from titan_async.training.checkpoint.train_state import (
    EMA_WEIGHTS,
    NEXT_WEIGHTS,
    RANDOM_STATE,
    layout_key,
    random_state,
)
from titan_async.training.models.tying import is_tied, store_once, update_model
from titan_async.training.optimizer.container import feedback_if_delayed
from titan_async.training.pipeline.schedule import delays_gradients

__all__ = ["Entries", "check_plans", "entries_of", "expected_entries", "plan_of"]

Entries = Mapping[str, tuple[int, ...] | None]
"""The entries of a checkpoint by key: the shape of a tensor, None for other values."""

_Region = tuple[tuple[int, int], ...]  # start and end in each dimension


def plan_of(state: dict[str, Any], rank: int) -> SavePlan:
    """The plan of torch.distributed.checkpoint for a rank's part of a state."""
    planner = DefaultSavePlanner()
    values = {
        key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()
    }
    planner.set_up_planner(values, is_coordinator=rank == 0)
    return planner.create_local_plan()


def expected_entries(config: Trainer.Config, world: int, *, divisor: int) -> Entries:
    """The entries that a checkpoint must have: the state of the whole model, built without parallelism.

    Call it through `for_each`, in a process that builds no other model.

    Args:
        config: the recipe's.
        world: ranks of the run, each of which saves its RNG state.
        divisor: of all widths, as in the rehearsal.
    """
    logging.disable(logging.WARNING)  # torchtitan's warnings about a configuration
    with tempfile.TemporaryDirectory() as folder:
        config = narrowed(prepared(config, steps=1, folder=folder), divisor)
    update_model(config, tied_stages=delays_gradients(config.parallelism))
    model = config.model_spec.model.build()
    if is_tied(config.model_spec.model):
        store_once(model)
    delayed = delays_gradients(config.parallelism)
    optimizers = feedback_if_delayed(config.optimizer, delayed).build(model_parts=[model])
    weights = model.state_dict()
    trainer = {"step": 0, "ntokens_seen": 0}
    if delayed:
        buffers = {name: weights[name] for name, _ in model.named_buffers() if name in weights}
        trainer[NEXT_WEIGHTS] = {**dict(model.named_parameters()), **buffers}
    if keeps_average(config):
        trainer[EMA_WEIGHTS] = dict(model.named_parameters())
    dims = ParallelDims.from_config(config.parallelism, world)
    device = torch.device("cpu")
    trainer[RANDOM_STATE] = {layout_key(dims, rank, device): random_state(device) for rank in range(world)}
    data = {f"dp_rank_{rank}": "" for rank in range(dims.dp_replicate * dims.dp_shard)}
    whole = {
        **weights,
        "optimizer": optimizers,
        "lr_scheduler": config.lr_scheduler.build(optimizers=optimizers, training_steps=1),
        "dataloader": {**data, "world_size": 1, "num_workers": 0, "files": ""},
        "train_state": trainer,
    }
    return entries_of([plan_of(whole, rank=0)])


def entries_of(plans: Sequence[SavePlan]) -> Entries:
    """The entries that the plans write; if plans differ, those of the last one."""
    return {
        item.index.fqn: None if item.tensor_data is None else tuple(item.tensor_data.size)
        for plan in plans
        for item in plan.items
    }


def check_plans(plans: Sequence[SavePlan], expected: Entries) -> list[str]:
    """Compare the plans of all ranks with the expected entries; returns one sentence per error.

    The keys must be equal, and every tensor must be covered by regions that do not overlap, each on the same
    number of ranks.

    Args:
        plans: of every rank, in order.
        expected: of the whole model.
    """
    found = entries_of(plans)
    wrong = [f"{key} is saved by no rank" for key in sorted(expected.keys() - found.keys())]
    wrong += [f"{key} is saved but not expected" for key in sorted(found.keys() - expected.keys())]
    regions: dict[str, Counter[_Region]] = defaultdict(Counter)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key, data = item.index.fqn, item.tensor_data
            shape = None if data is None else tuple(data.size)
            if key in expected and shape != expected[key]:
                wrong.append(
                    f"{key} is {_text(shape)} on rank {rank} but {_text(expected[key])} in the model"
                )
            elif data is not None:
                chunk = data.chunk
                regions[key][
                    tuple(
                        (start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
                    )
                ] += 1
    for key, places in regions.items():
        problem = _uncovered(places, found[key] or ())
        if problem:
            wrong.append(f"{key}, of {_text(found[key])}: {problem}")
    if not wrong:
        try:
            DefaultSavePlanner().create_global_plan(list(plans))
        except ValueError as error:
            wrong.append(f"torch.distributed.checkpoint rejects the plans: {error}")
    return wrong


def _uncovered(places: Counter[_Region], shape: tuple[int, ...]) -> str | None:
    """Why regions do not cover a tensor of `shape` exactly once; None if they do."""
    whole = tuple((0, size) for size in shape)
    filled = {region: ranks for region, ranks in places.items() if all(start < end for start, end in region)}
    for region in filled:
        if any(start < 0 or end > size for (start, end), size in zip(region, shape, strict=True)):
            return f"region {_text(region)} exceeds it"
    # Every edge of a region cuts the whole tensor, so each cell is either inside or outside a region.
    cuts = [
        sorted({edge for region in (whole, *filled) for edge in region[dimension]})
        for dimension in range(len(shape))
    ]
    covering: Counter[_Region] = Counter()
    for region in filled:
        covering.update(
            itertools.product(
                *(
                    [pair for pair in itertools.pairwise(edges) if start <= pair[0] and pair[1] <= end]
                    for edges, (start, end) in zip(cuts, region, strict=True)
                )
            )
        )
    for cell in itertools.product(*(itertools.pairwise(edges) for edges in cuts)):
        if covering[cell] != 1:
            return f"{_text(cell)} is in {covering[cell] or 'no'} region{'s' * (covering[cell] > 1)}"
    if len(set(filled.values())) > 1:
        return f"some regions are on {min(filled.values())} ranks, others on {max(filled.values())}"
    return None


def _text(shape: Sequence | None) -> str:
    if shape is None:
        return "not a tensor"
    if shape and isinstance(shape[0], tuple):
        return "[" + ", ".join(f"{start}:{end}" for start, end in shape) + "]"
    return "[" + ", ".join(map(str, shape)) + "]"
