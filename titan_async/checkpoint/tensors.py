"""What is known of a tensor before it is read."""

import math
from dataclasses import dataclass

import torch

__all__ = ["TensorInfo"]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
