"""Fails when torch changes a private name or behavior that the schedule relies on."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.pipelining import schedules, stage

from titan_async.pipelining._torch_internals import has_compiled_parts, prepare_buffers


def test_the_private_names_exist():
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
        "get_bwd_send_ops",
    ):
        assert hasattr(stage._PipelineStageBase, name), name
    assert next(iter(inspect.signature(schedules._batch_p2p).parameters)) == "p2p_ops"
    source = inspect.getsource(stage._PipelineStageBase.__init__)
    for name in (
        "fwd_cache",
        "bwd_cache",
        "output_chunks",
        "act_send_info",
        "args_recv_info",
        "grad_recv_info",
        "has_backward",
    ):
        assert f"self.{name}" in source, name


def test_a_stage_with_skip_connections_is_refused():
    """Stages of traced pipelines may have them; the message would be taken for the next stage's."""
    skips: Any = SimpleNamespace(is_last=False, stage_index=0, act_send_info={0: [1], 1: [2]})
    with pytest.raises(AssertionError):
        prepare_buffers(skips, 1)


def test_compiled_modules_are_recognized():
    """By private names. Nothing is compiled here, since no forward runs."""
    part, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    part.compile(backend="eager")
    assert has_compiled_parts(nn.Sequential(plain, part))
    assert has_compiled_parts(torch.compile(plain, backend="eager"))
    assert not has_compiled_parts(nn.Sequential(plain))


def test_the_private_names_of_fsdp_exist():
    for name in ("unshard", "wait_for_unshard", "post_backward", "_reshard_after_forward"):
        assert hasattr(FSDPParamGroup, name), name
    assert "self._sharded_state" in inspect.getsource(FSDPParamGroup)
    for name in ("_lazy_init", "_root_post_backward_final_callback"):
        assert hasattr(FSDPState, name), name
    assert hasattr(FSDPModule, "_get_fsdp_state") and hasattr(ShardedState, "UNSHARDED")
    source = inspect.getsource(FSDPParam)
    for name in (
        "sharded_param",
        "sharded_state",
        "_unsharded_param",
        "all_gather_outputs",
        "unsharded_accumulated_grad",
        "offload_to_cpu",
        "_param_fqn",
        "_setattr_on_modules",
    ):
        assert f"self.{name}" in source or f"def {name}" in source, name


def test_data_is_a_new_tensor_to_autograd():
    """WeightVersions relies on it: a write to the master must not count as one to the shadow."""
    master = nn.Parameter(torch.ones(2))
    shadow = nn.Parameter(master.data)
    shadow.data = master.data
    before = shadow._version
    with torch.no_grad():
        master.add_(1)
    assert shadow._version == before and torch.equal(shadow, master)
