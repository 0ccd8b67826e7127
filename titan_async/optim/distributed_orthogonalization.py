"""Orthogonalization of Muon's matrices over the ranks of their meshes.

Parameters of one mesh and compute dtype are divided into buckets (see `ownership`), which are pipelined:
while one is orthogonalized, the parts of the next are received and the results of the previous one are sent
(see `exchange`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from titan_async._group_internals import joint_group
from titan_async.local_tensors import as_dtensor, local_part
from titan_async.optim.coefficients import resolve_coefficients
from titan_async.optim.exchange import BucketExchange
from titan_async.optim.muon_options import DTYPES, logical_matrices, state_dtype, update_dtype
from titan_async.optim.orthogonalization import orthogonalization_cost, orthogonalize_all
from titan_async.optim.ownership import ParamToPlan, Task, assign_owners
from titan_async.optim.shard_regions import Mesh, Region, mesh_and_regions

__all__ = ["LOCAL_BUCKET_NUMEL", "DistributedOrthogonalizer"]

LOCAL_BUCKET_NUMEL = 2**18
"""On the CPU, elements in a bucket of matrices that are not sent: enough to batch small ones, and few enough
that temporary buffers stay small."""

Moving: TypeAlias = Mapping[int, tuple[Tensor, dict[str, Any]]]
"""Parameters to update, with their groups, by numbers that are the same on all ranks."""

_PLAN_OPTIONS = ("compute_dtype", "ns_form", "ns_steps", "ns_coefficients", "split_sizes", "split_dim")
"""The options on which a plan depends."""


class DistributedOrthogonalizer:
    """Orthogonalizes the updates of an optimizer, each matrix on its owner.

    Args:
        bucket_mb: megabytes of matrices in the compute dtype per all-to-all.
    """

    def __init__(self, bucket_mb: float) -> None:
        self.bucket_mb = bucket_mb
        self._plans: dict[Any, list[BucketExchange]] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def clear_plans(self) -> None:
        """Make new plans in the next step."""
        self._plans.clear()

    def check(self, param: Tensor) -> None:
        """Check that a parameter's placements are supported.

        Raises:
            NotImplementedError: they are not.
        """
        mesh, regions = mesh_and_regions(param)
        expected = tuple(stop - start for start, stop in regions[mesh.rank])
        shape = tuple(local_part(param.detach()).shape)
        if shape != expected and 0 not in expected:
            raise NotImplementedError(
                f"its shard on this rank has shape {list(shape)}, but its placements imply {list(expected)}"
            )

    def run(
        self,
        moving: Moving,
        update_of: Callable[[Tensor, dict[str, Any]], Tensor],
        apply: Callable[[Tensor, dict[str, Any], Region, Sequence[tuple[Region, Region, Tensor]]], None],
    ) -> None:
        """Orthogonalize the updates of parameters.

        Args:
            moving: the parameters; the same on all ranks that share any.
            update_of: returns this rank's part of the matrix to orthogonalize.
            apply: takes the results for this rank's part: its region, and for each piece of it the region,
                that of the logical matrix, and the values.
        """

        def gather(exchange: BucketExchange) -> None:
            exchange.gather({number: update_of(*moving[number]) for number in exchange.params})

        def compute(matrices: list[tuple[Task, Tensor]]) -> list[Tensor]:
            return _orthogonalized(matrices, moving)

        def finish(exchange: BucketExchange) -> None:
            for number, (local, pieces) in exchange.results().items():
                apply(*moving[number], local, pieces)

        plan = self._plan(moving)
        communicating = [exchange for exchange in plan if exchange.communicates]
        for number, exchange in enumerate(communicating):
            if number == 0:
                gather(exchange)
            if number + 1 < len(communicating):
                gather(communicating[number + 1])
            exchange.orthogonalize(compute)
            if number > 0:
                finish(communicating[number - 1])
        # Overlap the last all-to-all with local buckets.
        for exchange in plan:
            if not exchange.communicates:
                gather(exchange)
                exchange.orthogonalize(compute)
                finish(exchange)
        if communicating:
            finish(communicating[-1])

    def _plan(self, moving: Moving) -> list[BucketExchange]:
        key = tuple(
            (number, param.shape, *(group[option] for option in _PLAN_OPTIONS))
            for number, (param, group) in moving.items()
        )
        if key not in self._plans:
            # Bounded, because every set of parameters with gradients has its own plan.
            if len(self._plans) >= 16:
                self._plans.clear()
            self._plans[key] = self._new_plan(moving)
        return self._plans[key]

    def _new_plan(self, moving: Moving) -> list[BucketExchange]:
        alike: dict[Any, list[int]] = {}
        placed = {number: mesh_and_regions(param) for number, (param, _) in moving.items()}
        for number, (param, group) in moving.items():
            mesh, _ = placed[number]
            dtype = DTYPES[group["compute_dtype"]]
            scaled = update_dtype(group, state_dtype(group["momentum_dtype"], param)) != dtype
            alike.setdefault((mesh, dtype, scaled, param.device), []).append(number)
        # Meshes of the same ranks share loads; a rank cannot compute those of meshes it is not in.
        loads: dict[tuple[int, ...], dict[int, float]] = {}
        exchanges = []
        for (mesh, dtype, scaled, device), numbers in alike.items():
            of_ranks = loads.setdefault(tuple(sorted(mesh.ranks)), dict.fromkeys(mesh.ranks, 0.0))
            in_order = [of_ranks[rank] for rank in mesh.ranks]
            params = [_param_to_plan(number, moving[number], placed[number][1]) for number in numbers]
            numel = self.bucket_mb * 2**20 / dtype.itemsize
            local_numel = min(numel, LOCAL_BUCKET_NUMEL) if device.type == "cpu" else numel
            # Local matrices first: their owners are fixed, and are assigned fewer of the others.
            local = [param for param in params if not param.is_distributed]
            distributed = [param for param in params if param.is_distributed]
            buckets = assign_owners(local, mesh.coordinates, in_order, local_numel)
            buckets += assign_owners(distributed, mesh.coordinates, in_order, numel)
            of_ranks.update(zip(mesh.ranks, in_order, strict=True))
            tasks = [task for bucket in buckets for task in bucket.tasks]
            peers, process_group = self._process_group(mesh, tasks, moving[numbers[0]][0])
            for bucket in buckets:
                held = {number: placed[number][1][mesh.rank] for number in bucket.params}
                exchanges.append(
                    BucketExchange(bucket, mesh.rank, held, peers, process_group, dtype, scaled, device)
                )
        return exchanges

    def _process_group(
        self, mesh: Mesh, tasks: Sequence[Task], param: Tensor
    ) -> tuple[dict[int, int], dist.ProcessGroup | None]:
        """The process group of the tasks' all-to-alls, or None if there are none.

        Returns:
            For each rank of the mesh in the group its rank there, and the group.
        """
        coordinates = mesh.coordinates
        dims = {
            dim
            for task in tasks
            for target in task.targets
            for dim in range(len(mesh.shape))
            if coordinates[target.rank][dim] != coordinates[task.owner][dim]
        }
        if not dims:
            return dict.fromkeys(range(len(mesh.ranks)), 0), None
        own = coordinates[mesh.rank]
        members = {
            rank: mesh.ranks[rank]
            for rank, other in enumerate(coordinates)
            if all(dim in dims or other[dim] == own[dim] for dim in range(len(mesh.shape)))
        }
        if len(dims) == 1:
            group = as_dtensor(param).device_mesh.get_group(dims.pop())
        else:
            key = tuple(sorted(members.values()))
            if key not in self._groups:
                self._groups[key] = joint_group(key)
            group = self._groups[key]
        return {rank: dist.get_group_rank(group, member) for rank, member in members.items()}, group


def _orthogonalized(matrices: list[tuple[Task, Tensor]], moving: Moving) -> list[Tensor]:
    """The matrices of tasks, orthogonalized with their groups' options, batched by size."""
    alike: dict[Any, list[int]] = {}
    for index, (task, matrix) in enumerate(matrices):
        group = moving[task.param][1]
        alike.setdefault((id(group), matrix.shape[-2:], matrix.dtype), []).append(index)
    results: dict[int, Tensor] = {}
    for indices in alike.values():
        group = moving[matrices[indices[0]][0].param][1]
        done = orthogonalize_all(
            [matrices[index][1] for index in indices],
            resolve_coefficients(group["ns_coefficients"], group["ns_steps"]),
            eps=group["eps"],
            compute_dtype=DTYPES[group["compute_dtype"]],
            form=group["ns_form"],
        )
        results.update(zip(indices, done, strict=True))
    return [results[index] for index in range(len(matrices))]


def _param_to_plan(number: int, moving: tuple[Tensor, dict[str, Any]], regions: list[Region]) -> ParamToPlan:
    param, group = moving
    coefficients = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])

    def cost(rows: int, cols: int) -> float:
        return orthogonalization_cost(rows, cols, coefficients, group["ns_form"])

    return ParamToPlan(number, tuple(param.shape), regions, logical_matrices(param.shape, group), cost)
