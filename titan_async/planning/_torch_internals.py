"""Everything that the planner uses of torch's private names.

`tests/planning/test_torch_internals.py` fails when one of them is gone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.pipelining._backward import stage_backward_input

__all__ = ["FakeTensorMode", "input_backward", "telling_of_resized_storages"]


def input_backward(end: Tensor, gradient: Tensor | None, start: Tensor, part: nn.Module) -> Sequence[Any]:
    """The first half of a backward, as schedules that split it do; the gradient goes to `start.grad`.

    Returns:
        What has to be kept for the other half.
    """
    gradients = None if gradient is None else [gradient]
    return stage_backward_input([end], gradients, [start], part.parameters())[1]


@contextmanager
def telling_of_resized_storages(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Calls `tell` whenever FSDP2 gives memory to an unsharded parameter or takes it away."""

    def telling(function: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def call(tensor: Tensor) -> None:
            function(tensor)
            tell(tensor.untyped_storage())

        return call

    places = [
        (_fsdp_param, "alloc_storage"),
        (_fsdp_param, "free_storage"),
        (_fsdp_param_group, "alloc_storage"),
    ]
    before = [getattr(module, name) for module, name in places]
    for (module, name), function in zip(places, before, strict=True):
        setattr(module, name, telling(function))
    try:
        yield
    finally:
        for (module, name), function in zip(places, before, strict=True):
            setattr(module, name, function)
