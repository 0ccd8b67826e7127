"""Everything that the planner uses of torch's private names.

`tests/planning/test_torch_internals.py` fails when one of them is gone.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input

__all__ = ["FakeTensorMode", "input_backward"]


def input_backward(end: Tensor, gradient: Tensor | None, start: Tensor, part: nn.Module) -> Sequence[Any]:
    """The first half of a backward, as schedules that split it do; the gradient goes to `start.grad`.

    Returns:
        What has to be kept for the other half.
    """
    gradients = None if gradient is None else [gradient]
    return stage_backward_input([end], gradients, [start], part.parameters())[1]
