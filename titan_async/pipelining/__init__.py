"""Pipeline parallelism that never drains: PipeDream-2BW for `torch.distributed.pipelining`.

This layer needs torch alone (2.11 or newer).
"""

from titan_async.pipelining.actions import Action, drain_actions, step_actions
from titan_async.pipelining.schedule import ScheduleAsync2BW

__all__ = ["Action", "ScheduleAsync2BW", "drain_actions", "step_actions"]
