"""Hardware by name; process groups and times of collectives, calculated by hand."""

import dataclasses

import pytest

from tests.support.planning import ROUND, make_layout
from titan_async.errors import UserError
from titan_async.pipelining.p2p_channels import MAX_CTAS
from titan_async.planning.hardware import ACHIEVABLE_BANDWIDTH, CLUSTERS, P2P_BLOCKS, cluster_of
from titan_async.planning.network import Group, Network, buffer_bytes


def test_hardware_by_name():
    assert cluster_of("H100-80GB") is CLUSTERS["h100-80gb"]
    with pytest.raises(UserError, match=r'--gpu is "h100", which is none of .*; did you mean h100-80gb\?'):
        cluster_of("h100")


@pytest.mark.parametrize("name", CLUSTERS)
def test_figures_are_in_plausible_ranges(name):
    cluster, gpu = CLUSTERS[name], CLUSTERS[name].accelerator
    assert 24e9 <= gpu.memory <= 180e9 and str(gpu.memory // 10**9) in name
    assert 100e12 < gpu.matrix_peak < 3000e12 and 10e12 < gpu.float32_peak < gpu.matrix_peak
    assert 0.5e12 < gpu.memory_bandwidth < 10e12
    assert gpu.memory_bandwidth > cluster.link_bandwidth > cluster.network_bandwidth > 1e9
    assert 0.3 < gpu.achievable < 0.8 and 0.2 < gpu.attention < 0.7 and 300 < gpu.watts < 1100
    assert 100 < gpu.processors < 200 and 0 < cluster.link_blocks < gpu.processors / 8
    assert cluster.reaching(0.25).accelerator.achievable == 0.25


def test_groups_follow_the_order_of_ranks():
    # 4 stages x 2 replicas x 4 shards x 2 tensor-parallel ranks: a node has half of a stage's 16 ranks.
    layout = make_layout(4, dp_replicate=2, dp_shard=4, tp=2, ep=4)
    groups = Network(ROUND, layout).groups
    assert groups.tensor == Group(2, 2)
    assert groups.shards == Group(4, 4)  # ranks 0, 2, 4, 6
    assert groups.replicas == Group(2, 1)  # 0 and 8
    assert groups.experts == Group(4, 4)  # 0 to 3
    assert groups.expert_shards == Group(2, 2)  # 0 and 4
    wider = Network(ROUND, make_layout(1, pp=1, dp_shard=4, tp=4)).groups
    assert wider.shards == Group(4, 2)  # 0 and 4 on the first node
    assert groups.holders == Group(16, 8) and groups.expert_holders == Group(4, 2)


def test_collectives_are_limited_by_their_slowest_link():
    network = Network(ROUND, make_layout(1, pp=1, dp_shard=16))
    inside, across, alone = Group(8, 8), Group(16, 8), Group(16, 1)
    gb = 10**9
    assert network.gather_seconds(inside, 8 * gb) == pytest.approx(7 * gb / 80e9)
    # The 8 network cards of a node work in parallel, at 8 GB/s each: 64 GB/s, below the links' 80.
    assert network.gather_seconds(across, 16 * gb) == pytest.approx(15 * gb / 64e9)
    assert network.gather_seconds(alone, 16 * gb) == pytest.approx(15 * gb / 8e9)
    assert network.all_reduce_seconds(inside, 8 * gb) == pytest.approx(14 * gb / 80e9)
    # Of 16 GB a rank keeps 1 and in parallel sends 7 within its node, at 80 GB/s, and 8 to the other, at 8.
    assert network.all_to_all_seconds(across, 16 * gb) == pytest.approx(1.0)
    assert network.all_to_all_seconds(inside, 8 * gb) == pytest.approx(7 * gb / 80e9)
    assert network.exchange_seconds(inside, 7 * gb) == pytest.approx(7 * gb / 80e9)
    assert network.exchange_seconds(Group(1, 1), 0.0) == network.gather_seconds(Group(1, 1), gb) == 0.0


def test_latency_counts_once_per_doubling():
    cluster = CLUSTERS["h100-80gb"]
    network = Network(cluster, make_layout(1, pp=1, dp_shard=64))
    expected = 3 * cluster.link_latency + 3 * cluster.network_latency
    assert network.gather_seconds(Group(64, 8), 0.0) == pytest.approx(expected)
    assert network.norm_seconds() == pytest.approx(2 * expected)


def test_messages_between_nodes_are_slower():
    size = 10**9
    two_per_node = Network(ROUND, make_layout(4, dp_shard=4))  # stages 0 and 1 on node 0
    slow, fast = size / (10e9 * ACHIEVABLE_BANDWIDTH), size / (100e9 * ACHIEVABLE_BANDWIDTH)
    times = [two_per_node.message_seconds(rank, rank + 1, size) for rank in range(3)]
    assert times == pytest.approx([fast, slow, fast])
    assert two_per_node.message_seconds(3, 0, size) == pytest.approx(slow)
    one_per_node = Network(ROUND, make_layout(2, dp_shard=8))
    assert one_per_node.message_seconds(0, 1, size) == pytest.approx(slow)


def test_processors_and_memory_of_messages():
    cluster = dataclasses.replace(ROUND, per_node=4, link_blocks=5, network_blocks=3)
    network = Network(cluster, make_layout(4, dp_shard=2))  # two stages per node
    assert [network.message_share(rank, rank + 1) for rank in range(3)] == [0.05, 0.03, 0.05]
    assert P2P_BLOCKS == MAX_CTAS == 4
    # 4.19, 4.92 and 0.52 MB per channel. Groups for the gradient norm and the shards, and four channels per
    # direction.
    channel = 4_194_304 + 4_915_200 + 524_288
    delayed = make_layout(4, dp_shard=2, schedule="Async2BW")
    assert [buffer_bytes(delayed, rank) // channel for rank in range(4)] == [32 + 8, 48, 48, 40]
    assert buffer_bytes(delayed, 1) % channel == 0
    assert buffer_bytes(make_layout(4), 0) == (16 + 16) * channel  # torch has one group for both directions
    alone = {"dp_shard": 4, "dp_replicate": 2, "tp": 2}
    # Shards, replicas, tensor parallelism; with expert parallelism also experts and their shards.
    for ep, groups in ((1, 3), (2, 5), (8, 4)):
        assert buffer_bytes(make_layout(1, pp=1, ep=ep, **alone), 0) == groups * 16 * channel
