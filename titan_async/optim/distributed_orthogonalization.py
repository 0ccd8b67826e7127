"""Muon's matrices over the ranks: which rank does what, on which process group, in which order.

Parameters of one mesh and compute dtype are divided into buckets (see `work`), and the buckets run like a
pipeline: while one is being orthogonalized, the parts of the next come in and the results of the last go
out (see `exchange`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from titan_async._group_internals import joint_group
from titan_async.local_tensors import as_dtensor, local_part
from titan_async.optim.coefficients import resolve_coefficients
from titan_async.optim.exchange import Exchange
from titan_async.optim.muon_options import DTYPES, logical_matrices, state_dtype, update_dtype
from titan_async.optim.orthogonalization import orthogonalization_cost, orthogonalize_all
from titan_async.optim.ownership import Item, Task, divide
from titan_async.optim.placement import Mesh, placed_on
from titan_async.optim.shard_regions import Box

__all__ = ["ELEMENTS_STAYING", "Distribution"]

ELEMENTS_STAYING = 2**18
"""On the CPU, elements of matrices that stay on their rank and are worked on together: enough to batch small
ones, and few enough that what is held meanwhile stays small."""

Moving: TypeAlias = Mapping[int, tuple[Tensor, dict[str, Any]]]
"""Parameters to update, with their groups, by numbers that mean the same on all ranks."""


_PLANNED_BY = ("compute_dtype", "ns_form", "ns_steps", "ns_coefficients", "split_sizes", "split_dim")
"""The options on which the division of the work depends."""


class Distribution:
    """Runs the orthogonalizations of an optimizer.

    Args:
        bucket_mb: megabytes of matrices in the compute dtype that travel together.
    """

    def __init__(self, bucket_mb: float) -> None:
        self.bucket_mb = bucket_mb
        self._plans: dict[Any, list[Exchange]] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def forget(self) -> None:
        """Plan anew at the next step."""
        self._plans.clear()

    def check(self, param: Tensor) -> None:
        """See that a parameter's placements can be worked with.

        Raises:
            NotImplementedError: they cannot.
        """
        mesh, held = placed_on(param)
        expected = tuple(stop - start for start, stop in held[mesh.here])
        if tuple(local_part(param.detach()).shape) != expected and 0 not in expected:
            raise NotImplementedError(
                f"its shard here has shape {list(local_part(param.detach()).shape)}, where its placements "
                f"make {list(expected)}"
            )

    def run(
        self,
        moving: Moving,
        update_of: Callable[[Tensor, dict[str, Any]], Tensor],
        apply: Callable[[Tensor, dict[str, Any], Box, Sequence[tuple[Box, Box, Tensor]]], None],
    ) -> None:
        """Orthogonalize the updates of parameters.

        Args:
            moving: the parameters; on all ranks that share any the same.
            update_of: returns this rank's part of what is to be orthogonalized.
            apply: takes the results for this rank's part: the box that it is, and for each piece of it the
                box, that of the logical matrix, and the values.
        """

        def gather(exchange: Exchange) -> None:
            exchange.gather({number: update_of(*moving[number]) for number in exchange.items})

        def compute(work: list[tuple[Task, Tensor]]) -> list[Tensor]:
            return _orthogonalized(work, moving)

        def finish(exchange: Exchange) -> None:
            for number, (local, pieces) in exchange.results().items():
                apply(*moving[number], local, pieces)

        plan = self._plan(moving)
        travelling = [exchange for exchange in plan if exchange.communicates]
        for number, exchange in enumerate(travelling):
            if number == 0:
                gather(exchange)
            if number + 1 < len(travelling):
                gather(travelling[number + 1])
            exchange.orthogonalize(compute)
            if number > 0:
                finish(travelling[number - 1])
        # What needs no network fills the time in which the last results travel.
        for exchange in plan:
            if not exchange.communicates:
                gather(exchange)
                exchange.orthogonalize(compute)
                finish(exchange)
        if travelling:
            finish(travelling[-1])

    def _plan(self, moving: Moving) -> list[Exchange]:
        key = tuple(
            (number, param.shape, *(group[option] for option in _PLANNED_BY))
            for number, (param, group) in moving.items()
        )
        if key not in self._plans:
            # A plan is small, but gradients that come and go in ever new combinations must not pile them up.
            if len(self._plans) >= 16:
                self._plans.clear()
            self._plans[key] = self._new_plan(moving)
        return self._plans[key]

    def _new_plan(self, moving: Moving) -> list[Exchange]:
        together: dict[Any, list[int]] = {}
        placed = {number: placed_on(param) for number, (param, _) in moving.items()}
        for number, (param, group) in moving.items():
            mesh, _ = placed[number]
            dtype = DTYPES[group["compute_dtype"]]
            scaled = update_dtype(group, state_dtype(group["momentum_dtype"], param)) != dtype
            together.setdefault((mesh, dtype, scaled, param.device), []).append(number)
        # Meshes of the same ranks share the work; what others do is not known to all of a mesh.
        loads: dict[tuple[int, ...], dict[int, float]] = {}
        exchanges = []
        for (mesh, dtype, scaled, device), numbers in together.items():
            of_ranks = loads.setdefault(tuple(sorted(mesh.ranks)), dict.fromkeys(mesh.ranks, 0.0))
            in_order = [of_ranks[rank] for rank in mesh.ranks]
            items = [_item(number, moving[number], placed[number][1]) for number in numbers]
            size = self.bucket_mb * 2**20 / dtype.itemsize
            # What stays needs no large buckets, and its owners are known: they get less of the rest.
            staying = [item for item in items if not item.is_spread]
            spread = [item for item in items if item.is_spread]
            size_here = min(size, ELEMENTS_STAYING) if device.type == "cpu" else size
            buckets = divide(staying, mesh.coordinates, in_order, size_here)
            buckets += divide(spread, mesh.coordinates, in_order, size)
            of_ranks.update(zip(mesh.ranks, in_order, strict=True))
            tasks = [task for bucket in buckets for task in bucket.tasks]
            peers, network = self._group(mesh, tasks, moving[numbers[0]][0])
            for bucket in buckets:
                held = {number: placed[number][1][mesh.here] for number in bucket.items}
                exchanges.append(Exchange(bucket, mesh.here, held, peers, network, dtype, scaled, device))
        return exchanges

    def _group(
        self, mesh: Mesh, tasks: Sequence[Task], param: Tensor
    ) -> tuple[dict[int, int], dist.ProcessGroup | None]:
        """The ranks in a group of its members, by their numbers in the mesh, and the group.

        The group is that over which this rank's parts travel, or None if none do.
        """
        coordinates = mesh.coordinates
        crossed = {
            dim
            for task in tasks
            for part in task.targets
            for dim in range(len(mesh.shape))
            if coordinates[part.rank][dim] != coordinates[task.owner][dim]
        }
        if not crossed:
            return dict.fromkeys(range(len(mesh.ranks)), 0), None
        own = coordinates[mesh.here]
        members = {
            rank: mesh.ranks[rank]
            for rank, other in enumerate(coordinates)
            if all(dim in crossed or other[dim] == own[dim] for dim in range(len(mesh.shape)))
        }
        if len(crossed) == 1:
            group = as_dtensor(param).device_mesh.get_group(crossed.pop())
        else:
            key = tuple(sorted(members.values()))
            if key not in self._groups:
                self._groups[key] = joint_group(key)
            group = self._groups[key]
        return {rank: dist.get_group_rank(group, member) for rank, member in members.items()}, group


def _orthogonalized(work: list[tuple[Task, Tensor]], moving: Moving) -> list[Tensor]:
    """The matrices of tasks, orthogonalized by their groups' options, those of one size together."""
    alike: dict[Any, list[int]] = {}
    for index, (task, matrix) in enumerate(work):
        group = moving[task.item][1]
        alike.setdefault((id(group), matrix.shape[-2:], matrix.dtype), []).append(index)
    results: dict[int, Tensor] = {}
    for indices in alike.values():
        group = moving[work[indices[0]][0].item][1]
        done = orthogonalize_all(
            [work[index][1] for index in indices],
            resolve_coefficients(group["ns_coefficients"], group["ns_steps"]),
            eps=group["eps"],
            compute_dtype=DTYPES[group["compute_dtype"]],
            form=group["ns_form"],
        )
        results.update(zip(indices, done, strict=True))
    return [results[index] for index in range(len(work))]


def _item(number: int, moving: tuple[Tensor, dict[str, Any]], held: list[Box]) -> Item:
    param, group = moving

    coefficients = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])

    def cost(rows: int, cols: int) -> float:
        return orthogonalization_cost(rows, cols, coefficients, group["ns_form"])

    return Item(number, tuple(param.shape), held, logical_matrices(param.shape, group), cost)
