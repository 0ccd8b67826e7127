"""State of optimizers on a rank under FSDP2 and expert parallelism, and time and traffic of an update.

An update costs elementwise passes and, with Muon, matrix products and all-to-alls. Muon's matrices are
assumed to be distributed evenly over the ranks that hold parts of them, with at least one whole matrix per
rank. Muon assigns the most expensive matrices first, which is close to even.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.trainer import Trainer

from titan_async.optim.coefficients import resolve_coefficients
from titan_async.optim.distributed_orthogonalization import LOCAL_BUCKET_NUMEL
from titan_async.optim.muon_options import DTYPES
from titan_async.optim.orthogonalization import orthogonalization_cost
from titan_async.planning.layout import Layout
from titan_async.planning.network import Network
from titan_async.planning.traced_parts import Weight
from titan_async.training.optimizer.config import MuonConfig, match_group
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.optimizer.trial import state_elements, try_out

__all__ = ["Shards", "UpdateCost", "optimizer_bytes", "shards_of", "update_cost"]

_PASS_BYTES = {"Muon": 32, "AdamW": 28, "Adam": 28, "Lion": 20, "SGD": 20}
"""Bytes that an update moves per local parameter in float32: it reads weight, gradient and state, and writes
weight and state; Muon also packs and unpacks matrices."""

_CLIP_BYTES = 12
"""The norm reads a gradient; clipping reads and writes it."""


def _groups_of(config: Trainer.Config) -> list[ParamGroupConfig]:
    """The parameter groups of a configuration."""
    optimizer = config.optimizer
    own = isinstance(optimizer, AsyncOptimizers.Config)
    return list(optimizer.resolved_groups() if own else optimizer.param_groups)


def _group_of(name: str, groups: Sequence[ParamGroupConfig]) -> ParamGroupConfig:
    """The group of the parameter of that name."""
    return groups[_first_match(name, tuple(group.pattern for group in groups))]


@functools.lru_cache(maxsize=100_000)
def _first_match(name: str, patterns: tuple[str, ...]) -> int:
    return match_group(name, [ParamGroupConfig(pattern=p, optimizer_name="") for p in patterns])


def _has_feedback(config: Trainer.Config, layout: Layout) -> bool:
    """Whether error feedback is active."""
    optimizer = config.optimizer
    if not (layout.delayed and isinstance(optimizer, AsyncOptimizers.Config)):
        return False
    return optimizer.error_feedback.enable and optimizer.error_feedback.strength > 0


@dataclass(frozen=True)
class Shards:
    """Elements of a parameter on a rank, the maximum over ranks."""

    sharded: int
    """Of the optimizer's parameter."""
    unsharded: int
    """Of the unsharded parameter: all elements, or this rank's experts."""
    gathering: int
    """Ranks over which FSDP shards it."""


def shards_of(weight: Weight, layout: Layout) -> Shards:
    """The shards of a parameter: FSDP2 and expert parallelism round up, tensor parallelism divides evenly."""
    first, rest = weight.shape[0], weight.size // weight.shape[0]
    ranks = layout.dp_shard
    if weight.expert and layout.ep > 1:
        ranks = max(layout.dp_shard * layout.tp // layout.ep, 1)
        tp = 1
        experts = -(-first // layout.ep)
    else:
        tp, experts = layout.tp, first
    if weight.expert and ranks * layout.ep > first:
        # torchtitan shards the second dimension if there are more ranks than experts.
        second, rest = weight.shape[1], rest // weight.shape[1]
        piece = -(-second // ranks)
        return Shards(experts * piece * rest // tp, experts * piece * ranks * rest // tp, ranks)
    piece = -(-experts // ranks)
    return Shards(piece * rest // tp, piece * ranks * rest // tp, ranks)


def optimizer_bytes(
    config: Trainer.Config,
    layout: Layout,
    weights: Sequence[Weight],
    shards: Mapping[str, Shards],
    on_cpu: bool,
) -> tuple[Counter[str], int]:
    """Bytes of state by name, and the peak of a step's temporary memory.

    Error feedback for other optimizers than Muon keeps a copy of the parameters during the step. A trial step
    determines the state of another package's optimizer; if it fails, AdamW's is assumed.
    """
    own = isinstance(config.optimizer, AsyncOptimizers.Config)
    groups, corrects = _groups_of(config), _has_feedback(config, layout)
    state: Counter[str] = Counter()
    snapshot, whole, of_muon = 0, 0, []
    for weight in weights:
        group, size = _group_of(weight.name, groups), shards[weight.name].sharded
        cls = config.optimizer.class_of(group.optimizer_name) if own else None
        kept = cls and state_elements(cls, group.optimizer_kwargs, weight.shape)
        if cls and kept is not None:
            gathers = try_out(cls, group.optimizer_kwargs, [len(weight.shape)]).needs_whole
            share = 1.0 if gathers else size / weight.size
            state[f"state of {group.optimizer_name}"] += int(sum(kept.values()) * share) * _itemsize(
                "auto", config
            )
            whole += 2 * weight.size * _itemsize("auto", config) * (gathers and size < weight.size)
        else:
            for name, count, dtype in _state_of(group):
                state[name] += size * count * _itemsize(dtype, config)
        if corrects:
            state["error feedback"] += size * _itemsize(config.optimizer.error_feedback.dtype, config)
        if group.optimizer_name == "Muon":
            of_muon.append(weight)
        elif corrects:
            snapshot += size * _itemsize("auto", config)
    bucket = config.optimizer.muon.bucket_mb if own else MuonConfig().bucket_mb
    return state, max(snapshot + whole, _muon_extra(of_muon, shards, layout, bucket * 2**20, on_cpu))


def _muon_extra(
    weights: Sequence[Weight], shards: Mapping[str, Shards], layout: Layout, bucket: float, on_cpu: bool
) -> int:
    """Temporary memory of a step of Muon in bfloat16.

    Local matrices are processed one bucket at a time, with six times its size; of distributed matrices two
    buckets are in flight, each with its send and receive buffer. Measured, not derived.
    """
    local = [w for w in weights if shards[w.name].gathering == 1 or (w.expert and _is_whole(w, layout))]
    distributed = [w for w in weights if w not in local]
    sizes = [2 * shards[w.name].sharded for w in local]
    sharded = 2 * sum(shards[w.name].sharded for w in distributed)
    largest = max((2 * w.shape[-1] * w.shape[-2] for w in distributed), default=0)
    # The CPU processes few matrices at a time, so that they fit into its cache.
    at_a_time = max(min(2 * LOCAL_BUCKET_NUMEL if on_cpu else bucket, sum(sizes)), max(sizes, default=0))
    return int(max(6 * at_a_time, 5 * max(min(sharded, 2 * bucket / layout.dp_shard), largest)))


def _is_whole(weight: Weight, layout: Layout) -> bool:
    """Whether each expert's matrix lies on one rank."""
    return layout.dp_shard * layout.tp <= weight.shape[0]


def _state_of(group: ParamGroupConfig) -> list[tuple[str, int, str]]:
    """Name, number and dtype of an optimizer's state tensors per parameter."""
    options = group.optimizer_kwargs
    match group.optimizer_name:
        case "Muon":
            return [("momentum", 1, options.get("momentum_dtype", "auto"))]
        case "Lion":
            return [("momentum", 1, "auto")]
        case "SGD":
            return [("momentum", 1, "auto")] if options.get("momentum") else []
        case _:
            return [("AdamW moments", 2, "auto")]


def _itemsize(dtype: str, config: Trainer.Config) -> int:
    if dtype == "auto":
        return max(4, TORCH_DTYPE_MAP[config.training.dtype].itemsize)
    return DTYPES[dtype].itemsize


@dataclass(frozen=True)
class UpdateCost:
    """Cost of an update on each rank of a stage."""

    seconds: float
    matrix_flops: float
    """Of orthogonalization, the maximum over ranks."""
    sent_bytes: float
    """By Muon's all-to-alls, the mean over ranks."""


def update_cost(
    config: Trainer.Config, layout: Layout, network: Network, weights: Sequence[Weight]
) -> UpdateCost:
    """The cost of clipping and updating a stage's weights."""
    accelerator, corrects = network.cluster.accelerator, _has_feedback(config, layout)
    groups = _groups_of(config)
    moved = total = most_expensive = 0.0
    products = 0.0  # seconds of all matrices, over all ranks
    sent = {False: 0.0, True: 0.0}
    for weight in weights:
        group = _group_of(weight.name, groups)
        held = weight.size / (layout.dp_shard * layout.tp)  # with expert parallelism too
        feedback = _feedback_bytes(config, group.optimizer_name) if corrects else 0
        moved += held * (_PASS_BYTES.get(group.optimizer_name, 28) + _CLIP_BYTES + feedback)
        if group.optimizer_name == "Muon":
            dtype = group.optimizer_kwargs.get("compute_dtype", "bfloat16")
            cost, matrices = _orthogonalization(weight, group.optimizer_kwargs)
            total, most_expensive = total + cost * matrices, max(most_expensive, cost)
            small, large = sorted(weight.shape[-2:])
            share = accelerator.product_share(dtype, small, small, large)
            products += cost * matrices / (accelerator.peak(dtype) * share)
            sent[weight.expert] += _sent_bytes(layout, weight, DTYPES[dtype].itemsize)
    most = max(total / (layout.data_parallel * layout.tp), most_expensive)
    exchanged = network.exchange_seconds(network.groups.holders, sent[False])
    exchanged += network.exchange_seconds(network.groups.expert_holders, sent[True])
    # Computation of a bucket overlaps with the all-to-all of the next, so the longer of the two counts.
    longer = max(products * most / total if total else 0.0, exchanged)
    passes = moved / accelerator.moved_bandwidth
    return UpdateCost(longer + passes, most, sent[False] + sent[True])


def _feedback_bytes(config: Trainer.Config, optimizer: str) -> int:
    """Bytes that error feedback adds to an update per parameter in float32, on an accelerator.

    They are those that its operations (`titan_async.optim.feedback_history`) read and write. Compiled, it
    reads and writes only its history, within AdamW's own pass.
    """
    feedback = config.optimizer.error_feedback
    each = 4 if feedback.dtype == "auto" else DTYPES[feedback.dtype].itemsize  # of the history
    if feedback.compile and optimizer == "AdamW":
        return 2 * each
    if feedback.level == "gradient":
        clone, change, correction, unless_skipped = 8, 8 + each, 12, 12
        return clone + change + correction + unless_skipped
    cast = 0 if each == 4 else each + 4
    snapshot, displacement, unless_skipped, change, correction, history = 8, 12, 12, 8 + each, 12, 4 + each
    return snapshot + displacement + cast + unless_skipped + change + correction + history


def _orthogonalization(weight: Weight, options: dict[str, Any]) -> tuple[float, int]:
    """FLOPs per logical matrix of a weight, the mean over its matrices, and their number."""
    coefficients = options.get("ns_coefficients", "standard")
    if not isinstance(coefficients, str):
        coefficients = tuple(tuple(c) if isinstance(c, list | tuple) else c for c in coefficients)
    form, steps = options.get("ns_form", "auto"), options.get("ns_steps", 5)
    rows, cols = weight.shape[-2:]
    shapes = [(rows, cols)]
    if options.get("split_sizes"):
        along_rows = options.get("split_dim", -2) == -2
        shapes = [(size, cols) if along_rows else (rows, size) for size in options["split_sizes"]]
    costs = [_operations(r, c, coefficients, steps, form) for r, c in shapes]
    return sum(costs) / len(costs), math.prod(weight.shape[:-2]) * len(costs)


@functools.lru_cache(maxsize=1000)
def _operations(rows: int, cols: int, coefficients: Any, steps: int, form: str) -> float:
    return orthogonalization_cost(rows, cols, resolve_coefficients(coefficients, steps), form)


def _sent_bytes(layout: Layout, weight: Weight, each: int) -> float:
    """Bytes that a rank sends for a weight: shards to the owners of its matrices, and updates back."""
    parts, size = layout.dp_shard * layout.tp, float(weight.size * each)
    if weight.expert:
        parts, size = parts // layout.ep, size / layout.ep
    holders = parts * layout.dp_replicate
    return size * ((parts - 1) + (holders - 1)) / parts / holders
