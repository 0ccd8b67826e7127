"""Who orthogonalizes which matrix: the division of Muon's work over the ranks of a mesh.

A matrix that is spread over ranks is sent to one of them, its owner, orthogonalized there once, and sent back
to every rank that holds a part of it, replicas included. A matrix that lies whole on a single rank stays
there. The division is a pure function of shapes and placements, so that all ranks know it without a word.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from titan_async.optim.shard_regions import Box, intersection, is_empty

__all__ = ["Bucket", "Item", "Part", "Task", "divide"]


@dataclass(frozen=True)
class Item:
    """A parameter to divide.

    Args:
        number: by which the caller knows it.
        shape: its global shape, ``[rows, cols]`` or ``[experts, rows, cols]``.
        boxes: the box of each rank of the mesh.
        matrices: the boxes of its logical matrices within the last two dimensions.
        cost: of orthogonalizing one matrix of (rows, cols).
    """

    number: int
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    matrices: Sequence[Box]
    cost: Callable[[int, int], float]

    @property
    def is_spread(self) -> bool:
        """Whether any of its matrices lies on more than one rank."""
        return any(len(list(_parts(self, box))) > 1 for box in _regions(self))


@dataclass(frozen=True)
class Part:
    """A box of global indices of a parameter, and a rank of the mesh that holds it."""

    rank: int
    box: Box


@dataclass(frozen=True)
class Task:
    """A matrix, or several experts' matrices, that one rank orthogonalizes.

    Args:
        item: number of the parameter.
        box: its global indices.
        owner: the rank of the mesh that does it.
        sources: the parts it is put together from, each from one of the ranks that hold it.
        targets: the parts of all ranks that hold any.
    """

    item: int
    box: Box
    owner: int
    sources: tuple[Part, ...]
    targets: tuple[Part, ...]

    @property
    def communicates(self) -> bool:
        return any(part.rank != self.owner for part in self.targets)


@dataclass(frozen=True)
class Bucket:
    """Tasks whose parts travel together; a parameter's tasks are all in one bucket."""

    items: tuple[int, ...]
    tasks: tuple[Task, ...]

    @property
    def communicates(self) -> bool:
        return any(task.communicates for task in self.tasks)


def divide(
    items: Sequence[Item], coordinates: Sequence[tuple[int, ...]], loads: list[float], bucket_size: float
) -> list[Bucket]:
    """Divide parameters of one mesh into buckets of tasks, each task with its owner.

    Args:
        items: the parameters, in an order that all ranks share.
        coordinates: the mesh coordinate of each rank of the mesh.
        loads: what each rank has to do already; what it gets here is added. The next task, the dearest of
            its bucket first, goes to the rank with the least among those that hold a part of it.
        bucket_size: a bucket is closed when its parameters have this many elements.
    """
    buckets: list[Bucket] = []
    waiting: list[Item] = []
    size = 0
    for item in items:
        waiting.append(item)
        size += _elements(tuple((0, length) for length in item.shape))
        if size >= bucket_size or item is items[-1]:
            buckets.append(_bucket(waiting, coordinates, loads))
            waiting, size = [], 0
    return buckets


def _bucket(items: Sequence[Item], coordinates: Sequence[tuple[int, ...]], loads: list[float]) -> Bucket:
    drafts = []
    for item in items:
        for box in _regions(item):
            (rows, cols) = (stop - start for start, stop in box[-2:])
            matrices = box[0][1] - box[0][0] if len(box) == 3 else 1
            drafts.append((item.cost(rows, cols) * matrices, item, box))
    tasks = []
    for cost, item, box in sorted(drafts, key=lambda draft: -draft[0]):
        targets = tuple(_parts(item, box))
        owner = min((part.rank for part in targets), key=lambda rank: (loads[rank], rank))
        loads[owner] += cost
        holders: dict[Box, list[int]] = {}
        for part in targets:
            holders.setdefault(part.box, []).append(part.rank)
        sources = tuple(
            Part(min(ranks, key=lambda rank: _distance(coordinates, rank, owner)), held)
            for held, ranks in holders.items()
        )
        tasks.append(Task(item.number, box, owner, sources, targets))
    return Bucket(tuple(item.number for item in items), tuple(tasks))


def _regions(item: Item) -> Iterator[Box]:
    """The boxes that become tasks: logical matrices, and of stacks as many experts as are held alike.

    Experts that several ranks hold are divided further, so that each of these ranks gets some.
    """
    if is_empty(tuple((0, length) for length in item.shape)):
        return
    if len(item.shape) == 2:
        yield from item.matrices
        return
    cuts = {0, item.shape[0]}
    for box in item.boxes:
        if not is_empty(box):
            cuts.update(box[0])
    for start, stop in pairwise(sorted(cuts)):
        for matrix in item.matrices:
            ranks = len({part.rank for part in _parts(item, ((start, stop), *matrix))})
            pieces = min(ranks, stop - start)
            ends = [start + (stop - start) * piece // pieces for piece in range(pieces + 1)]
            for experts in pairwise(ends):
                yield (experts, *matrix)


def _parts(item: Item, box: Box) -> Iterator[Part]:
    for rank, held in enumerate(item.boxes):
        common = intersection(held, box)
        if common is not None:
            yield Part(rank, common)


def _distance(coordinates: Sequence[tuple[int, ...]], rank: int, owner: int) -> tuple[int, int]:
    """Mesh dimensions along which two ranks differ; a part comes from the owner's own replica."""
    differing = sum(a != b for a, b in zip(coordinates[rank], coordinates[owner], strict=True))
    return differing, rank


def _elements(box: Box) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count
