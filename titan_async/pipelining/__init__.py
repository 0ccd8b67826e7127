"""Pipeline parallelism without flushes: PipeDream-2BW for `torch.distributed.pipelining`.

This layer needs torch alone (2.11 or newer).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from titan_async.pipelining.actions import Action, drain_actions, step_actions

if TYPE_CHECKING:
    from titan_async.pipelining.overlap import all_to_all_single, hand_over
    from titan_async.pipelining.schedule import ScheduleAsync2BW

__all__ = ["Action", "ScheduleAsync2BW", "all_to_all_single", "drain_actions", "hand_over", "step_actions"]

# Imported on first use: simulating schedules, or reading recorded events, needs no torch.
_MODULES = {"ScheduleAsync2BW": "schedule", "all_to_all_single": "overlap", "hand_over": "overlap"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
