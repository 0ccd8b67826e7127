"""Which part of a sharded tensor lies on which rank, as boxes of indices.

A DTensor's placements say how each dimension of its mesh splits or repeats the tensor. Work on whole
matrices needs the other view: for each rank of the mesh, the box ``((start, stop), ...)`` of global indices
that it holds. Pure arithmetic on shapes; every rank computes the same for all.
"""

import functools
from collections.abc import Sequence
from itertools import product
from typing import Any, TypeAlias

__all__ = ["Box", "boxes", "intersection", "is_empty", "relative"]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""For each dimension, the first index and the one past the last."""


def boxes(shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int]) -> list[Box]:
    """The box of each rank of a mesh, in the order of ``mesh.mesh.flatten()``.

    Args:
        shape: global shape of the tensor.
        placements: one for each dimension of the mesh: replicated, ``Shard``, or the strided shard by which
            FSDP2 shards what tensor or expert parallelism has sharded before along the same dimension.
        mesh_shape: size of each dimension of the mesh.

    Raises:
        NotImplementedError: a partial placement, or a strided one that leaves a rank with no single box.
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

    A strided shard is made after those to its right whose sizes multiply to its factor. None if no sizes
    do: then its indices are no interval.

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
def _interval(size: int, steps: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The indices of one rank along one dimension, after each of ``steps`` = (parts, part)."""
    start, stop = 0, size
    for parts, part in steps:
        # What `torch.chunk` gives as number `part` of `parts`; nothing where it gives fewer.
        each = -(-(stop - start) // parts)
        start, stop = min(start + part * each, stop), min(start + (part + 1) * each, stop)
    return (start, stop) if start < stop else (0, 0)


def is_empty(box: Box) -> bool:
    return any(start >= stop for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """The indices in both boxes, or None if there are none."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return None if is_empty(common) else common


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """Slices that pick ``box`` out of a tensor that holds ``origin``."""
    return tuple(
        slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True)
    )
