"""The private names of torch that the planner uses exist and behave as assumed."""

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from titan_async.planning._torch_internals import (
    FLOP_FORMULAS,
    FakeTensorMode,
    address_of,
    flash_attention,
    fused_rms_norm,
    input_backward,
    observing_resizes,
)
from titan_async.planning.storage_tracker import StorageTracker


def test_fake_attention_saves_the_kernels_tensors() -> None:
    with FakeTensorMode(), StorageTracker() as tracker:
        q = torch.empty(1, 4, 16, 8, requires_grad=True)
        k, v = (torch.empty(1, 2, 16, 8, requires_grad=True) for _ in range(2))
        before = tracker.live
        out = flash_attention(q, k, v, None)
        assert out.shape == q.shape
        output, log_sum_exp = 4 * 16 * 8 * 4, 4 * 16 * 4
        assert output + log_sum_exp <= tracker.live - before < output + log_sum_exp + 100  # and a seed
        out.sum().backward()
        assert k.grad is not None and k.grad.shape == k.shape
        narrow = torch.empty(1, 4, 16, 5, requires_grad=True)  # multi-head latent attention
        out = flash_attention(q, torch.empty(1, 4, 16, 8), narrow, None)
        out.sum().backward()
        assert out.shape == narrow.shape and narrow.grad is not None


def test_fused_norm_equals_rms_norm_and_saves_one_number_per_row() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    torch.testing.assert_close(fused_rms_norm(x, (8,), weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6))
    with FakeTensorMode(), StorageTracker() as tracker:
        x = torch.empty(3, 8, requires_grad=True)
        before = tracker.live
        out = fused_rms_norm(x, (8,), None, 1e-6)
        assert tracker.live - before == 3 * 8 * 4 + 3 * 4
        del out


def test_formulas_count_experts_and_cpu_attention() -> None:
    counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
    with FakeTensorMode(), counter:
        tokens = torch.empty(16, 32, dtype=torch.bfloat16, requires_grad=True)
        experts = torch.empty(4, 32, 64, dtype=torch.bfloat16, requires_grad=True)
        offsets = torch.empty(4, dtype=torch.int32)
        out = torch._grouped_mm(tokens, experts, offs=offsets)
        out.backward(torch.empty_like(out))
    assert counter.get_total_flops() == 3 * 2 * 16 * 32 * 64
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with counter:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert counter.get_total_flops() == 3.5 * 2 * 2 * 2 * 16 * 16 * 8


def test_input_backward_computes_no_weight_gradients() -> None:
    module = torch.nn.Linear(4, 4)
    start = torch.randn(2, 4, requires_grad=True)
    kept = input_backward(module(start), torch.ones(2, 4), start, module)
    assert kept and module.weight.grad is None
    torch.testing.assert_close(start.grad, torch.ones(2, 4) @ module.weight)


def test_resizes_by_fsdp_are_observed() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    before = _fsdp_param.alloc_storage, _fsdp_param.free_storage, _fsdp_param_group.alloc_storage
    resized: list[int] = []
    tensor = torch.empty(8)
    with StorageTracker() as tracker, observing_resizes(lambda s: resized.append(address_of(s))):
        copy = tensor.clone()
        _fsdp_param.free_storage(tensor)
        _fsdp_param_group.alloc_storage(tensor)
        tracker.resized(tensor.untyped_storage())
        assert tracker.live == 2 * 8 * 4
        _fsdp_param.free_storage(tensor)
        tracker.resized(tensor.untyped_storage())
        assert tracker.live == copy.untyped_storage().nbytes()
    assert resized == [address_of(tensor.untyped_storage())] * 3
    assert before == (_fsdp_param.alloc_storage, _fsdp_param.free_storage, _fsdp_param_group.alloc_storage)
