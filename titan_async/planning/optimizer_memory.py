"""How FSDP2 and expert parallelism divide parameters, and what optimizers keep of them on a rank."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.trainer import Trainer

from titan_async.optim.distributed_orthogonalization import LOCAL_BUCKET_NUMEL
from titan_async.optim.muon_options import DTYPES
from titan_async.planning.layout import Layout
from titan_async.planning.optimizer_groups import feeds_back, group_of, groups_of
from titan_async.planning.parts import Weight
from titan_async.training.optimizer.config import MuonConfig
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.optimizer.trial import state_elements, try_out

__all__ = ["Shards", "optimizer_bytes", "shards_of"]


@dataclass(frozen=True)
class Shards:
    """How many numbers of a parameter a rank holds; of the ranks, the one that holds the most."""

    sharded: int
    """Of the optimizer's parameter."""
    unsharded: int
    """Of what forward and backward use: all of it, or this rank's experts."""
    gathering: int
    """Ranks over which FSDP shards it."""


def shards_of(weight: Weight, layout: Layout) -> Shards:
    """How FSDP2 and expert parallelism divide a parameter, each rounding up; tensor parallelism evenly."""
    first, rest = weight.shape[0], weight.size // weight.shape[0]
    ranks = layout.dp_shard
    if weight.expert and layout.ep > 1:
        ranks = max(layout.dp_shard * layout.tp // layout.ep, 1)
        tp = 1
        experts = -(-first // layout.ep)
    else:
        tp, experts = layout.tp, first
    if weight.expert and ranks * layout.ep > first:
        # torchtitan shards the second dimension where there are more ranks than experts.
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
    """Bytes of state by name, and the most that a step holds beyond it.

    Error feedback around another optimizer than Muon remembers its parameters during the step. An optimizer
    of another package is asked what it keeps; one that cannot answer is counted as AdamW.
    """
    own = isinstance(config.optimizer, AsyncOptimizers.Config)
    groups, corrects = groups_of(config), feeds_back(config, layout)
    state: Counter[str] = Counter()
    snapshot, whole, of_muon = 0, 0, []
    for weight in weights:
        group, size = group_of(weight.name, groups), shards[weight.name].sharded
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
    """What a step of Muon in bfloat16 holds for a while.

    Matrices that stay on their rank are worked on a bucket at a time, with six times its size; of those that
    travel two buckets are under way, each as it was sent and as it came in. Measured, not derived.
    """
    staying = [w for w in weights if shards[w.name].gathering == 1 or (w.expert and _is_whole(w, layout))]
    spread = [w for w in weights if w not in staying]
    here = [2 * shards[w.name].sharded for w in staying]
    there = 2 * sum(shards[w.name].sharded for w in spread)
    largest = max((2 * w.shape[-1] * w.shape[-2] for w in spread), default=0)
    # The CPU works on few at a time, so that they stay in its cache.
    at_a_time = max(min(2 * LOCAL_BUCKET_NUMEL if on_cpu else bucket, sum(here)), max(here, default=0))
    return int(max(6 * at_a_time, 5 * max(min(there, 2 * bucket / layout.dp_shard), largest)))


def _is_whole(weight: Weight, layout: Layout) -> bool:
    """Whether each expert's matrix lies on one rank."""
    return layout.dp_shard * layout.tp <= weight.shape[0]


def _state_of(group: ParamGroupConfig) -> list[tuple[str, int, str]]:
    """Name, number and dtype of the tensors that an optimizer keeps for each parameter."""
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
