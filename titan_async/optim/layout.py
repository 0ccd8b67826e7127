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

    found = []
    for coordinate in product(*map(range, mesh_shape)):
        box = []
        for size, of_dimension in zip(shape, splits, strict=True):
            steps = tuple(
                (mesh_shape[mesh_dim], coordinate[mesh_dim], factor) for mesh_dim, factor in of_dimension
            )
            interval = _interval(size, steps)
            if interval is None:
                raise NotImplementedError(
                    f"its placements {tuple(placements)} scatter the indices of a rank along a dimension"
                )
            box.append(interval)
        found.append(tuple(box))
    return found


@functools.lru_cache(maxsize=4096)
def _interval(size: int, steps: tuple[tuple[int, int, int], ...]) -> tuple[int, int] | None:
    """The indices of one rank along one dimension, after each of ``steps`` = (parts, part, factor).

    None if they are not contiguous.
    """
    # As long as it is contiguous, a range does; strided shards make it a list in between.
    indices: Sequence[int] = range(size)
    for parts, part, factor in steps:
        if factor == 1:
            indices = _chunk(indices, parts, part)
        else:
            # As if the dimension had been split by `factor` before, and each piece then by `parts`.
            pieces = [_chunk(indices, factor, piece) for piece in range(factor)]
            indices = [index for piece in pieces for index in _chunk(piece, parts, part)]
    if not indices:
        return (0, 0)
    if indices[-1] - indices[0] + 1 != len(indices):
        return None
    return (indices[0], indices[-1] + 1)


def _chunk(indices: Sequence[int], parts: int, part: int) -> Sequence[int]:
    """What `torch.chunk` gives as number ``part`` of ``parts``; nothing where it gives fewer."""
    size = -(-len(indices) // parts)
    return indices[part * size : (part + 1) * size]


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
