"""Counts the bytes of the tensors that are alive, and keeps what there was when they were most.

On CPU no allocator reports this. Seen are tensors that an operator returns while the tracker is active;
scratch space inside of a kernel is not. A storage counts until it is freed, whoever refers to it.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_async.planning._torch_internals import (
    TorchDispatchMode,
    address_of,
    telling_of_resized_storages,
    tree_iter,
)

__all__ = ["StorageTracker", "peak_of_training"]


class StorageTracker(TorchDispatchMode):
    """Use it as a context manager around everything that creates tensors, building the model included.

    Tensors on the device `meta` hold nothing and are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[str, int]] = {}  # the storage's address -> what made it, its bytes
        self._live = 0
        self._origin = "other"
        self._peak: tuple[int, dict[str, int]] = (0, {})

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # has no storage; the operators on its local tensors come here in turn
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = address_of(storage), storage.nbytes()
        if key in self._alive or not size:
            return
        self._alive[key] = self._origin, size
        weakref.finalize(storage, self._lose, key).atexit = False
        self._grow(size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size now, which no operator tells."""
        key = address_of(storage)
        if key not in self._alive:
            self._see(storage)
            return
        origin, before = self._alive[key]
        self._alive[key] = origin, storage.nbytes()
        self._grow(storage.nbytes() - before)

    def _grow(self, size: int) -> None:
        self._live += size
        if self._live > self._peak[0]:
            self._peak = self._live, self._by_origin()

    def _lose(self, key: int) -> None:
        self._live -= self._alive.pop(key)[1]

    def exclude(self, *tensors: Tensor) -> None:
        """Do not count the storages of `tensors`, which were made before, nor their views."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive[address_of(storage)] = "excluded", 0
            weakref.finalize(storage, self._lose, address_of(storage)).atexit = False

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those storages of `tensors` that are counted, each once."""
        keys = {address_of(tensor.untyped_storage()) for tensor in tensors}
        return sum(self._alive[key][1] for key in keys if key in self._alive)

    def _by_origin(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for origin, size in self._alive.values():
            totals[origin] += size
        return dict(totals)

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self._live

    @property
    def peak(self) -> int:
        """Most bytes that were alive at one time since `reset_peak`."""
        return self._peak[0]

    @property
    def peak_by_origin(self) -> dict[str, int]:
        """What the peak consisted of, by the functions, given to `attributed`, that made the tensors."""
        return self._peak[1]

    def reset_peak(self) -> None:
        self._peak = self._live, self._by_origin()

    def attributed(self, origin: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with the tensors that it makes counted under `origin`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._origin = self._origin, origin
            try:
                return function(*args, **kwargs)
            finally:
                self._origin = before

        return call


def peak_of_training(config: Any) -> int:
    """The most bytes that this rank holds while it builds a trainer of torchtitan and trains."""
    torch.autograd.set_multithreading_enabled(False)  # the tracker sees this thread alone
    with StorageTracker() as tracker, telling_of_resized_storages(tracker.resized):
        trainer = config.build()
        trainer.train()
    trainer.close()
    return tracker.peak
