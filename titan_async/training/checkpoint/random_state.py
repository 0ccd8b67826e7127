"""The state of torch's random number generators as tensors, for a checkpoint."""

import torch
from torchtitan.distributed import ParallelDims

__all__ = ["capture", "layout_key", "restore"]


def capture(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of this process's generators, the CPU's and the device's, as uint8 vectors by name."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put the generators of this process into the states that `capture` has returned."""
    torch.set_rng_state(states["cpu"].cpu())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type].cpu(), device)


def layout_key(dims: ParallelDims, rank: int, device: torch.device) -> str:
    """Names one rank of one layout: what a generator has drawn is meaningful there only.

    Without dots, which separate the levels of a checkpoint's keys.
    """
    degrees = (dims.pp, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.ep)
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    layout = "-".join(f"{name}{degree}" for name, degree in zip(names, degrees, strict=True) if degree > 1)
    return f"{layout or 'single'}-{device.type}-rank{rank}"
