"""Times of collectives and P2P messages on a cluster.

Process groups follow torchtitan's order of ranks, innermost first: tensor parallelism, shards, replicas,
stages. A collective is limited by its slowest link; if a group spans nodes, each of its members on a node
uses its own network card. Time is latency, once per doubling of the group, plus bytes divided by bandwidth.
"""

import math
from dataclasses import dataclass

from titan_async.planning.hardware import (
    ACHIEVABLE_BANDWIDTH,
    CHANNEL_BYTES,
    COLLECTIVE_CHANNELS,
    P2P_BLOCKS,
    Cluster,
)
from titan_async.planning.layout import Layout

__all__ = ["Group", "Groups", "Network", "buffer_bytes"]


@dataclass(frozen=True)
class Group:
    """Ranks of one collective."""

    size: int
    on_a_node: int
    """Ranks of the group on the same node; equal on all nodes."""

    @property
    def share_sent(self) -> float:
        """Share of a collective's data that each rank sends: (n - 1) / n."""
        return (self.size - 1) / self.size


@dataclass(frozen=True)
class Groups:
    """The groups of one rank."""

    tensor: Group
    shards: Group
    """FSDP's ranks for dense parameters."""
    replicas: Group
    experts: Group
    """Expert-parallel ranks."""
    expert_shards: Group
    """FSDP's ranks for experts."""
    holders: Group
    """All ranks that hold parts of dense parameters: shards, replicas, tensor-parallel ranks."""
    expert_holders: Group
    """All ranks that hold parts of one expert."""


class Network:
    """The collectives and messages of a run on a cluster, in seconds.

    Args:
        cluster: the hardware.
        layout: of the run; consecutive ranks fill one node after another.
    """

    def __init__(self, cluster: Cluster, layout: Layout) -> None:
        self.cluster, self.layout = cluster, layout
        stage = layout.dp_shard * layout.tp
        self.groups = Groups(
            tensor=self._group(layout.tp, 1),
            shards=self._group(layout.dp_shard, layout.tp),
            replicas=self._group(layout.dp_replicate, stage),
            experts=self._group(layout.ep, 1),
            expert_shards=self._group(stage // layout.ep, layout.ep),
            holders=self._group(stage * layout.dp_replicate, 1),
            expert_holders=self._group(stage * layout.dp_replicate // layout.ep, layout.ep),
        )

    def _group(self, size: int, stride: int) -> Group:
        return Group(size, min(size, max(1, self.cluster.per_node // stride)))

    def spans_nodes(self, pp_rank: int, other: int) -> bool:
        """Whether two ranks of the first pipeline are on different nodes."""
        stride = self.layout.world_size // self.layout.pp
        return pp_rank * stride // self.cluster.per_node != other * stride // self.cluster.per_node

    def gather_seconds(self, group: Group, size: float) -> float:
        """An all-gather or reduce-scatter of `size` bytes in total."""
        if group.size == 1:
            return 0.0
        return self._latency(group) + size * group.share_sent / self._bandwidth(group)

    def all_reduce_seconds(self, group: Group, size: float) -> float:
        """An all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.gather_seconds(group, size)

    def all_to_all_seconds(self, group: Group, size: float) -> float:
        """An all-to-all with `size` bytes per rank, evenly distributed over all ranks including itself."""
        if group.size == 1:
            return 0.0
        inside = size * (group.on_a_node - 1) / group.size / self.cluster.link_bandwidth
        outside = size * (group.size - group.on_a_node) / group.size / self.cluster.network_bandwidth
        return self._latency(group) + max(inside, outside) / ACHIEVABLE_BANDWIDTH

    def dispatch_seconds(self, group: Group, size: float, choices: float, *, once: bool) -> float:
        """A dispatch of tokens to experts, or a combine: a rank's tokens, once per choice, are `size` bytes.

        Args:
            group: the expert-parallel ranks.
            size: bytes.
            choices: experts per token.
            once: whether a token is sent once per rank and once per node, as by DeepEP, however many of its
                experts are there.
        """
        if not once or group.size == 1:
            return self.all_to_all_seconds(group, size)
        nodes, token = group.size / group.on_a_node, size / choices
        ranks = group.size * (1 - (1 - 1 / group.size) ** choices)  # expected distinct ranks, random choices
        other_nodes = (nodes - 1) * (1 - (1 - 1 / nodes) ** choices)
        inside = token * ranks * (group.on_a_node - 1) / group.on_a_node / self.cluster.link_bandwidth
        outside = token * other_nodes / self.cluster.network_bandwidth
        return self._latency(group) + max(inside, outside) / ACHIEVABLE_BANDWIDTH

    def exchange_seconds(self, group: Group, sent: float) -> float:
        """An all-to-all in which each rank sends `sent` bytes to others."""
        return self.all_to_all_seconds(group, sent / group.share_sent) if sent else 0.0

    def message_seconds(self, pp_rank: int, other: int, size: float) -> float:
        """A P2P message of `size` bytes between two pipeline ranks."""
        cluster = self.cluster
        if self.spans_nodes(pp_rank, other):
            return cluster.network_latency + size / (cluster.network_bandwidth * ACHIEVABLE_BANDWIDTH)
        return cluster.link_latency + size / (cluster.link_bandwidth * ACHIEVABLE_BANDWIDTH)

    def message_blocks(self, pp_rank: int, other: int) -> int:
        """Processors that a pending message occupies on either rank."""
        return self.cluster.network_blocks if self.spans_nodes(pp_rank, other) else self.cluster.link_blocks

    def message_share(self, pp_rank: int, other: int) -> float:
        """`message_blocks` relative to the number of processors."""
        return self.message_blocks(pp_rank, other) / self.cluster.accelerator.processors

    @property
    def collective_share(self) -> float:
        """Share of a rank's processors that a running collective occupies."""
        return self.cluster.collective_blocks / self.cluster.accelerator.processors

    def norm_seconds(self) -> float:
        """An all-reduce of one number over all ranks."""
        if self.layout.world_size == 1:
            return 0.0
        world = Group(self.layout.world_size, min(self.layout.world_size, self.cluster.per_node))
        return 2 * self._latency(world)

    def _latency(self, group: Group) -> float:
        nodes = -(-group.size // group.on_a_node)
        inside = math.ceil(math.log2(group.on_a_node)) * self.cluster.link_latency
        return inside + math.ceil(math.log2(nodes)) * self.cluster.network_latency

    def _bandwidth(self, group: Group) -> float:
        bandwidth = self.cluster.link_bandwidth
        if group.on_a_node < group.size:
            bandwidth = min(bandwidth, group.on_a_node * self.cluster.network_bandwidth)
        return bandwidth * ACHIEVABLE_BANDWIDTH


def buffer_bytes(layout: Layout, pp_rank: int) -> int:
    """Estimated memory of NCCL's connections on a pipeline rank, outside of torch's allocator.

    The rank has one connection per process group with collectives, and one per pipeline neighbor, or under
    Async2BW two, one per direction.
    """
    stage = layout.dp_shard * layout.tp
    sizes = (layout.pp, layout.tp, layout.dp_shard, layout.dp_replicate, layout.ep, stage // layout.ep)
    collectives = sum(size > 1 for size in sizes[: None if layout.ep > 1 else -1])
    neighbors = sum(0 <= other < layout.pp for other in (pp_rank - 1, pp_rank + 1))
    p2p = neighbors * (2 * P2P_BLOCKS if layout.delayed else COLLECTIVE_CHANNELS)
    return CHANNEL_BYTES * (collectives * COLLECTIVE_CHANNELS + p2p)
