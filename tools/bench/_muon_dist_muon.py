"""Runs torchtitan's DistMuon, which requires CUDA, on CPU under gloo.

Two checks are patched while it is built; computation and communication are unchanged:

- it refuses parameters that are not on a CUDA device (`DistMuon._validate_parameter_storage`);
- it creates `Stream(device=..., priority=0)`, but `torch.cpu.Stream`, which does nothing, has no `device`.

On CPU its two streams do not overlap, as in the other implementations.
"""

from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

__all__ = ["build_dist_muon_on_cpu"]


class _CpuStream(torch.cpu.Stream):
    def __init__(self, device: Any = None, priority: int = -1) -> None:
        super().__init__(priority)


def build_dist_muon_on_cpu(named: list[tuple[str, nn.Parameter]], **options: Any) -> Optimizer:
    """DistMuon on DTensors whose meshes have torchtitan's names for axes."""
    from torchtitan.distributed import flex_shard
    from torchtitan.distributed.flex_shard.dist_muon import DistMuon

    # Each matrix has one owner, selected by cost. Stacks are sharded by experts over every axis, as in
    # torchtitan's configurations of MoE models.
    whole = flex_shard.ComputeLayout({"dp_shard": flex_shard.Owned()})
    by_expert = flex_shard.ComputeLayout({"efsdp": Shard(0), "ep": Shard(0), "dp_shard": Shard(0)})
    kinds = [
        flex_shard.BucketConfig(tuple(names), name)
        for name, names in {
            "matrices": [name for name, param in named if param.ndim == 2],
            "stacks": [name for name, param in named if param.ndim == 3],
        }.items()
        if names
    ]
    with (
        mock.patch.object(torch.cpu, "Stream", _CpuStream),
        mock.patch.object(DistMuon, "_validate_parameter_storage", return_value=torch.device("cpu")),
    ):
        return flex_shard.build_dist_muon(
            [{"params": [param for _, param in named], "param_names": [name for name, _ in named]}],
            compute_sharding_by_fqn={name: by_expert if param.ndim == 3 else whole for name, param in named},
            bucket_configs=kinds,
            **options,
        )
