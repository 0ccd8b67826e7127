"""Regions of shards on each rank, against `torch.chunk` of a tensor of indices."""

from itertools import product

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_async.optim.shard_regions import intersection, is_empty, shard_regions, slices_within

R = Replicate()
SIZES = [*range(20), 24, 33]
PARTS = [1, 2, 3, 4]


def chunk(indices, parts, part, dim=0):
    """Chunk ``part`` of ``parts``, split as by FSDP and tensor parallelism; the last may be empty."""
    pieces = list(indices.chunk(parts, dim)) if indices.shape[dim] else []
    return pieces[part] if part < len(pieces) else indices.narrow(dim, 0, 0)


def grid(shape):
    """A tensor of its flat indices."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


def assert_regions(shape, placements, mesh_shape, expected):
    """``expected`` returns the shard of a tensor at a coordinate of the mesh."""
    found = shard_regions(shape, placements, mesh_shape)
    coordinates = list(product(*map(range, mesh_shape)))
    assert len(found) == len(coordinates)
    whole = tuple((0, size) for size in shape)
    for region, coordinate in zip(found, coordinates, strict=True):
        part = expected(grid(shape), coordinate)
        held = grid(shape)[slices_within(region, whole)]
        assert is_empty(region) == (part.numel() == 0)
        if part.numel():
            assert torch.equal(held, part)


@pytest.mark.parametrize("parts", PARTS)
def test_one_mesh_dimension(parts):
    for size, dim in product(SIZES, [0, 1]):
        shape = (size, 3) if dim == 0 else (3, size)
        assert_regions(shape, [Shard(dim)], (parts,), lambda t, c, dim=dim: chunk(t, parts, c[0], dim))
        assert_regions(shape, [R], (parts,), lambda t, c: t)


@pytest.mark.parametrize(("outer", "inner"), list(product(PARTS, PARTS)))
def test_two_mesh_dimensions(outer, inner):
    mesh = (outer, inner)

    def cut(first, second):
        """Split along a tensor dimension for each dimension of the mesh, outer first."""
        return lambda t, c: chunk(chunk(t, outer, c[0], first), inner, c[1], second)

    for size in SIZES:
        assert_regions((size, 7), [Shard(0), Shard(1)], mesh, cut(0, 1))
        assert_regions((size, 7), [Shard(1), Shard(0)], mesh, cut(1, 0))
        assert_regions((size, 2), [Shard(0), Shard(0)], mesh, cut(0, 0))
        assert_regions((size, 2), [R, Shard(0)], mesh, lambda t, c: chunk(t, inner, c[1]))
        assert_regions((2, size, 3), [Shard(1), R], mesh, lambda t, c: chunk(t, outer, c[0], 1))


@pytest.mark.parametrize(("data", "model"), list(product([2, 3, 4], [2, 3, 4])))
def test_fsdp_over_tensor_parallelism(data, model):
    """FSDP2 shards the local shards of tensor or expert parallelism, including uneven ones.

    torch's DTensor splits the dimension into `split_factor` pieces instead, which differs for 7 rows on 3 x 2
    ranks: tensor parallelism splits these into 4 + 3, and FSDP those into 2 + 2 + 0 and 1 + 1 + 1.
    """
    placements = [_StridedShard(0, split_factor=model), Shard(0)]
    for size in SIZES:
        assert_regions(
            (size, 2), placements, (data, model), lambda t, c: chunk(chunk(t, model, c[1]), data, c[0])
        )


def test_strided_shards_with_other_placements():
    strided = _StridedShard(0, split_factor=4)
    for size in SIZES:
        # Replicas, FSDP, context parallelism, tensor parallelism
        assert_regions(
            (size, 2),
            [R, strided, Shard(0), Shard(0)],
            (2, 3, 2, 2),
            lambda t, c: chunk(chunk(chunk(t, 2, c[2]), 2, c[3]), 3, c[1]),
        )
        assert_regions(
            (size, 5),
            [_StridedShard(0, split_factor=2), Shard(0), Shard(1)],
            (3, 2, 2),
            lambda t, c: chunk(chunk(chunk(t, 2, c[1]), 3, c[0]), 2, c[2], 1),
        )


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ([Partial(), Shard(0)], "Partial|P"),
        ([_StridedShard(0, split_factor=2), R], "scatter"),
        ([_StridedShard(0, split_factor=3), Shard(0)], "scatter"),
        ([Shard(0), _StridedShard(0, split_factor=2)], "scatter"),
    ],
)
def test_placements_without_contiguous_regions_raise(placements, words):
    with pytest.raises(NotImplementedError, match=words):
        shard_regions((8, 8), placements, (2, 2))


def test_intersection():
    assert intersection(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersection(((0, 4), (2, 6)), ((4, 9), (0, 3))) is None
    assert intersection(((0, 0),), ((0, 3),)) is None
