"""Fails if torch or torchtitan changes private names that the training layer uses."""

import inspect

import pytest
import torch

from titan_async.config.device import ensure_device

ensure_device()


def test_the_private_names_exist():
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.distributed.pipeline_parallel import _build_pipeline_schedule, _split_module
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.module import Module

    from titan_async.training._titan_internals import split_layers

    source = inspect.getsource(PipelineScheduleSingle.__init__) + inspect.getsource(
        PipelineScheduleSingle.__mro__[1].__init__
    )
    for name in ("_stage", "_n_microbatches", "_loss_fn"):
        assert f"self.{name} = " in source
    assert "scale_grads=False" in inspect.getsource(_build_pipeline_schedule)
    assert list(inspect.signature(CheckpointManager._should_save).parameters) == [
        "self",
        "curr_step",
        "last_step",
    ]
    assert list(inspect.signature(_split_module).parameters) == ["whole_model", "module_names"]
    assert Decoder._skip_lm_head is False
    assert Module._param_init is None and "self._param_init[name](param)" in inspect.getsource(Module)
    assert split_layers(2, 6, 1, 1) == [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
        ["layers.3", "layers.4", "layers.5", "norm", "lm_head"],
    ]


@pytest.mark.parametrize("kind", ["packed", "documents", "window", "blocks", "heads"])
def test_the_dense_mask_on_cpu_is_that_of_torch(kind):
    from torch.nn.attention.flex_attention import and_masks, create_mask
    from torchtitan.models.common import attention

    from titan_async.training.models.cpu_overrides import _create_attention_mask

    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
    mask_mod = {
        "packed": and_masks(
            attention.get_causal_mask_mod(),
            attention.get_efficient_causal_mask_mod_for_packed_document(positions),
        ),
        "documents": attention.get_document_mask_mod(positions),
        "window": attention.get_sliding_window_mask_mod(2),
        "blocks": attention.get_fixed_block_mask_mod(4),
        "heads": lambda b, h, q, kv: (kv + h <= q + b) | (positions[b, kv] == 0),
    }[kind]
    heads = 3 if kind == "heads" else None
    mask = _create_attention_mask(mask_mod, 2, heads, 6, 6, device=torch.device("cpu"), BLOCK_SIZE=128)
    expected = create_mask(mask_mod, 2, heads, 6, 6, device="cpu")
    assert mask.shape == expected.shape and torch.equal(mask, expected)


def test_the_cpu_overrides_hook_what_they_replace():
    from torchtitan.models.common import decoder
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from titan_async.training.models import cpu_overrides

    assert decoder.create_attention_mask is cpu_overrides._create_attention_mask
    assert "create_attention_mask(" in inspect.getsource(decoder)
    assert "_grouped_mm(" in inspect.getsource(GroupedExperts)
    for name in ("_dispatch_token_exchange", "_combine_token_exchange"):
        assert hasattr(AllToAllTokenDispatcher, name)
    assert "attention_masks" in inspect.signature(FlexAttention.forward).parameters


def test_fsdp_is_not_applied_to_a_single_rank():
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import TrainingConfig
    from torchtitan.distributed import fsdp

    from titan_async.training._titan_internals import without_fsdp
    from titan_async.training.pipeline.schedule import needs_fsdp

    assert "fully_shard(model, **fsdp_config)" in inspect.getsource(fsdp.apply_fsdp_to_decoder)
    with without_fsdp():
        assert not isinstance(fsdp.fully_shard(nn.Linear(1, 1), mesh=None), FSDPModule)
    assert fsdp.fully_shard is torch.distributed.fsdp.fully_shard
    alone = TrainingConfig(dtype="float32", mixed_precision_param="float32")
    mixed = TrainingConfig(dtype="float32", mixed_precision_param="bfloat16")
    offloaded = TrainingConfig(dtype="float32", mixed_precision_param="float32", enable_cpu_offload=True)
    assert [needs_fsdp(1, each) for each in (alone, mixed, offloaded)] == [False, True, True]
    assert needs_fsdp(2, alone)
