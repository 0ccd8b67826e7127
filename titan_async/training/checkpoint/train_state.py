"""The entries that this project adds to torchtitan's `train_state` in checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.distributed import ParallelDims

from titan_async.pipelining import ScheduleAsync2BW
from titan_async.training.checkpoint.ema import WeightAverage
from titan_async.training.models.tying import as_held, as_stored

__all__ = ["EMA_WEIGHTS", "NEXT_WEIGHTS", "RANDOM_STATE", "TrainState", "layout_key", "random_state"]

NEXT_WEIGHTS = "next_weights"
"""The weights that the next batch reads, one update older than the model's."""

EMA_WEIGHTS = "ema_weights"
"""The weights averaged over the updates."""

RANDOM_STATE = "random_state"
"""The states of the random number generators, by `layout_key`."""


class TrainState:
    """State that is saved in addition to torchtitan's. Loading leaves what a checkpoint lacks unchanged.

    Args:
        part: this rank's stage, or its first.
        schedule: the schedule, if it delays gradients.
        average: the average of the weights, if the run has one.
        dims: the layout of the run.
        device: on which it computes.
    """

    def __init__(
        self,
        part: nn.Module,
        schedule: ScheduleAsync2BW | None,
        average: WeightAverage | None,
        dims: ParallelDims,
        device: torch.device,
    ) -> None:
        self._part, self._schedule, self._average, self._device = part, schedule, average, device
        self._layout = layout_key(dims, dist.get_rank(), device)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {RANDOM_STATE: {self._layout: random_state(self._device)}}
        if self._schedule is not None:
            state[NEXT_WEIGHTS] = as_stored(self._part, self._schedule.state_dict())
        if self._average is not None:
            state[EMA_WEIGHTS] = self._average.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self._schedule is not None and NEXT_WEIGHTS in state_dict:
            self._schedule.load_state_dict(as_held(self._part, dict(state_dict[NEXT_WEIGHTS])))
        if self._average is not None and EMA_WEIGHTS in state_dict:
            self._average.load_state_dict(state_dict[EMA_WEIGHTS])
        if RANDOM_STATE in state_dict:
            _restore_random_state(state_dict[RANDOM_STATE][self._layout], self._device)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of this process's generators, the CPU's and the device's, as uint8 vectors by name."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _restore_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type].cpu(), device)


def layout_key(dims: ParallelDims, rank: int, device: torch.device) -> str:
    """The name of a rank in a layout; a generator's state is valid only there.

    Without dots, which separate the levels of a checkpoint's keys.
    """
    degrees = (dims.pp, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.ep)
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    layout = "-".join(f"{name}{degree}" for name, degree in zip(names, degrees, strict=True) if degree > 1)
    return f"{layout or 'single'}-{device.type}-rank{rank}"
