"""The ownership plan: which rank orthogonalizes which matrix of Muon.

A matrix that is distributed over ranks is sent to one of them, its owner, orthogonalized there once, and sent
to all ranks that hold a part of it, including replicas. A matrix that is whole on a single rank is owned by
that rank. The plan only depends on shapes and placements, so all ranks compute the same plan without
communication.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from titan_async.optim.shard_regions import Region, intersection, is_empty

__all__ = ["Bucket", "HeldRegion", "ParamToPlan", "Task", "assign_owners"]


@dataclass(frozen=True)
class ParamToPlan:
    """A parameter whose matrices need owners.

    Args:
        number: identifies it to the caller.
        shape: its global shape, ``[rows, cols]`` or ``[experts, rows, cols]``.
        regions: the region on each rank of the mesh.
        matrices: the regions of its logical matrices within the last two dimensions.
        cost: of orthogonalizing one matrix of (rows, cols).
    """

    number: int
    shape: tuple[int, ...]
    regions: Sequence[Region]
    matrices: Sequence[Region]
    cost: Callable[[int, int], float]

    @property
    def is_distributed(self) -> bool:
        """Whether any of its matrices is on more than one rank."""
        return any(len(list(_holders(self, region))) > 1 for region in _task_regions(self))


@dataclass(frozen=True)
class HeldRegion:
    """A region of a parameter, and a rank of the mesh that holds it."""

    rank: int
    region: Region


@dataclass(frozen=True)
class Task:
    """A matrix, or several experts' matrices, that one rank orthogonalizes.

    Args:
        param: number of the parameter.
        region: its global indices.
        owner: the rank of the mesh that orthogonalizes it.
        sources: the regions that it is assembled from, each from one of the ranks that hold it.
        targets: its regions on all ranks.
    """

    param: int
    region: Region
    owner: int
    sources: tuple[HeldRegion, ...]
    targets: tuple[HeldRegion, ...]

    @property
    def communicates(self) -> bool:
        return any(target.rank != self.owner for target in self.targets)


@dataclass(frozen=True)
class Bucket:
    """Tasks of one all-to-all; a parameter's tasks are all in one bucket."""

    params: tuple[int, ...]
    tasks: tuple[Task, ...]

    @property
    def communicates(self) -> bool:
        return any(task.communicates for task in self.tasks)


def assign_owners(
    params: Sequence[ParamToPlan],
    coordinates: Sequence[tuple[int, ...]],
    loads: list[float],
    bucket_numel: float,
) -> list[Bucket]:
    """Divide parameters of one mesh into buckets of tasks, and give each task an owner.

    Args:
        params: the parameters, in the same order on all ranks.
        coordinates: the mesh coordinate of each rank of the mesh.
        loads: the cost assigned to each rank so far; updated. The next task, the most expensive of its bucket
            first, is assigned to the rank with the least load among those that hold a part of it.
        bucket_numel: a bucket is closed when its parameters have this many elements.
    """
    buckets: list[Bucket] = []
    waiting: list[ParamToPlan] = []
    numel = 0
    for param in params:
        waiting.append(param)
        numel += math.prod(param.shape)
        if numel >= bucket_numel or param is params[-1]:
            buckets.append(_bucket(waiting, coordinates, loads))
            waiting, numel = [], 0
    return buckets


def _bucket(
    params: Sequence[ParamToPlan], coordinates: Sequence[tuple[int, ...]], loads: list[float]
) -> Bucket:
    unassigned = []
    for param in params:
        for region in _task_regions(param):
            (rows, cols) = (stop - start for start, stop in region[-2:])
            matrices = region[0][1] - region[0][0] if len(region) == 3 else 1
            unassigned.append((param.cost(rows, cols) * matrices, param, region))
    tasks = []
    for cost, param, region in sorted(unassigned, key=lambda each: -each[0]):
        targets = tuple(_holders(param, region))
        owner = min((target.rank for target in targets), key=lambda rank: (loads[rank], rank))
        loads[owner] += cost
        ranks_of: dict[Region, list[int]] = {}
        for target in targets:
            ranks_of.setdefault(target.region, []).append(target.rank)
        sources = tuple(
            HeldRegion(min(ranks, key=lambda rank: _distance(coordinates, rank, owner)), held)
            for held, ranks in ranks_of.items()
        )
        tasks.append(Task(param.number, region, owner, sources, targets))
    return Bucket(tuple(param.number for param in params), tuple(tasks))


def _task_regions(param: ParamToPlan) -> Iterator[Region]:
    """The regions of tasks: logical matrices, and for stacks the ranges of experts on the same ranks.

    Experts on several ranks are divided further, so that each of these ranks owns some.
    """
    if is_empty(tuple((0, size) for size in param.shape)):
        return
    if len(param.shape) == 2:
        yield from param.matrices
        return
    bounds = {0, param.shape[0]}
    for region in param.regions:
        if not is_empty(region):
            bounds.update(region[0])
    for start, stop in pairwise(sorted(bounds)):
        for matrix in param.matrices:
            ranks = len({holder.rank for holder in _holders(param, ((start, stop), *matrix))})
            pieces = min(ranks, stop - start)
            ends = [start + (stop - start) * piece // pieces for piece in range(pieces + 1)]
            for experts in pairwise(ends):
                yield (experts, *matrix)


def _holders(param: ParamToPlan, region: Region) -> Iterator[HeldRegion]:
    for rank, held in enumerate(param.regions):
        common = intersection(held, region)
        if common is not None:
            yield HeldRegion(rank, common)


def _distance(coordinates: Sequence[tuple[int, ...]], rank: int, owner: int) -> tuple[int, int]:
    """The number of mesh dimensions along which two ranks differ; the nearest holder sends a part."""
    differing = sum(a != b for a, b in zip(coordinates[rank], coordinates[owner], strict=True))
    return differing, rank
