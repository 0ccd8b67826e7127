"""Imaginary peers: what torch's process group "fake" leaves open is answered with noise, always the same.

That group returns at once. Its collectives behave as if all ranks had this one's data, but what is received
from a neighbour stays what the memory held before, and an uneven all-to-all gives a rank that sends nothing
nothing to receive from.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Peers"]


class Peers(TorchDispatchMode):
    """While active, messages and uneven all-to-alls bring normal noise.

    Args:
        seed: of the noise.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.c10d.alltoall_base_.default and args[3]:
            # (output, input, group, output splits, input splits, ...): peers send what is to be received.
            sent = self._noise(args[0])
            args = (args[0], sent, args[2], args[3], args[3], *args[5:])
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.recv_.default:
            for tensor in args[0]:
                with torch.no_grad():
                    tensor.copy_(self._noise(tensor))
        return result

    def _noise(self, like: Tensor) -> Tensor:
        if not like.is_floating_point():
            return torch.zeros_like(like)
        noise = torch.randn(like.shape, generator=self._generator, dtype=torch.float32)
        return noise.to(like)
