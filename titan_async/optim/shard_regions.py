"""The region of a sharded tensor on each rank.

A DTensor's placements describe how each dimension of its mesh splits or replicates the tensor. Operations on
whole matrices need the region ``((start, stop), ...)`` of global indices on each rank of the mesh. Every rank
computes all regions, from shapes and placements.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from titan_async.local_tensors import as_dtensor

__all__ = [
    "Mesh",
    "Region",
    "intersection",
    "is_empty",
    "mesh_and_regions",
    "shard_regions",
    "slices_within",
]

Region: TypeAlias = tuple[tuple[int, int], ...]
"""For each dimension, the first index and the one after the last."""


@dataclass(frozen=True)
class Mesh:
    """A device mesh: its global ranks, its shape, and the index of this rank among ``ranks``."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        """The coordinate of each of the ranks."""
        return list(product(*map(range, self.shape)))


def mesh_and_regions(tensor: Tensor) -> tuple[Mesh, list[Region]]:
    """The mesh of a tensor, and its region on each rank; the mesh of a plain tensor has this rank only.

    Raises:
        NotImplementedError: this rank is not in the mesh, or `shard_regions` raises for the placements.
    """
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return Mesh((0,), (1,), 0), [tuple((0, size) for size in tensor.shape)]
    mesh = dtensor.device_mesh
    ranks = tuple(mesh.mesh.flatten().tolist())
    shape = tuple(mesh.mesh.shape)
    if dist.get_rank() not in ranks:
        raise NotImplementedError(f"rank {dist.get_rank()} is not in its mesh, of the ranks {list(ranks)}")
    regions = shard_regions(tensor.shape, dtensor.placements, shape)
    return Mesh(ranks, shape, ranks.index(dist.get_rank())), regions


def shard_regions(shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int]) -> list[Region]:
    """The region of each rank of a mesh, in the order of ``mesh.mesh.flatten()``.

    Args:
        shape: global shape of the tensor.
        placements: one for each dimension of the mesh: replicated, ``Shard``, or the strided shard by which
            FSDP2 shards a dimension that tensor or expert parallelism has sharded before.
        mesh_shape: size of each dimension of the mesh.

    Raises:
        NotImplementedError: a partial placement, or a strided one with indices that are not contiguous.
    """
    splits: list[list[tuple[int, int]]] = [[] for _ in shape]
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or getattr(placement, "dim", None) is None:
            raise NotImplementedError(f"its placement {placement} is neither sharded nor replicated")
        splits[placement.dim].append((mesh_dim, getattr(placement, "split_factor", 1)))
    orders = []
    for of_dimension in splits:
        order = _order(of_dimension, mesh_shape)
        if order is None:
            raise NotImplementedError(
                f"its placements {tuple(placements)} scatter the indices of a rank along a dimension"
            )
        orders.append(order)
    return [
        tuple(
            _interval(size, tuple((mesh_shape[dim], coordinate[dim]) for dim in order))
            for size, order in zip(shape, orders, strict=True)
        )
        for coordinate in product(*map(range, mesh_shape))
    ]


def _order(splits: Sequence[tuple[int, int]], mesh_shape: Sequence[int]) -> list[int] | None:
    """The dimensions of the mesh in the order in which they split a dimension of the tensor.

    A strided shard splits after those to its right whose sizes multiply to its factor. If there are none, its
    indices are not contiguous, and the result is None.

    Args:
        splits: (dimension of the mesh, factor of a strided shard or 1), from left to right.
    """
    order: list[int] = []
    for mesh_dim, factor in reversed(splits):
        before, position = 1, 0
        while before < factor and position < len(order):
            before *= mesh_shape[order[position]]
            position += 1
        if before != factor:
            return None
        order.insert(position, mesh_dim)
    return order


@functools.lru_cache(maxsize=4096)
def _interval(size: int, splits: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The indices of one rank along one dimension, after ``splits`` = (number of chunks, chunk), in order."""
    start, stop = 0, size
    for parts, part in splits:
        # Chunk number `part` of `torch.chunk` into `parts`; empty if it returns fewer.
        each = -(-(stop - start) // parts)
        start, stop = min(start + part * each, stop), min(start + (part + 1) * each, stop)
    return (start, stop) if start < stop else (0, 0)


def is_empty(region: Region) -> bool:
    return any(start >= stop for start, stop in region)


def intersection(one: Region, other: Region) -> Region | None:
    """The indices in both regions, or None if there are none."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return None if is_empty(common) else common


def slices_within(region: Region, origin: Region) -> tuple[slice, ...]:
    """The slices of ``region`` in a tensor that holds the region ``origin``."""
    return tuple(
        slice(start - first, stop - first) for (start, stop), (first, _) in zip(region, origin, strict=True)
    )
