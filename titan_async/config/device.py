"""CPU support for torchtitan, which expects an accelerator.

`ensure_device` must run before any other torchtitan module is imported: those bind the device at import. It
does nothing if there is an accelerator.
"""

import os
import resource
import sys
import types
from functools import lru_cache

import torch

__all__ = ["ensure_device", "has_accelerator"]


@lru_cache(maxsize=1)
def has_accelerator() -> bool:
    """Returns whether this process has an accelerator, as determined by the first call."""
    return torch.accelerator.is_available()


class _CpuDevice(types.ModuleType):
    """`torch.cpu` with the functions that torchtitan calls on an accelerator's module."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return "cpu"

    @staticmethod
    def get_device_properties(device: object = None) -> types.SimpleNamespace:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(name="cpu", total_memory=total)

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, int]:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        """The peak resident size of a process cannot be reset."""

    @staticmethod
    def empty_cache() -> None:
        """The CPU allocator keeps no cache."""


def ensure_device() -> None:
    """Makes torchtitan use the CPU if there is no accelerator. Idempotent.

    Raises:
        RuntimeError: if a torchtitan module has already bound another device.
    """
    if has_accelerator():
        return
    from torchtitan.tools import utils

    if utils.device_type == "cpu":
        return
    bound = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("torchtitan.")
        and module is not utils
        and getattr(module, "device_module", None) is utils.device_module
    ]
    if bound:
        raise RuntimeError(f"ensure_device() must run before these are imported: {', '.join(bound)}")
    utils.device_type, utils.device_module = "cpu", _CpuDevice("titan_async_cpu_device")
