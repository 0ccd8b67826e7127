"""Moves the parts of matrices to the ranks that orthogonalize them, and the results back.

One uneven all-to-all each way for a bucket, started without waiting, so that the network works on one bucket
while the rank computes another. What a rank keeps does not travel.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_async.optim.ownership import Bucket, Part, Task
from titan_async.optim.shard_regions import Box, relative
from titan_async.optim.tensors import at_least_float32

__all__ = ["Exchange"]

_ON_NO_SCALE = -1104
"""In place of the exponent of zeros: below all others, and a number in every dtype."""


class _Route(NamedTuple):
    """A part that travels: the other rank, the number of its task in the bucket, and the part."""

    peer: int
    task: int
    part: Part


class _Transfer(NamedTuple):
    """An all-to-all on its way."""

    received: Tensor
    sent: Tensor  # kept until the end: it is being read
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


class Exchange:
    """The transfers of one bucket on one rank. The order is `gather`, `orthogonalize`, `results`.

    Args:
        bucket: the tasks; the same on all ranks of the group.
        rank: this rank's number in the mesh.
        boxes: for each of the bucket's parameters, the box of it that this rank holds.
        peers: for each rank of the mesh that is in `group`, its rank there.
        group: over which parts travel, or None if none do.
        dtype: in which they do, and in which results come.
        scaled: whether each part travels with a scale of its own, because its exponents may be beyond those
            of ``dtype``.
        device: of the parameters.
    """

    def __init__(
        self,
        bucket: Bucket,
        rank: int,
        boxes: Mapping[int, Box],
        peers: Mapping[int, int],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        scaled: bool,
        device: torch.device,
    ) -> None:
        self.items = bucket.items
        self._tasks, self._rank, self._boxes, self._peers = bucket.tasks, rank, boxes, peers
        self.communicates = bucket.communicates
        self._group = group if bucket.communicates else None
        self._dtype, self._device = dtype, device
        self._owned = [number for number, task in enumerate(bucket.tasks) if task.owner == rank]
        here = [(number, task) for number, task in enumerate(bucket.tasks) if task.owner != rank]
        mine = [(number, bucket.tasks[number]) for number in self._owned]
        self._to_owner = self._routes(
            _Route(task.owner, number, part)
            for number, task in here
            for part in task.sources
            if part.rank == rank
        )
        self._from_source = self._routes(
            _Route(part.rank, number, part)
            for number, task in mine
            for part in task.sources
            if part.rank != rank
        )
        self._to_target = self._routes(
            _Route(part.rank, number, part)
            for number, task in mine
            for part in task.targets
            if part.rank != rank
        )
        self._from_owner = self._routes(
            _Route(task.owner, number, part)
            for number, task in here
            for part in task.targets
            if part.rank == rank
        )
        self._header = 1 if scaled else 0

    def _routes(self, routes: Iterable[_Route]) -> list[_Route]:
        """In the order in which an all-to-all takes them, on the sender's side as on the receiver's."""
        return sorted(routes, key=lambda route: (self._peers[route.peer], route.task))

    def gather(self, updates: Mapping[int, Tensor]) -> None:
        """Start sending parts of the updates to the matrices' owners.

        Args:
            updates: this rank's part of each of the bucket's parameters, in any floating dtype.
        """
        self._updates = updates
        self._gathering = self._start(
            [(peer, self._packed(self._of_update(number, part))) for peer, number, part in self._to_owner],
            [(peer, _count(part.box) + self._header) for peer, _, part in self._from_source],
        )

    def orthogonalize(self, function: Callable[[list[tuple[Task, Tensor]]], list[Tensor]]) -> None:
        """Wait for the parts, apply ``function`` to the tasks of this rank, and start sending the results.

        Args:
            function: of tasks, each with its matrix ``[rows, cols]`` or matrices ``[experts, rows, cols]``,
                which are not to be written to; returns as many in the dtype of the exchange.
        """
        received = _split(
            self._gathering.wait(), [_count(r.part.box) + self._header for r in self._from_source]
        )
        came: dict[int, list[tuple[Box, Tensor]]] = {number: [] for number in self._owned}
        for route, piece in zip(self._from_source, received, strict=True):
            came[route.task].append((route.part.box, piece))
        work = [(self._tasks[number], self._assembled(number, came.pop(number))) for number in self._owned]
        self._results = dict(zip(self._owned, function(work), strict=True))
        del self._updates, self._gathering
        self._scattering = self._start(
            [(peer, self._of_result(number, part)) for peer, number, part in self._to_target],
            [(peer, _count(part.box)) for peer, _, part in self._from_owner],
        )

    def results(self) -> dict[int, tuple[Box, list[tuple[Box, Box, Tensor]]]]:
        """Wait for the results.

        Returns:
            For each parameter the box of it that this rank holds, and the pieces of which the result for it
            is made: the box of each, that of its task, and the values, in that shape.
        """
        received = _split(self._scattering.wait(), [_count(route.part.box) for route in self._from_owner])
        found: dict[int, tuple[Box, list[tuple[Box, Box, Tensor]]]]
        found = {item: (self._boxes[item], []) for item in self.items}
        for number in self._owned:
            task = self._tasks[number]
            for part in task.targets:
                if part.rank == self._rank:
                    found[task.item][1].append((part.box, task.box, self._of_result(number, part)))
        for route, piece in zip(self._from_owner, received, strict=True):
            task = self._tasks[route.task]
            found[task.item][1].append((route.part.box, task.box, piece.view(_shape(route.part.box))))
        del self._results, self._scattering
        return found

    def _of_update(self, number: int, part: Part) -> Tensor:
        item = self._tasks[number].item
        return self._updates[item][relative(part.box, self._boxes[item])]

    def _of_result(self, number: int, part: Part) -> Tensor:
        return self._results[number][relative(part.box, self._tasks[number].box)]

    def _assembled(self, number: int, parts: list[tuple[Box, Tensor]]) -> Tensor:
        task = self._tasks[number]
        own = [part for part in task.sources if part.rank == self._rank]
        if len(own) == len(task.sources) == 1:
            return self._of_update(number, own[0])
        for part in own:
            parts.append((part.box, self._packed(self._of_update(number, part))))
        if self._header:
            parts = _on_one_scale(parts)
        if len(parts) == 1:
            return parts[0][1].view(_shape(task.box))
        matrix = torch.empty(_shape(task.box), dtype=self._dtype, device=self._device)
        for box, piece in parts:
            matrix[relative(box, task.box)].copy_(piece.view(_shape(box)))
        return matrix

    def _packed(self, piece: Tensor) -> Tensor:
        """A part as it travels: if scaled flat, divided by a power of two, with its exponent in front."""
        if not self._header:
            return piece
        piece = piece.to(at_least_float32(piece.dtype))
        largest = piece.abs().amax()
        exponent = torch.frexp(largest).exponent.to(piece.dtype)
        if self._dtype == torch.bfloat16:
            exponent = (exponent / 8).ceil() * 8  # such numbers it holds exactly
        # The power of two itself must not overflow, nor its inverse. Zeros are on no scale.
        most = 120 if piece.dtype == torch.float32 else 1016
        exponent = exponent.clamp(-most, most)
        mantissas = torch.ldexp(piece, -exponent)
        exponent = torch.where(largest == 0, _ON_NO_SCALE, exponent)
        return torch.cat([exponent.reshape(1), mantissas.flatten()]).to(self._dtype)

    def _start(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, int]]
    ) -> _Transfer:
        """Start an all-to-all of pieces, each with the rank it goes to, for sizes, each with where from."""
        sent = torch.empty(
            sum(piece.numel() for _, piece in outgoing), dtype=self._dtype, device=self._device
        )
        received = torch.empty(sum(size for _, size in incoming), dtype=self._dtype, device=self._device)
        for (_, piece), room in zip(outgoing, _split(sent, [p.numel() for _, p in outgoing]), strict=True):
            room.view(piece.shape).copy_(piece)
        if self._group is None:
            return _Transfer(received, sent, None)
        leaving, coming = [0] * self._group.size(), [0] * self._group.size()
        for peer, piece in outgoing:
            leaving[self._peers[peer]] += piece.numel()
        for peer, size in incoming:
            coming[self._peers[peer]] += size
        work = dist.all_to_all_single(received, sent, coming, leaving, group=self._group, async_op=True)
        return _Transfer(received, sent, work)


def _on_one_scale(parts: Sequence[tuple[Box, Tensor]]) -> list[tuple[Box, Tensor]]:
    """Bring packed parts to the scale of the largest."""
    largest = torch.stack([piece[0] for _, piece in parts]).amax()
    return [(box, piece[1:] * torch.exp2(piece[0] - largest)) for box, piece in parts]


def _split(buffer: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return buffer.split(sizes) if sizes else ()


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _count(box: Box) -> int:
    return math.prod(_shape(box))
