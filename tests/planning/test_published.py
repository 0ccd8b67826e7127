"""Planned times of products, attention and collectives by hand, and the comparison with published runs."""

import dataclasses
import sys
from pathlib import Path

import pytest

from tests.support.planning import ROUND, make_layout, make_part, make_parts
from titan_async.planning.hardware import (
    ACHIEVABLE_BANDWIDTH,
    ATTENTION_RAMP,
    BACKWARD_PASSES,
    CLUSTERS,
    EXPERT_IMBALANCE,
    FORWARD_PASSES,
    TENSOR_HIDDEN,
)
from titan_async.planning.network import Group, Network
from titan_async.planning.step_time import stage_costs

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

from _published_rows import MPT_1B, QWEN3_30B, ROWS, tokens_of_mfu, tokens_of_recomputed
from published import Comparison, cluster_for, compare, config_for, parts_for

H100 = CLUSTERS["h100-80gb"].accelerator
SLOW_MEMORY = dataclasses.replace(
    ROUND, accelerator=dataclasses.replace(ROUND.accelerator, memory_bandwidth=1e12 / ACHIEVABLE_BANDWIDTH)
)
"""Memory reaches 1 TB/s."""


def cost_of(config, parts, cluster=ROUND, **layout):
    return stage_costs(config, make_layout(1, pp=1, microbatches=1, **layout), parts, cluster)[0]


def test_product_share_of_large_and_small_products():
    assert H100.product_share("bfloat16", 2**20, 2**20, 2**20) == pytest.approx(H100.achievable, rel=1e-3)
    # A matrix-vector product takes the time of reading the matrix.
    n = 8192
    share = H100.product_share("bfloat16", 1, n, n)
    seconds = 2 * n * n / (share * H100.matrix_peak)
    assert seconds == pytest.approx(2 * n * n / (H100.memory_bandwidth * ACHIEVABLE_BANDWIDTH), rel=0.01)
    shares = [H100.product_share("bfloat16", m, n, n) for m in (16, 64, 256, 1024, 4096)]
    assert shares == sorted(shares)
    assert H100.product_share("bfloat16", n, n, 64) == H100.product_share("bfloat16", 64, n, n)


def test_attention_share_grows_with_the_sequence():
    assert H100.attention_share(ATTENTION_RAMP) == pytest.approx(H100.attention / 2)
    assert H100.attention_share(2**20) == pytest.approx(H100.attention, rel=1e-3)


def test_power_limit_scales_the_clock_by_its_cube_root():
    limited = H100.limited_to(H100.watts / 8)
    assert limited.achievable == pytest.approx(H100.achievable / 2)
    assert limited.attention == pytest.approx(H100.attention / 2)
    assert H100.limited_to(H100.watts) == H100


def test_a_dense_layer_by_hand(config):
    """1024 tokens, a thousand products by a matrix of 512 x 256 at 100 TFLOP/s, their operands at 1 TB/s;
    attention at a quarter of 200 TFLOP/s, less for short sequences; 3 GB saved by elementwise operations."""
    operations = 2 * 1024 * 512 * 256 * 1000
    part = make_part(
        "layers.0",
        tflops=operations / 1e12,
        shape=(512, 256),
        forward_flops=operations + 1e12,
        attention_flops=1e12,
        input_flops=operations + 2.5e12,
        passed_bytes=3 * 10**9,
        saved_bytes=3 * 10**9,
    )
    parts = make_parts(1) | {"layers.0": part}
    cost = cost_of(config, parts, SLOW_MEMORY)
    moved = 2 * (1024 * 256 + 256 * 512 + 1024 * 512) * 1000
    products = operations / 100e12 + moved / 1e12
    attention = 1e12 / 50e12 * (1 + ATTENTION_RAMP / 1024)
    assert cost.forward == pytest.approx(products + attention + FORWARD_PASSES * 0.003, rel=1e-3)
    assert cost.input_gradient == pytest.approx(
        products + 2.5 * attention + BACKWARD_PASSES * 0.003, rel=1e-3
    )
    summed = 512 * 256 * (2 + 8) / 1e12
    assert cost.weight_gradient == pytest.approx(products + summed, rel=1e-3)
    # Full activation checkpointing recomputes all of it.
    again = dataclasses.replace(part, recompute_flops=operations + 1e12, saved_bytes=0)
    repeated = cost_of(config, parts | {"layers.0": again}, SLOW_MEMORY)
    assert repeated.input_gradient - cost.input_gradient == pytest.approx(
        products + attention + FORWARD_PASSES * 0.003, rel=1e-3
    )


def test_experts_by_hand(config):
    """Eight experts over eight ranks, two per token: each rank's expert receives 8 x 1024 x 2 / 8 tokens."""
    part = make_part(
        "layers.0",
        tflops=1.0,
        shape=(8, 64, 128),
        expert=True,
        dispatched_bytes=2 * 10**6,
        message_bytes=10**6,
    )
    parts = make_parts(1) | {"layers.0": part}
    apart = cost_of(config, parts, SLOW_MEMORY, dp_shard=8, ep=8)
    share = SLOW_MEMORY.accelerator.product_share("bfloat16", 2048, 64, 128)
    exchange = 2 * 2e6 * 7 / 8 / 80e9
    expected = EXPERT_IMBALANCE * (1e12 / 200e12 / share + exchange)
    assert apart.forward == pytest.approx(expected, rel=1e-3)
    balanced = dataclasses.replace(
        config, debug=dataclasses.replace(config.debug, moe_force_load_balance=True)
    )
    even = cost_of(balanced, parts, SLOW_MEMORY, dp_shard=8, ep=8)
    assert even.forward == pytest.approx(expected / EXPERT_IMBALANCE, rel=1e-3)
    # If each rank has all experts, no rank waits for another, and an expert receives fewer tokens.
    together = cost_of(config, parts, SLOW_MEMORY, dp_shard=8)
    fewer = SLOW_MEMORY.accelerator.product_share("bfloat16", 256, 64, 128)
    assert together.forward == pytest.approx(1e12 / 200e12 / fewer, rel=1e-3)


def test_token_is_sent_once_per_rank_and_once_per_node():
    network = Network(ROUND, make_layout(1, pp=1, dp_shard=16, ep=16))
    inside, across = Group(8, 8), Group(16, 8)
    # Two random choices among eight ranks are 15/8 distinct ranks, of which 1/8 is the rank itself.
    once = network.dispatch_seconds(inside, 2e9, 2, once=True)
    assert once == pytest.approx(1e9 * 15 / 8 * 7 / 8 / 80e9)
    # Two choices include the other of two nodes with probability 3/4.
    assert network.dispatch_seconds(across, 2e9, 2, once=True) == pytest.approx(1e9 * 3 / 4 / 8e9)
    assert network.dispatch_seconds(across, 2e9, 2, once=False) == network.all_to_all_seconds(across, 2e9)


def test_tensor_parallel_ranks_gather_hidden_states(config):
    parts = make_parts(1) | {"layers.0": make_part("layers.0")}
    size = 1024 * config.model_spec.model.dim * 2
    plain, apart = (cost_of(config, parts, tp=tp) for tp in (1, 4))
    waited = apart.forward - plain.forward / 4
    # Four collectives of the layer, and one each of embedding and head.
    assert waited == pytest.approx((4 + 2) * size * 3 / 4 / 80e9, rel=1e-3)
    compiled = dataclasses.replace(config.compile, enable=True, enable_async_tensor_parallel=True)
    hidden = cost_of(dataclasses.replace(config, compile=compiled), parts, tp=4)
    assert apart.forward - hidden.forward == pytest.approx(TENSOR_HIDDEN * waited, rel=1e-3)


def test_fsdp_collectives_slow_down_computation(config):
    parts = make_parts(1, shape=(4096, 4096))
    sharing = dataclasses.replace(ROUND, collective_blocks=10)  # of 100
    free, slowed = (cost_of(config, parts, cluster, dp_shard=2) for cluster in (ROUND, sharing))
    gather = 4096**2 * 2 / 2 / 80e9
    assert slowed.forward - free.forward == pytest.approx(0.1 * gather, rel=0.01)
    assert slowed.backward - free.backward == pytest.approx(0.1 * 3 * gather, rel=0.01)


def row_of(name):
    return next(row for row in ROWS if row.name == name)


def test_formulas_of_the_sources():
    # 72 of 96 FLOPs are not recomputation; the two formulas count the head slightly differently.
    again, once = tokens_of_recomputed(96.0, MPT_1B, 2048), tokens_of_mfu(0.72, 100e12, MPT_1B, 2048)
    assert again == pytest.approx(once, rel=0.02)
    assert tokens_of_mfu(0.5, 300e12, MPT_1B, 2048) == pytest.approx(150e12 / 6 / 1.4e9, rel=0.15)


def test_published_row_by_hand():
    row = row_of("MPT 1B, FSDP 8")
    config, parts = config_for(row), parts_for(row)
    tokens = 14 * 2048
    # Three matrices of 8/3 x 2048 instead of two of four times the width.
    matrices = 4 * 2048**2 + 3 * row.model.ffn * 2048
    layer = parts["layers.23"]
    assert 3 * row.model.ffn == pytest.approx(8 * 2048, rel=0.01)
    assert layer.forward_flops - layer.attention_flops == 2 * tokens * matrices
    assert layer.attention_flops == 2 * tokens * 2048 * 2048  # two products, half of each
    assert [w.name for w in layer.weights if "layers.23." not in w.name] == []
    assert len(parts) == 26 and config.training.global_batch_size == 112
    found = compare(row, parts)
    assert found.planned_tokens * found.time == pytest.approx(row.tokens)
    gpu = cluster_for(row).accelerator
    # Faster than at half the achievable share, slower than at the achievable share alone.
    operations = 3 * sum(part.forward_flops for part in parts.values())
    assert found.planned_tokens < tokens / (operations / gpu.matrix_peak / gpu.achievable)
    assert found.planned_tokens > tokens / (operations / gpu.matrix_peak / gpu.achievable * 2)


def test_rows_override_properties_of_the_hardware(monkeypatch):
    row = row_of("Llama 3 8B, FSDP 8")
    special = cluster_for(row).accelerator
    assert special.memory_bandwidth == 2.4e12 and special.watts == 500
    assert special.achievable == pytest.approx(H100.achievable * (5 / 7) ** (1 / 3))
    mixture = row_of("Qwen3 30B-A3B, EP 8")
    assert mixture.model == QWEN3_30B and config_for(mixture).debug.moe_force_load_balance
    assert cluster_for(mixture).accelerator.attention == mixture.attention != H100.attention
    parts = make_parts(32, shape=(4096, 4096))
    before = compare(dataclasses.replace(row, gib=None), parts).time
    slower = dataclasses.replace(CLUSTERS[row.gpu].accelerator, achievable=H100.achievable / 2)
    monkeypatch.setitem(CLUSTERS, row.gpu, dataclasses.replace(CLUSTERS[row.gpu], accelerator=slower))
    assert compare(dataclasses.replace(row, gib=None), parts).time > 1.3 * before


def test_rows_set_the_chunks_of_the_loss():
    row = row_of("Qwen3 30B-A3B, FSDP 8")
    assert config_for(row).loss.num_chunks == row.loss_chunks == 8
    assert not hasattr(config_for(dataclasses.replace(row, loss_chunks=1)).loss, "num_chunks")


def test_chunked_loss_runs_its_backward_in_the_forward(config):
    parts = make_parts(1) | {"head": make_part("head", tflops=1.0)}
    chunked = parts | {"head": dataclasses.replace(parts["head"], chunked=True)}
    apart, within = (cost_of(config, each) for each in (parts, chunked))
    assert within.forward - apart.forward == pytest.approx(2 * 0.01, rel=1e-4)
    assert within.forward + within.backward == pytest.approx(apart.forward + apart.backward)


def test_halves_have_similar_sizes_and_rows_have_sources():
    held = [row for row in ROWS if not row.fitted]
    assert abs(len(held) - len(ROWS) / 2) <= 2 and len({row.name + row.gpu for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.source and row.gpus % (row.pp * row.tp * row.replicate) == 0, row.name


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, False),
        ({"planned_tokens": 110.0}, False),
        ({"planned_tokens": 120.0}, True),
        ({"planned_tokens": 80.0}, True),
        ({"planned_tokens": 80.0, "excused": "why"}, False),
        ({"planned_tokens": 80.0, "fitted": True}, False),
        ({"published_gib": 50.0}, True),
    ],
)
def test_bounds_apply_to_held_out_rows(changes, missed):
    values = {
        "name": "a",
        "source": "b",
        "gpus": "c",
        "fitted": False,
        "published_tokens": 100.0,
        "planned_tokens": 100.0,
        "published_gib": None,
        "planned_gib": 60.0,
        "excused": "",
    }
    assert Comparison(**(values | changes)).missed == missed
