"""What clipping and updating a stage's parameters costs: elementwise passes, and Muon's products and traffic.

Muon's matrices are taken to be distributed evenly over the ranks that hold parts of them, except that no rank
has less than one whole matrix where there are fewer matrices than ranks; `titan_async.optim.ownership`, which
assigns the most expensive first, comes close.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.trainer import Trainer

from titan_async.optim.coefficients import resolve_coefficients
from titan_async.optim.muon_options import DTYPES
from titan_async.optim.orthogonalization import orthogonalization_cost
from titan_async.planning.layout import Layout
from titan_async.planning.network import Network
from titan_async.planning.optimizer_groups import feeds_back, group_of, groups_of
from titan_async.planning.parts import Weight

__all__ = ["UpdateCost", "update_cost"]

_PASS_BYTES = {"Muon": 32, "AdamW": 28, "Adam": 28, "Lion": 20, "SGD": 20}
"""Bytes that an update moves for each parameter of a rank, in float32: it reads the weight, the gradient and
the state, and writes weight and state; for Muon also what it packs and what comes back."""

_CLIP_BYTES = 12
"""The norm reads a gradient; clipping reads and writes it."""


@dataclass(frozen=True)
class UpdateCost:
    """Of one stage, on each of its ranks."""

    seconds: float
    matrix_flops: float
    """Of orthogonalization, on the rank that has most."""
    sent_bytes: float
    """By Muon's all-to-alls, the mean of the ranks."""


def update_cost(
    config: Trainer.Config, layout: Layout, network: Network, weights: Sequence[Weight]
) -> UpdateCost:
    """Clip and update of a stage that holds these weights."""
    accelerator, corrects = network.cluster.accelerator, feeds_back(config, layout)
    groups = groups_of(config)
    moved = total = dearest = 0.0
    products = 0.0  # seconds of all matrices, over all ranks
    sent = {False: 0.0, True: 0.0}
    for weight in weights:
        group = group_of(weight.name, groups)
        held = weight.size / (layout.dp_shard * layout.tp)  # with expert parallelism too
        feedback = _feedback_bytes(config, group.optimizer_name) if corrects else 0
        moved += held * (_PASS_BYTES.get(group.optimizer_name, 28) + _CLIP_BYTES + feedback)
        if group.optimizer_name == "Muon":
            dtype = group.optimizer_kwargs.get("compute_dtype", "bfloat16")
            cost, matrices = _orthogonalization(weight, group.optimizer_kwargs)
            total, dearest = total + cost * matrices, max(dearest, cost)
            small, large = sorted(weight.shape[-2:])
            share = accelerator.product_share(dtype, small, small, large)
            products += cost * matrices / (accelerator.peak(dtype) * share)
            sent[weight.expert] += _sent_bytes(layout, weight, DTYPES[dtype].itemsize)
    most = max(total / (layout.data_parallel * layout.tp), dearest)
    travelling = network.exchange_seconds(network.groups.holders, sent[False])
    travelling += network.exchange_seconds(network.groups.expert_holders, sent[True])
    # While one bucket is computed the next is on its way, so that the longer of the two counts.
    longer = max(products * most / total if total else 0.0, travelling)
    passes = moved / accelerator.moved_bandwidth
    return UpdateCost(longer + passes, most, sent[False] + sent[True])


def _feedback_bytes(config: Trainer.Config, optimizer: str) -> int:
    """Bytes that error feedback adds to an update for each parameter in float32, on an accelerator: what each
    of its operations (`titan_async.optim.feedback_history`) reads and writes. Compiled, it reads and writes
    its history in the pass that AdamW makes anyway."""
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
    """Operations for one logical matrix of a weight, the mean of them, and how many it has."""
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
    """What a rank sends of a weight's matrices: to their owners, and results to all ranks that hold parts."""
    parts, size = layout.dp_shard * layout.tp, float(weight.size * each)
    if weight.expert:
        parts, size = parts // layout.ep, size / layout.ep
    holders = parts * layout.dp_replicate
    return size * ((parts - 1) + (holders - 1)) / parts / holders
