"""Counts operations that would make the host wait for a device, on the meta device or the CPU.

On the meta device, reading a value or copying to the CPU raises an error.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["HostWaits"]

READ = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}


class HostWaits(TorchDispatchMode):
    """Records operations within it that read values of tensors on the host, and collectives.

    Args:
        on_host: tensors on the host, which can be read without waiting.
    """

    def __init__(self, *on_host: Tensor) -> None:
        super().__init__()
        self._on_host = {tensor.data_ptr() for tensor in on_host}
        self.waits: list[str] = []
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "c10d":
            self.collectives.append(name)
        reads = name in READ and not all(each.data_ptr() in self._on_host for each in tensors)
        result = func(*args, **kwargs)
        # Without pinned memory, copies in both directions wait.
        devices = {each.device for each in [*tensors, result] if isinstance(each, Tensor)}
        copies = name in ("copy_", "_to_copy") and len(devices) > 1
        by_mask = name.startswith("index") and any(each.dtype == torch.bool for each in tensors[1:])
        if reads or copies or by_mask:
            self.waits.append(name)
        return result
