"""The all-to-alls of a bucket: parts of matrices to their owners, and the orthogonalized updates back.

Each direction is one asynchronous all-to-all with uneven splits, so that communication of one bucket overlaps
with computation of another. Parts that a rank keeps are not sent.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_async.optim.elementwise import at_least_float32
from titan_async.optim.ownership import Bucket, HeldRegion, Task
from titan_async.optim.shard_regions import Region, slices_within

__all__ = ["BucketExchange"]

_EXPONENT_OF_ZERO = -1104
"""Below all other exponents, and exact in every dtype."""


class _Route(NamedTuple):
    """A part to send or receive: the other rank, the index of its task in the bucket, and the part."""

    peer: int
    task: int
    part: HeldRegion


class _Transfer(NamedTuple):
    """An all-to-all in flight."""

    received: Tensor
    sent: Tensor  # kept alive while it is read
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


class BucketExchange:
    """The communication of one bucket on one rank. Call `gather`, `orthogonalize`, `results`, in this order.

    Args:
        bucket: the tasks; the same on all ranks of the group.
        rank: this rank in the mesh.
        regions: for each of the bucket's parameters, its region on this rank.
        peers: for each rank of the mesh that is in `group`, its rank there.
        group: of the all-to-alls, or None if there are none.
        dtype: of the all-to-alls and of the results.
        scaled: whether each part is sent with its own scale, because its exponents may be outside the range
            of ``dtype``.
        device: of the parameters.
    """

    def __init__(
        self,
        bucket: Bucket,
        rank: int,
        regions: Mapping[int, Region],
        peers: Mapping[int, int],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        scaled: bool,
        device: torch.device,
    ) -> None:
        self.params = bucket.params
        self._tasks, self._rank, self._regions, self._peers = bucket.tasks, rank, regions, peers
        self.communicates = bucket.communicates
        self._group = group if bucket.communicates else None
        self._dtype, self._device = dtype, device
        self._owned = [number for number, task in enumerate(bucket.tasks) if task.owner == rank]
        others = [(number, task) for number, task in enumerate(bucket.tasks) if task.owner != rank]
        own = [(number, bucket.tasks[number]) for number in self._owned]
        self._to_owner = self._routes(
            _Route(task.owner, number, part)
            for number, task in others
            for part in task.sources
            if part.rank == rank
        )
        self._from_source = self._routes(
            _Route(part.rank, number, part)
            for number, task in own
            for part in task.sources
            if part.rank != rank
        )
        self._to_target = self._routes(
            _Route(part.rank, number, part)
            for number, task in own
            for part in task.targets
            if part.rank != rank
        )
        self._from_owner = self._routes(
            _Route(task.owner, number, part)
            for number, task in others
            for part in task.targets
            if part.rank == rank
        )
        self._header = 1 if scaled else 0

    def _routes(self, routes: Iterable[_Route]) -> list[_Route]:
        """Sorted for an all-to-all, in the same order on the sender and the receiver."""
        return sorted(routes, key=lambda route: (self._peers[route.peer], route.task))

    def gather(self, updates: Mapping[int, Tensor]) -> None:
        """Start sending parts of the updates to the matrices' owners.

        Args:
            updates: this rank's part of each of the bucket's parameters, in any floating-point dtype.
        """
        self._updates = updates
        self._gathering = self._start(
            [(peer, self._packed(self._of_update(number, part))) for peer, number, part in self._to_owner],
            [(peer, _numel(part.region) + self._header) for peer, _, part in self._from_source],
        )

    def orthogonalize(self, function: Callable[[list[tuple[Task, Tensor]]], list[Tensor]]) -> None:
        """Wait for the parts, apply ``function`` to the tasks of this rank, and start sending the results.

        Args:
            function: of tasks, each with its matrix ``[rows, cols]`` or matrices ``[experts, rows, cols]``,
                not to be modified; returns as many in the dtype of the exchange.
        """
        received = _split(
            self._gathering.wait(), [_numel(r.part.region) + self._header for r in self._from_source]
        )
        pieces: dict[int, list[tuple[Region, Tensor]]] = {number: [] for number in self._owned}
        for route, piece in zip(self._from_source, received, strict=True):
            pieces[route.task].append((route.part.region, piece))
        matrices = [
            (self._tasks[number], self._assembled(number, pieces.pop(number))) for number in self._owned
        ]
        self._results = dict(zip(self._owned, function(matrices), strict=True))
        del self._updates, self._gathering
        self._scattering = self._start(
            [(peer, self._of_result(number, part)) for peer, number, part in self._to_target],
            [(peer, _numel(part.region)) for peer, _, part in self._from_owner],
        )

    def results(self) -> dict[int, tuple[Region, list[tuple[Region, Region, Tensor]]]]:
        """Wait for the results.

        Returns:
            For each parameter its region on this rank, and the pieces of the result for it: the region of
            each, that of its task, and the values, of the piece's shape.
        """
        received = _split(self._scattering.wait(), [_numel(route.part.region) for route in self._from_owner])
        found: dict[int, tuple[Region, list[tuple[Region, Region, Tensor]]]]
        found = {param: (self._regions[param], []) for param in self.params}
        for number in self._owned:
            task = self._tasks[number]
            for part in task.targets:
                if part.rank == self._rank:
                    found[task.param][1].append((part.region, task.region, self._of_result(number, part)))
        for route, piece in zip(self._from_owner, received, strict=True):
            task = self._tasks[route.task]
            region = route.part.region
            found[task.param][1].append((region, task.region, piece.view(_shape(region))))
        del self._results, self._scattering
        return found

    def _of_update(self, number: int, part: HeldRegion) -> Tensor:
        param = self._tasks[number].param
        return self._updates[param][slices_within(part.region, self._regions[param])]

    def _of_result(self, number: int, part: HeldRegion) -> Tensor:
        return self._results[number][slices_within(part.region, self._tasks[number].region)]

    def _assembled(self, number: int, parts: list[tuple[Region, Tensor]]) -> Tensor:
        task = self._tasks[number]
        own = [part for part in task.sources if part.rank == self._rank]
        if len(own) == len(task.sources) == 1:
            return self._of_update(number, own[0])
        for part in own:
            parts.append((part.region, self._packed(self._of_update(number, part))))
        if self._header:
            parts = _with_common_scale(parts)
        if len(parts) == 1:
            return parts[0][1].view(_shape(task.region))
        matrix = torch.empty(_shape(task.region), dtype=self._dtype, device=self._device)
        for region, piece in parts:
            matrix[slices_within(region, task.region)].copy_(piece.view(_shape(region)))
        return matrix

    def _packed(self, piece: Tensor) -> Tensor:
        """A part to send; if scaled, flat and divided by a power of two, whose exponent is prepended."""
        if not self._header:
            return piece
        piece = piece.to(at_least_float32(piece.dtype))
        largest = piece.abs().amax()
        exponent = torch.frexp(largest).exponent.to(piece.dtype)
        if self._dtype == torch.bfloat16:
            exponent = (exponent / 8).ceil() * 8  # exact in bfloat16
        # Neither the power of two nor its inverse may overflow.
        bound = 120 if piece.dtype == torch.float32 else 1016
        exponent = exponent.clamp(-bound, bound)
        mantissas = torch.ldexp(piece, -exponent)
        exponent = torch.where(largest == 0, _EXPONENT_OF_ZERO, exponent)
        return torch.cat([exponent.reshape(1), mantissas.flatten()]).to(self._dtype)

    def _start(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, int]]
    ) -> _Transfer:
        """Start an all-to-all of pieces, each with the rank to send it to, and of sizes to receive."""
        sent = torch.empty(
            sum(piece.numel() for _, piece in outgoing), dtype=self._dtype, device=self._device
        )
        received = torch.empty(sum(size for _, size in incoming), dtype=self._dtype, device=self._device)
        for (_, piece), space in zip(outgoing, _split(sent, [p.numel() for _, p in outgoing]), strict=True):
            space.view(piece.shape).copy_(piece)
        if self._group is None:
            return _Transfer(received, sent, None)
        send_splits, receive_splits = [0] * self._group.size(), [0] * self._group.size()
        for peer, piece in outgoing:
            send_splits[self._peers[peer]] += piece.numel()
        for peer, size in incoming:
            receive_splits[self._peers[peer]] += size
        work = dist.all_to_all_single(
            received, sent, receive_splits, send_splits, group=self._group, async_op=True
        )
        return _Transfer(received, sent, work)


def _with_common_scale(parts: Sequence[tuple[Region, Tensor]]) -> list[tuple[Region, Tensor]]:
    """Rescale packed parts to the scale of the largest."""
    largest = torch.stack([piece[0] for _, piece in parts]).amax()
    return [(region, piece[1:] * torch.exp2(piece[0] - largest)) for region, piece in parts]


def _split(buffer: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return buffer.split(sizes) if sizes else ()


def _shape(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def _numel(region: Region) -> int:
    return math.prod(_shape(region))
