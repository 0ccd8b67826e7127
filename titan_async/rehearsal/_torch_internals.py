"""Everything that the rehearsal uses of torch's private names.

`tests/rehearsal/test_internals.py` fails when one of them is gone.
"""

import torch
from torch.distributed.pipelining._utils import extract_tensor_metas
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import PipelineStage, _StageMeta

__all__ = ["stage_of", "state_messages"]


def stage_of(schedule: PipelineScheduleSingle) -> PipelineStage:
    """The one stage of a schedule."""
    stage = schedule._stage
    assert isinstance(stage, PipelineStage)
    return stage


def state_messages(stage: PipelineStage, tokens: torch.Size, hidden: torch.Size, dtype: torch.dtype) -> None:
    """Say what a stage receives and sends, which without real neighbours cannot be found out.

    torch then compares every message with it, and raises if one is of another shape or dtype.
    """

    def activations() -> torch.Tensor:
        return torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)

    first = torch.empty(tokens, dtype=torch.int64, device="meta")
    stage._user_meta = _StageMeta(
        inputs=extract_tensor_metas((first if stage.is_first else activations(),)),
        outputs=extract_tensor_metas((activations(),)),
        input_grads=None,
        output_grads=None,
    )
    stage._runtime_validate = True
