"""Parameters, gradients and comparisons for tests of optimizers, plain and sharded over four ranks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.optim.optimizer import Optimizer

from titan_async.local_tensors import local_part
from titan_async.optim import ErrorFeedback, Muon

LEVELS = ["update", "gradient"]

Place = Callable[[Tensor], Tensor]
Bits = list[tuple[str, Tensor]]


def inside(params: Any, level: str = "update", strength: float = 1.0, **options: Any) -> Muon:
    return Muon(params, error_feedback=strength, error_feedback_level=level, **options)


def around(params: Any, level: str = "update", strength: float = 1.0, **options: Any) -> ErrorFeedback:
    return ErrorFeedback(Muon(params, **options), strength=strength, level=level)


WITH_FEEDBACK = {"inside": inside, "around": around}
MUONS: dict[str, Callable[..., Optimizer]] = {
    "plain": Muon,
    **{
        f"{where} {level}": lambda params, make=make, level=level, **options: make(params, level, **options)
        for where, make in WITH_FEEDBACK.items()
        for level in LEVELS
    },
}
"""Muon without error feedback, with it, and in `ErrorFeedback`."""


def whole(tensor: Tensor) -> Tensor:
    return tensor


def randn(shape: Sequence[int], *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(1000**i * s for i, s in enumerate(reversed(seed))))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def parameters(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32, place: Place = whole
) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(place(randn(shape, 99, n).to(dtype))) for n, shape in enumerate(shapes)]


def give_gradients(
    params: Sequence[Tensor],
    step: int,
    place: Place = whole,
    missing: Collection[int] = (),
    bad: Mapping[int, float] | None = None,
) -> None:
    """Sets gradients that depend only on the step.

    Args:
        missing: the indices of parameters without a gradient.
        bad: for indices of parameters, the value of the last entry of the local gradient.
    """
    for index, param in enumerate(params):
        grad = place(randn(param.shape, step, index).to(param.dtype))
        if bad and index in bad:
            local = local_part(grad)
            local[(-1,) * local.ndim] = bad[index]
        param.grad = None if index in missing else grad


def bits(params: Sequence[Tensor], optimizer: Optimizer) -> Bits:
    """Local copies of all weights and of all state."""
    tensors = [("weight", param) for param in params]
    tensors += [entry for param in params for entry in sorted(optimizer.state.get(param, {}).items())]
    return [(key, local_part(value.detach()).clone()) for key, value in tensors]


def state_bits(params: Sequence[Tensor], optimizer: Optimizer) -> Bits:
    return [(key, value) for key, value in bits(params, optimizer) if key != "weight"]


def same_bits(one: Bits, other: Bits) -> bool:
    return [key for key, _ in one] == [key for key, _ in other] and all(
        x.dtype == y.dtype and torch.equal(x, y) for (_, x), (_, y) in zip(one, other, strict=True)
    )


def was_skipped(optimizer: Optimizer) -> bool:
    return bool(optimizer.step_was_skipped)  # type: ignore[attr-defined]


def full(params: Sequence[Tensor]) -> list[Any]:
    """Unsharded weights as numpy arrays, which are sent between processes without shared memory."""
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().double().numpy().copy() for p in params
    ]


def assert_close(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-12) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        error = abs(one - other)
        assert error.size == 0 or error.max() <= tolerance, f"parameter {index}:\n{error}"


def updated(
    shapes: Sequence[Sequence[int]],
    place: Place = whole,
    make: Callable[..., Optimizer] = Muon,
    *,
    dtype: torch.dtype = torch.float64,
    steps: Collection[int] = range(3),
    **options: Any,
) -> tuple[list[torch.nn.Parameter], Optimizer]:
    """Parameters after some updates, and their optimizer."""
    params = parameters(shapes, dtype, place)
    optimizer = make(params, lr=0.1, **options)
    for step in steps:
        give_gradients(params, step, place)
        optimizer.step()
    return params, optimizer


# Over four ranks

Layout = tuple[tuple[int, ...], list[Placement]]
"""Shape of the mesh and placements; fewer placements than dimensions are those along the last dimensions."""

meshes: dict[str, DeviceMesh] = {}


def make_meshes(rank: int, group: Any) -> None:
    """Creates the meshes once for all tests, because each has its own process groups."""
    if meshes:
        return
    meshes["line"] = init_device_mesh("cpu", (4,))
    meshes["grid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    turned = torch.tensor([[0, 2], [1, 3]])
    meshes["turned"] = DeviceMesh("cpu", turned, mesh_dim_names=("a", "b"))
    meshes["first half"], meshes["second half"] = (
        DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3])
    )


def distribute(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Shards a tensor that is the same on all ranks, without communication."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def mesh_of(layout: Layout) -> DeviceMesh:
    mesh_shape, placements = layout
    mesh = meshes["line" if len(mesh_shape) == 1 else "grid"]
    return mesh if len(placements) == len(mesh_shape) else mesh["inner"]


def placed(layout: Layout) -> Place:
    return lambda tensor: distribute(tensor, mesh_of(layout), layout[1])
