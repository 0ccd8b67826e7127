"""The CPU as a stand-in for an accelerator: finds waits of the host in a step of a whole trainer.

It tracks which tensors would be on the accelerator, from the parameters through all operations. It has no
streams, so that it does not find missing synchronization on the device.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.host_waits import READ

__all__ = ["StandInDevice"]

_TO_HOST = {"cpu", "numpy", "tolist", "__array__"}
_FROM_DATA = {"tensor", "as_tensor", "from_numpy"}


class _Storages:
    """A set of weak references to storages."""

    def __init__(self) -> None:
        self._refs: dict[int, StorageWeakRef] = {}  # the reference keeps the address from being used again

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._refs[storage._cdata] = StorageWeakRef(storage)

    def __contains__(self, tensor: Tensor) -> bool:
        ref = self._refs.get(tensor.untyped_storage()._cdata)
        return ref is not None and not ref.expired()


class StandInDevice:
    """A context manager that records everything that would wait for the device.

    Args:
        tensors: the initial tensors on the device.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.waits: list[str] = []
        self.reads = 0
        """Number of reads of values that were copied to the host in the previous step."""
        self._there, self._on_their_way, self._arrived = _Storages(), _Storages(), _Storages()
        self._modes = _Calls(self), _Operations(self)
        for tensor in tensors:
            self._there.add(getattr(tensor, "_local_tensor", tensor))

    def begin_step(self) -> None:
        """Completes the non-blocking copies, and resets the counters."""
        self._arrived, self._on_their_way = self._on_their_way, _Storages()
        self.waits, self.reads = [], 0

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def wait(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/titan_async/" in f.filename]
        self.waits.append(f"{what} in {' < '.join(f'{f.name}:{f.lineno}' for f in reversed(frames[-4:]))}")

    def holds(self, value: Any) -> bool:
        return _is_plain(value) and value in self._there

    def read(self, name: str, tensor: Tensor) -> None:
        if self.holds(tensor) or tensor in self._on_their_way:
            self.wait(name)
        self.reads += tensor in self._arrived

    def wrote(self, tensor: Tensor) -> None:
        self._there.add(tensor)

    def sent(self, tensor: Tensor) -> None:
        self._on_their_way.add(tensor)


class _Calls(TorchFunctionMode):
    """Calls that name the device of tensors, which operations on the CPU do not."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, kwargs, name = self._device, kwargs or {}, getattr(func, "__name__", "")
        if name in _TO_HOST and _is_plain(args[0]):
            device.read(name, args[0])
        elif name in _FROM_DATA and kwargs.get("device") is not None:
            device.wait(name)
        result = func(*args, **kwargs)
        where = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else None)
        if isinstance(where, torch.device) and _is_plain(result):
            if name == "to" and not device.holds(args[0]) and not kwargs.get("non_blocking"):
                device.wait(name)
            device.wrote(result)
        return result


class _Operations(TorchDispatchMode):
    """All operations, including nested ones."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # they dispatch operations on their local tensors
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **(kwargs or {}))  # shape inference of DTensor
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        device, tensors = self._device, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        non_blocking = name == "copy_" and kwargs.get("non_blocking", len(args) > 2 and args[2])
        if non_blocking and device.holds(args[1]) and not device.holds(args[0]):
            device.sent(args[0])
            return func(*args, **kwargs)
        by_mask = name.startswith("index") and any(t.dtype == torch.bool for t in tensors[1:])
        if name in READ or by_mask:
            for tensor in tensors:
                device.read(name, tensor)
        return self._run(func, args, kwargs, any(map(device.holds, tensors)) and name not in READ)

    def _run(self, func: Any, args: Any, kwargs: Any, on_device: bool) -> Any:
        result = func(*args, **kwargs)
        if on_device:
            written = [
                value
                for argument, value in [
                    *zip(func._schema.arguments, args, strict=False),
                    *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
                ]
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for tensor in tree_leaves((result, written)):
                if _is_plain(tensor):
                    self._device.wrote(tensor)
        return result


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter)
