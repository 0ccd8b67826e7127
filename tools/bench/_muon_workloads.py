"""The matrices that Muon updates in the benchmark, and their sharding."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Shard, distribute_tensor

__all__ = ["ASPECTS", "Case", "Matrix", "cases", "make_matrix", "parameter", "place", "workload"]

ASPECTS = [1, 2, 4, 8]


@dataclass(frozen=True)
class Matrix:
    """A parameter: a matrix [rows, cols], or a stack of them [experts, rows, cols]."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_stack(self) -> bool:
        return len(self.shape) == 3


@dataclass(frozen=True)
class Case:
    """A workload on a number of ranks."""

    workload: str
    ranks: int
    layout: str
    """ "whole" on one rank, "FSDP" (rows sharded), "EP" (experts sharded, other matrices by rows), or
    "EP x FSDP" (experts over one dimension of the mesh, their rows over the other)."""

    def __str__(self) -> str:
        return f"{self.workload}, {self.ranks} rank{'s' * (self.ranks > 1)}, {self.layout}"


def _dense(layers: int, dim: int, kv: int, hidden: int) -> Iterator[Matrix]:
    for layer in range(layers):
        for name, rows in [("wq", dim), ("wk", kv), ("wv", kv), ("wo", dim)]:
            yield Matrix(f"layers.{layer}.attention.{name}", (rows, dim))
        for name, shape in [("gate", (hidden, dim)), ("up", (hidden, dim)), ("down", (dim, hidden))]:
            yield Matrix(f"layers.{layer}.feed_forward.{name}", shape)


def _moe(layers: int, dim: int, kv: int, hidden: int, experts: int) -> Iterator[Matrix]:
    for layer in range(layers):
        for name, rows in [("wq", dim), ("wk", kv), ("wv", kv), ("wo", dim)]:
            yield Matrix(f"layers.{layer}.attention.{name}", (rows, dim))
        for name, shape in [("w1", (hidden, dim)), ("w2", (dim, hidden)), ("w3", (hidden, dim))]:
            yield Matrix(f"layers.{layer}.experts.{name}", (experts, *shape))


def workload(name: str, layers: int, quick: bool = False) -> list[Matrix]:
    """The parameters of a workload, or small ones of the same kinds if ``quick``."""
    if name.startswith("aspect "):
        aspect, side = int(name.split()[1]), 16 if quick else 512
        return [Matrix(f"wide.{index}", (side, aspect * side)) for index in range(2)]
    if name == "dense":  # SmolLM2-360M: 15 heads of 64, 5 of them for keys and values
        return list(_dense(1, 24, 8, 64) if quick else _dense(layers, 960, 320, 2560))
    if name == "moe":  # a stage of a mixture of experts of 10B parameters, at a quarter of its width
        return list(_moe(1, 16, 8, 12, 4) if quick else _moe(layers, 512, 128, 384, 8))
    if name == "notes":
        side, wide, squares, others = (16, 64, 4, 2) if quick else (512, 2048, 24, 12)
        return [
            *(Matrix(f"square.{index}", (side, side)) for index in range(squares)),
            *(Matrix(f"wide.{index}", (side, wide)) for index in range(others)),
        ]
    raise ValueError(f"unknown workload {name!r}")


def cases(part: str, ranks: list[int]) -> list[Case]:
    """The workloads of a part of the benchmark, with their layouts."""
    if part == "aspects":
        return [Case(f"aspect {aspect}", 1, "whole") for aspect in ASPECTS]
    found = []
    for count in ranks:
        if count == 1:
            found.append(Case(part, 1, "whole"))
        elif part != "moe":
            found.append(Case(part, count, "FSDP"))
        else:
            found.append(Case(part, count, "EP"))
            if count == 4:
                found.append(Case(part, 4, "EP x FSDP"))
    return found


def make_matrix(matrix: Matrix, seed: int, std: float) -> Tensor:
    """A normally distributed matrix, the same on every rank."""
    return torch.randn(matrix.shape, generator=torch.Generator().manual_seed(seed)) * std


def place(case: Case, group: dist.ProcessGroup, matrices: list[Matrix]) -> list[tuple[DeviceMesh, list]]:
    """Mesh and placements of each matrix; a collective call."""
    # torchtitan's names of mesh dimensions, which the layouts of DistMuon use.
    flat = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",))
    experts: tuple[DeviceMesh, list[Placement]] = flat, [Shard(0)]
    if case.layout == "EP":
        experts = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",)), [Shard(0)]
    elif case.layout == "EP x FSDP":
        grid = torch.arange(4).view(2, 2)
        experts = DeviceMesh("cpu", grid, mesh_dim_names=("efsdp", "ep")), [Shard(1), Shard(0)]
    return [experts if matrix.is_stack else (flat, [Shard(0)]) for matrix in matrices]


def parameter(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> nn.Parameter:
    """Shards ``tensor``, which is the same on every rank, as a DTensor."""
    # Without a source rank nothing is sent.
    placed = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    assert isinstance(placed, DTensor)
    return nn.Parameter(placed)
