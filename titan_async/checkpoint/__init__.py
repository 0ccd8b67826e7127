"""Checkpoints as files: tensors are read and written one at a time, without a process group or a model.

`dcp` reads and writes checkpoints of torch.distributed.checkpoint; `safetensors_files`, folders of
safetensors. This layer depends on torch and safetensors only; `titan_async.huggingface` maps names.
"""

import math
from dataclasses import dataclass

import torch

__all__ = ["TensorInfo"]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
