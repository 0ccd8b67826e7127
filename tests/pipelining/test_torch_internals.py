"""Fails loudly when torch changes a private name or behaviour that the schedule relies on."""

import inspect

import torch
from torch import nn
from torch.distributed.pipelining import schedules, stage


def test_the_private_names_are_there():
    for name in (
        "_initialize_stage",
        "_split_inputs",
        "_check_inputs",
        "_merge_outputs",
        "_step_microbatches",
    ):
        assert hasattr(schedules.PipelineScheduleSingle, name), name
    for name in (
        "forward_one_chunk",
        "backward_one_chunk",
        "get_fwd_recv_ops",
        "get_fwd_send_ops",
        "get_bwd_recv_ops",
        "get_bwd_send_ops",
    ):
        assert hasattr(stage._PipelineStageBase, name), name
    assert next(iter(inspect.signature(schedules._batch_p2p).parameters)) == "p2p_ops"
    source = inspect.getsource(stage._PipelineStageBase.__init__)
    for name in ("fwd_cache", "output_chunks", "args_recv_info", "has_backward"):
        assert f"self.{name}" in source, name


def test_data_is_a_new_tensor_to_autograd():
    """WeightVersions relies on it: a write to the master must not count as one to the stand-in."""
    master = nn.Parameter(torch.ones(2))
    stand_in = nn.Parameter(master.data)
    stand_in.data = master.data
    before = stand_in._version
    with torch.no_grad():
        master.add_(1)
    assert stand_in._version == before and torch.equal(stand_in, master)
