"""Where a tensor lies: the ranks of its mesh, this rank's place among them, and what each holds."""

from dataclasses import dataclass
from itertools import product

import torch.distributed as dist
from torch import Tensor

from titan_async.local_tensors import as_dtensor
from titan_async.optim.shard_regions import Box, boxes

__all__ = ["Mesh", "placed_on"]


@dataclass(frozen=True)
class Mesh:
    """A mesh as numbers: the global ranks in it, its shape, and this rank's place among them."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    here: int

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        return list(product(*map(range, self.shape)))


def placed_on(tensor: Tensor) -> tuple[Mesh, list[Box]]:
    """The mesh of a tensor, and the box of it on each rank; a plain tensor is alone on a mesh of one.

    Raises:
        NotImplementedError: this rank is not in the mesh, or `boxes` refuses the placements.
    """
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return Mesh((0,), (1,), 0), [tuple((0, size) for size in tensor.shape)]
    mesh = dtensor.device_mesh
    ranks = tuple(mesh.mesh.flatten().tolist())
    shape = tuple(mesh.mesh.shape)
    if dist.get_rank() not in ranks:
        raise NotImplementedError(f"rank {dist.get_rank()} is not in its mesh, of the ranks {list(ranks)}")
    return Mesh(ranks, shape, ranks.index(dist.get_rank())), boxes(tensor.shape, dtensor.placements, shape)
