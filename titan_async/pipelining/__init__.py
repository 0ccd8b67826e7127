"""Pipeline parallelism that never drains: PipeDream-2BW for `torch.distributed.pipelining`.

This layer needs torch alone (2.11 or newer).
"""

from typing import TYPE_CHECKING, Any

from titan_async.pipelining.actions import Action, drain_actions, step_actions

if TYPE_CHECKING:
    from titan_async.pipelining.overlap import hand_over
    from titan_async.pipelining.schedule import ScheduleAsync2BW

__all__ = ["Action", "ScheduleAsync2BW", "drain_actions", "hand_over", "step_actions"]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: who simulates schedules, or reads what they recorded, needs no torch.
    if name == "ScheduleAsync2BW":
        from titan_async.pipelining.schedule import ScheduleAsync2BW

        return ScheduleAsync2BW
    if name == "hand_over":
        from titan_async.pipelining.overlap import hand_over

        return hand_over
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
