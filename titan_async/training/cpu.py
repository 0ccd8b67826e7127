"""torchtitan on CPU and gloo, for machines without an accelerator.

`ensure_device` must run before any other torchtitan module is imported, since those bind the device at
import. Where an accelerator exists nothing here takes effect.
"""

import dataclasses
import os
import resource
import sys
import types
from collections.abc import Callable
from functools import lru_cache

import torch

__all__ = ["adapt_config", "adapt_module", "ensure_device", "has_accelerator"]


@lru_cache(maxsize=1)
def has_accelerator() -> bool:
    """Whether this process sees an accelerator (asked once, before torchtitan binds its device)."""
    return torch.accelerator.is_available()


class _CpuDevice(types.ModuleType):
    """`torch.cpu`, with the questions that torchtitan asks of an accelerator's module."""

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
    """Make torchtitan use the CPU if there is no accelerator. Harmless to call again.

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


def adapt_config(config):
    """A copy of a `Trainer.Config` with the module overrides that the CPU needs; unchanged elsewhere."""
    if has_accelerator():
        return config
    from titan_async.training import cpu_overrides

    override = dataclasses.replace(
        config.override, imports=[*config.override.imports, *cpu_overrides.override_imports(config)]
    )
    checkpoint = config.checkpoint
    if getattr(checkpoint, "async_mode", None) == "async_with_pinned_mem":
        checkpoint = dataclasses.replace(checkpoint, async_mode="disabled")
    return dataclasses.replace(config, override=override, checkpoint=checkpoint)


def adapt_module(module: torch.nn.Module) -> torch.nn.Module:
    """Let a parallelized module start and train as it would on GPUs; no change where there are some.

    FSDP reduces by plain sums, because gloo has no pre-multiplied sum. Sharded parameters are drawn whole:
    on the CPU every rank draws the same numbers for its shard, so that experts on two ranks would be equal,
    be sent the same tokens, and stay equal.
    """
    if not has_accelerator():
        from torch.distributed.fsdp import FSDPModule

        from titan_async.training._titan_internals import wrap_initializers

        for submodule in module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.set_force_sum_reduction_for_comms(True)
        wrap_initializers(module, _draw_whole)
    return module


def _draw_whole(initialize: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], None]:
    """`initialize`, so that a sharded parameter gets its shard of what one that is not sharded would get."""
    from torch.distributed.tensor import DTensor, Replicate

    def initialize_whole(parameter: torch.Tensor) -> None:
        if not isinstance(parameter, DTensor):
            initialize(parameter)
            return
        mesh = parameter.device_mesh
        whole = DTensor.from_local(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device),
            mesh,
            [Replicate()] * mesh.ndim,
        )
        initialize(whole)
        # Slices it: `copy_` alone refuses a dimension of fewer entries than ranks.
        parameter.copy_(whole.redistribute(placements=parameter.placements))

    return initialize_whole
