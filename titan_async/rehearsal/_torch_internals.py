"""All uses of torch's private names in this layer.

`tests/rehearsal/test_internals.py` fails if one of them is removed.
"""

import torch
from torch.distributed.pipelining._utils import extract_tensor_metas
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import PipelineStage, _StageMeta

__all__ = ["set_message_metas", "stage_of"]


def stage_of(schedule: PipelineScheduleSingle) -> PipelineStage:
    """The one stage of a schedule."""
    stage = schedule._stage
    assert isinstance(stage, PipelineStage)
    return stage


def set_message_metas(
    stage: PipelineStage, tokens: torch.Size, hidden: torch.Size, dtype: torch.dtype
) -> None:
    """Set the shapes and dtypes of a stage's messages, which cannot be inferred without neighbors.

    torch then validates every message against them.
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
