"""Accelerators and networks, as the few numbers that a plan needs.

Peaks, memory sizes and bandwidths are from the vendors' data sheets, with sources in comments. `achievable`
was fitted, one number for A100 and one for H100, to half of the published runs of tools/bench/published.py;
H200 has the value of H100, and B200 is scaled by the fastest products measured on both (80.3 % and 77.6 %,
stas00/ml-engineering, compute/accelerator); those of L40S and RTX 4090 are assumptions. `attention` is the
share of FlexAttention and FlashAttention-2: 378 and 335 of 989 TFLOP/s on H100 (arXiv 2407.08608), the middle
of 50 to 73 % on A100 (arXiv 2307.08691), an assumption for the others. NCCL's resources are from its sources,
not measured. `titan-async calibrate` measures the rates of one accelerator for `device_profile`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from titan_async.config.suggestions import unknown_name
from titan_async.errors import UserError

__all__ = [
    "ACHIEVABLE_BANDWIDTH",
    "CHANNEL_BYTES",
    "CLUSTERS",
    "COLLECTIVE_CHANNELS",
    "P2P_BLOCKS",
    "Accelerator",
    "Cluster",
    "Rates",
    "cluster_of",
]

ACHIEVABLE_BANDWIDTH = 0.8
"""Share of a data sheet's bandwidth that large transfers reach: between accelerators as in NCCL's tests, from
memory as in STREAM. An assumption for all accelerators."""

FORWARD_PASSES = 1.0
"""Memory traffic of a layer's elementwise operations in the forward, relative to its saved bytes, if they are
compiled or fused: a norm reads and writes one of two tensors, SwiGLU reads two and writes the third."""

BACKWARD_PASSES = 3.0
"""The same in the backward, which reads saved tensors and gradients, and writes gradients."""

ATTENTION_RAMP = 350
"""Sequence length at which causal attention reaches half of its rate over long sequences:
FlashAttention-2 on H100 with heads of 128 reaches 191, 260, 298, 319, 333 and 335 TFLOP/s at lengths of 512
to 16k (arXiv 2407.08608)."""

TENSOR_HIDDEN = 0.5
"""Share of the tensor-parallel collectives that `enable_async_tensor_parallel` hides; without it none. Fitted
to the same runs."""

EXPERT_IMBALANCE = 1.1
"""Tokens of the busiest expert-parallel rank relative to the mean. An assumption; 1 with
`debug.moe_force_load_balance`."""

P2P_BLOCKS = 4
"""Thread blocks of a send or receive of Async2BW, whose process groups limit them by `max_ctas`. NCCL's
default is about 16 on NVLink and about 4 between nodes. Each occupies a multiprocessor while it waits
(NVIDIA/nccl issue 689)."""

COLLECTIVE_CHANNELS = 16
"""NCCL's approximate number of channels of a group with NVLink; each is a thread block too."""

CHANNEL_BYTES = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 2**22
"""Approximate memory of a connection per channel, 9.6 MB: NCCL's default buffers for its protocols LL, LL128
and Simple (`DEFAULT_LL_BUFFSIZE`, `DEFAULT_LL128_BUFFSIZE`, `DEFAULT_BUFFSIZE` in its init.cc)."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Achieved rates of an accelerator in one dtype."""

    products: float
    """FLOP/s of matrix products, without the traffic of their operands."""
    operands: float
    """Bytes per second of the operands and results of products."""
    attention: float
    """FLOP/s of attention over long sequences, forward and backward together."""
    attention_ramp: float
    """Sequence length at which attention reaches half of that."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU, or one core of a CPU."""

    name: str
    memory: int
    """Bytes."""
    matrix_peak: float
    """FLOP/s of dense bfloat16 or float16 products with float32 accumulation."""
    float32_peak: float
    """FLOP/s in float32, without tensor cores."""
    processors: int
    """Streaming multiprocessors."""
    memory_bandwidth: float
    """Bytes per second, from the data sheet, or measured for a large elementwise operation if calibrated."""
    achievable: float
    """Share of the peak that matrix products reach in training, without the traffic of their operands: fitted
    to published runs (docs/planning.md). `--achievable` overrides it, `--calibration` uses measured rates
    instead, `--measured` measured times of a run."""
    attention: float
    """Share of the peak that attention reaches over long sequences."""
    watts: float
    """Power limit of the data sheet; 0 if unknown."""
    forward_passes: float = FORWARD_PASSES
    backward_passes: float = BACKWARD_PASSES
    calibrated_on: str = ""
    """The device measured by `titan-async calibrate`; empty for the numbers of this module."""
    measured: Mapping[str, Rates] | None = None
    """Its measured rates by dtype, used instead of `achievable` and `attention`."""
    on_cpu: bool = False
    """Whether it is a core of a CPU, where attention computes all scores, and NCCL is not used."""

    def peak(self, dtype: str) -> float:
        """FLOP/s for the dtype of `training.mixed_precision_param`."""
        return self.matrix_peak if dtype in ("bfloat16", "float16") else self.float32_peak

    @property
    def moved_bandwidth(self) -> float:
        """Memory traffic of elementwise operations in bytes per second."""
        return self.memory_bandwidth * (ACHIEVABLE_BANDWIDTH if self.measured is None else 1.0)

    def rates(self, dtype: str) -> Rates:
        """The achieved rates in a dtype, measured if calibrated."""
        if self.measured is not None:
            return self.measured["bfloat16" if dtype == "float16" else dtype]
        return Rates(
            products=self.peak(dtype) * self.achievable,
            operands=self.moved_bandwidth,
            attention=self.peak(dtype) * self.attention,
            attention_ramp=ATTENTION_RAMP,
        )

    def product_share(self, dtype: str, m: float, n: float, k: float) -> float:
        """Share of the peak that a product of m x k and k x n reaches.

        Its time is that of its operations plus that of the traffic of operands and result. Most products in
        the tables of DeepGEMM's first README, of 64 to 8192 rows per group, are within a third.
        """
        each = 2 if dtype in ("bfloat16", "float16") else 4
        rates, operations = self.rates(dtype), 2.0 * m * n * k
        moved = each * (m * k + k * n + m * n) / rates.operands
        return operations / self.peak(dtype) / (operations / rates.products + moved)

    def attention_share(self, seq_len: int, dtype: str = "bfloat16") -> float:
        """Share of the peak that causal attention reaches at that sequence length."""
        rates = self.rates(dtype)
        return rates.attention / self.peak(dtype) / (1 + rates.attention_ramp / seq_len)

    def limited_to(self, watts: float) -> "Accelerator":
        """This accelerator with another power limit; power is about proportional to the cube of the clock."""
        clock = (watts / self.watts) ** (1 / 3)
        return replace(
            self, watts=watts, achievable=self.achievable * clock, attention=self.attention * clock
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of equal nodes."""

    accelerator: Accelerator
    per_node: int
    """Accelerators per node."""
    link_bandwidth: float
    """Bytes per second from one accelerator to others of its node, in each direction."""
    link_latency: float
    """Latency in seconds of a small message within a node."""
    network_bandwidth: float
    """Bytes per second from one accelerator to other nodes, in each direction: its share of the node's
    network cards."""
    network_latency: float
    """Latency in seconds of a small message to another node."""
    link_blocks: int = P2P_BLOCKS
    """Processors that a message within a node occupies on each accelerator, from when it is sent or its
    receive is posted until it has arrived; 0 if messages are copied without kernels."""
    network_blocks: int = P2P_BLOCKS
    """The same for a message to another node."""
    collective_blocks: int = COLLECTIVE_CHANNELS
    """The same for a collective of FSDP that overlaps with computation."""

    def reaching(self, achievable: float) -> "Cluster":
        """This cluster with another `Accelerator.achievable`."""
        return replace(self, accelerator=replace(self.accelerator, achievable=achievable))


# Seconds of an NCCL message over NVLink, over PCI Express and the host, and over InfiniBand or RoCE.
_NVLINK_LATENCY, _PCIE_LATENCY, _NETWORK_LATENCY = 5e-6, 15e-6, 12e-6

_GB = 10**9
_NVSWITCH_NODE = {"per_node": 8, "link_latency": _NVLINK_LATENCY, "network_latency": _NETWORK_LATENCY}
_PCIE_NODE = {"per_node": 8, "link_latency": _PCIE_LATENCY, "network_latency": 2 * _NETWORK_LATENCY}

CLUSTERS: dict[str, Cluster] = {
    # Processors: NVIDIA's architecture white papers; of B200 as its driver reports them.
    #
    # NVIDIA H100 Tensor Core GPU data sheet, SXM: 1979 TFLOPS bfloat16 with sparsity, half without; 67 TFLOPS
    # float32; 80 GB, 3.35 TB/s; NVLink 900 GB/s, both directions together. DGX H100: eight 400 Gb/s ports.
    "h100-80gb": Cluster(
        accelerator=Accelerator(
            name="H100 SXM 80 GB",
            memory=80 * _GB,
            matrix_peak=989.4e12,
            float32_peak=67e12,
            processors=132,
            memory_bandwidth=3.35e12,
            achievable=0.63,
            attention=0.38,
            watts=700,
        ),
        link_bandwidth=450e9,
        network_bandwidth=50e9,
        **_NVSWITCH_NODE,
    ),
    # NVIDIA H200 data sheet, SXM: as H100, with 141 GB at 4.8 TB/s. DGX H200: eight 400 Gb/s ports.
    "h200-141gb": Cluster(
        accelerator=Accelerator(
            name="H200 SXM 141 GB",
            memory=141 * _GB,
            matrix_peak=989.4e12,
            float32_peak=67e12,
            processors=132,
            memory_bandwidth=4.8e12,
            achievable=0.63,
            attention=0.38,
            watts=700,
        ),
        link_bandwidth=450e9,
        network_bandwidth=50e9,
        **_NVSWITCH_NODE,
    ),
    # NVIDIA A100 data sheet, SXM: 312 TFLOPS bfloat16, 19.5 float32; NVLink 600 GB/s; 1.555 and 2.039 TB/s.
    # DGX A100: eight 200 Gb/s ports for computing.
    "a100-40gb": Cluster(
        accelerator=Accelerator(
            name="A100 SXM 40 GB",
            memory=40 * _GB,
            matrix_peak=312e12,
            float32_peak=19.5e12,
            processors=108,
            memory_bandwidth=1.555e12,
            achievable=0.75,
            attention=0.6,
            watts=400,
        ),
        link_bandwidth=300e9,
        network_bandwidth=25e9,
        **_NVSWITCH_NODE,
    ),
    "a100-80gb": Cluster(
        accelerator=Accelerator(
            name="A100 SXM 80 GB",
            memory=80 * _GB,
            matrix_peak=312e12,
            float32_peak=19.5e12,
            processors=108,
            memory_bandwidth=2.039e12,
            achievable=0.75,
            attention=0.6,
            watts=400,
        ),
        link_bandwidth=300e9,
        network_bandwidth=25e9,
        **_NVSWITCH_NODE,
    ),
    # NVIDIA DGX B200 data sheet, an eighth of it: 1440 GB at 64 TB/s, 72 PFLOPS float8 with sparsity, of
    # which bfloat16 without it is a quarter; NVLink 1.8 TB/s; eight 400 Gb/s ports. HGX B200: 600 TFLOPS
    # float32.
    "b200-180gb": Cluster(
        accelerator=Accelerator(
            name="B200 SXM 180 GB",
            memory=180 * _GB,
            matrix_peak=2250e12,
            float32_peak=75e12,
            processors=148,
            memory_bandwidth=8e12,
            achievable=0.61,
            attention=0.3,
            watts=1000,
        ),
        link_bandwidth=900e9,
        network_bandwidth=50e9,
        **_NVSWITCH_NODE,
    ),
    # NVIDIA L40S data sheet: 362.05 TFLOPS bfloat16, 91.6 float32; 48 GB, 864 GB/s; PCI Express 4.0 x16, 64
    # GB/s both ways. The network is assumed: one 400 Gb/s port for four.
    "l40s-48gb": Cluster(
        accelerator=Accelerator(
            name="L40S 48 GB",
            memory=48 * _GB,
            matrix_peak=362.05e12,
            float32_peak=91.6e12,
            processors=142,
            memory_bandwidth=864e9,
            achievable=0.5,
            attention=0.5,
            watts=350,
        ),
        link_bandwidth=32e9,
        network_bandwidth=12.5e9,
        **_PCIE_NODE,
    ),
    # NVIDIA Ada GPU architecture paper, GeForce RTX 4090: 165.2 TFLOPS bfloat16 with float32 sums, 82.6
    # float32; 24 GB, 1008 GB/s; PCI Express 4.0 x16 without peer-to-peer transfers, so messages are copied
    # twice, through the host. The network is assumed: one 100 Gb/s port for eight.
    "rtx4090-24gb": Cluster(
        accelerator=Accelerator(
            name="GeForce RTX 4090 24 GB",
            memory=24 * _GB,
            matrix_peak=165.2e12,
            float32_peak=82.6e12,
            processors=128,
            memory_bandwidth=1008e9,
            achievable=0.6,
            attention=0.6,
            watts=450,
        ),
        link_bandwidth=16e9,
        network_bandwidth=1.5625e9,
        **_PCIE_NODE,
    ),
}
"""Nodes of eight of each kind of accelerator, by the name that `--gpu` takes."""


def cluster_of(name: str) -> Cluster:
    """The cluster of that name.

    Raises:
        UserError: if there is none.

    Examples:
        >>> cluster = cluster_of("h100-80gb")
        >>> cluster.per_node, cluster.accelerator.name, cluster.accelerator.peak("bfloat16")
        (8, 'H100 SXM 80 GB', 989400000000000.0)
    """
    if name.lower() not in CLUSTERS:
        raise UserError(unknown_name("--gpu", name, CLUSTERS))
    return CLUSTERS[name.lower()]
