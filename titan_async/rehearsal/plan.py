"""What one rank would write of a checkpoint."""

from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["plan_of"]


def plan_of(state: dict[str, Any], rank: int) -> SavePlan:
    """What a rank would write of a state, as torch.distributed.checkpoint plans it."""
    planner = DefaultSavePlanner()
    values = {
        key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()
    }
    planner.set_up_planner(values, is_coordinator=rank == 0)
    return planner.create_local_plan()
