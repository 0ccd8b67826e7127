"""Published training runs: configuration, source, and measurements.

Figures are copied from the source; if it reports FLOP/s, `tokens_of_*` converts them to tokens by its own
formula. Rows were assigned to the fitted or the held-out half before anything was fitted; within a source
they mostly alternate. Microbatches that a source does not state are one sequence.
"""

from dataclasses import dataclass
from typing import Literal

TITAN = "pytorch/torchtitan"
TITAN_2024 = f"{TITAN} benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_TP = f"{TITAN} benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
TITAN_LLAMA2 = f"{TITAN} docs/performance.md, first version (2024)"
TITAN_LLAMA3 = f"{TITAN} docs/performance.md at 4d88a8a (2024-12)"
MPT_H100 = "mosaicml/llm-foundry scripts/train/benchmarking/README.md, H100 80GB BF16"
MPT_A100 = "mosaicml/llm-foundry scripts/train/benchmarking/README.md, A100 80GB"
MEGATRON_2021 = "arXiv 2104.04473, table 2, PTD-P; microbatches of one"
MEGATRON_2022 = "arXiv 2205.05198, MFU as in NVIDIA/Megatron-LM README.md, 2022; layout not looked up"
LLAMA_3 = "arXiv 2407.21783, table 4"
AUTOMODEL = "NVIDIA-NeMo/Automodel docs/performance-summary.mdx, pre-training, BF16"
# FLOP/s are converted as in Megatron-Bridge's tables: 241 TFLOP/s are 10,494 tokens/s, 178 are 1204.
BRIDGE = "NVIDIA/Megatron-LM pull request 5728; layout: NVIDIA-NeMo/Megatron-Bridge perf_recipes/qwen/h100"
PITH = "mlc-ai/pith-train issue 79 (torchtitan, by a user)"


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A transformer with the same feed-forward layer everywhere, of three matrices of width `ffn`. A model
    with two of 4 x dim has as many parameters and operations with three of 8/3 x dim."""

    layers: int
    dim: int
    heads: int
    ffn: int
    vocabulary: int
    kv_heads: int | None = None


@dataclass(frozen=True)
class Registered:
    """A model of torchtitan's: its module and its flavor."""

    module: str
    flavor: str


def gpt(layers: int, dim: int, heads: int, vocabulary: int = 51_200) -> Dense:
    """Two matrices of four times the width."""
    return Dense(layers=layers, dim=dim, heads=heads, ffn=round(8 * dim / 3 / 64) * 64, vocabulary=vocabulary)


def mpt(layers: int, dim: int) -> Dense:
    return gpt(layers, dim, dim // 128, 50_432)  # heads of 128; 50,368 rounded up to a multiple of 128


LLAMA2_13B = Dense(layers=40, dim=5120, heads=40, ffn=13_824, vocabulary=32_000)
LLAMA2_70B = Dense(layers=80, dim=8192, heads=64, kv_heads=8, ffn=28_672, vocabulary=32_000)
LLAMA3_8B = Dense(layers=32, dim=4096, heads=32, kv_heads=8, ffn=14_336, vocabulary=128_256)
LLAMA3_70B = Dense(layers=80, dim=8192, heads=64, kv_heads=8, ffn=28_672, vocabulary=128_256)
LLAMA3_405B = Dense(layers=126, dim=16_384, heads=128, kv_heads=8, ffn=53_248, vocabulary=128_256)
MPT_1B, MPT_3B, MPT_7B = mpt(24, 2048), mpt(32, 2560), mpt(32, 4096)
MPT_13B, MPT_30B, MPT_70B = mpt(40, 5120), mpt(48, 7168), mpt(80, 8192)
GPT_22B, GPT_175B, GPT_530B = gpt(48, 6144, 64), gpt(96, 12_288, 96), gpt(105, 20_480, 128)
QWEN3_30B, QWEN3_235B = Registered("qwen3", "30B-A3B"), Registered("qwen3", "235B-A22B")
DEEPSEEK_V3 = Registered("deepseek_v3", "671B")

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    source: str
    gpu: str
    """A name of `CLUSTERS`."""
    watts: float | None = None
    """Power limit, if different from the data sheet."""
    memory_bandwidth: float | None = None
    """Bytes per second, if different from the data sheet."""
    gpus: int
    model: Dense | Registered
    seq_len: int
    batch: int
    """Sequences per update, over all GPUs."""
    pp: int = 1
    tp: int = 1
    ep: int = 1
    replicate: int = 1
    schedule: str = "1F1B"
    stages_a_rank: int = 1
    microbatch: int = 1
    recompute: Recompute
    async_tp: bool = False
    dispatch: str = "standard"
    """torchtitan's name of the communication backend of experts."""
    balanced: bool = False
    """Whether the router was forced to balance."""
    attention: float | None = None
    """`Accelerator.attention`, if the kernels are not FlashAttention-2 or FlexAttention."""
    excused: str = ""
    """The reason why the plan cannot be right; the row is shown, and no bound applies."""
    loss_chunks: int = 1
    """Number of chunks of the sequence for the head and the loss."""
    pure_bf16: bool = False
    """Weights, gradients and moments in bfloat16."""
    tokens: float
    """Published tokens per second and GPU."""
    gib: float | None = None
    """Published peak memory of a GPU."""
    fitted: bool
    """Whether the constants were fitted to this row; otherwise it is held out."""


@dataclass(frozen=True)
class Unplanned:
    """A published run without a plan, and the reason."""

    name: str
    source: str
    why: str


def tokens_of_recomputed(tflops: float, model: Dense, seq_len: int) -> float:
    """Equation 3 of arXiv 2104.04473: the operations of four forwards, with full recomputation."""
    h, layers = model.dim, model.layers
    return tflops * 1e12 / (96 * layers * h**2 * (1 + seq_len / 6 / h + model.vocabulary / 16 / layers / h))


def tokens_of_mfu(mfu: float, peak: float, model: Dense, seq_len: int) -> float:
    """Equation 7 of arXiv 2205.05198: the operations of three forwards; attention without a causal mask."""
    h, layers = model.dim, model.layers
    return mfu * peak / (72 * layers * h**2 * (1 + seq_len / 6 / h + model.vocabulary / 12 / layers / h))


def tokens_of_llama(tflops: float) -> float:
    """6 N and the causal half of attention; the paper does not give its formula."""
    model = LLAMA3_405B
    return tflops * 1e12 / (6 * 405.85e9 + 6 * model.layers * model.dim * 8192)


META = {"gpu": "h100-80gb", "watts": 500.0, "memory_bandwidth": 2.4e12}
"""The H100 of torchtitan's benchmarks: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W."""
H100, A100 = {"gpu": "h100-80gb"}, {"gpu": "a100-80gb"}

CUDNN = 0.55
"""cuDNN's attention on H100: 539 of 989 TFLOP/s, causal, heads of 128, 16k tokens (arXiv 2407.08608)."""
UNSTATED = "how many stages per rank has is not stated; planned with two"

ROWS = [
    Row(name="Llama 3 8B, FSDP 8", source=f"{TITAN_2024}, table 1", **META, gpus=8, model=LLAMA3_8B,
        seq_len=8192, batch=16, microbatch=2, recompute="selective", tokens=6667, gib=77.0, fitted=True),
    Row(name="Llama 3 8B, FSDP 128", source=f"{TITAN_2024}, table 3", **META, gpus=128, model=LLAMA3_8B,
        seq_len=8192, batch=256, microbatch=2, recompute="selective", tokens=6514, gib=62.0, fitted=False),
    Row(name="Llama 3 70B, FSDP 32, TP 8", source=TITAN_TP, **META, gpus=256, model=LLAMA3_70B, tp=8,
        seq_len=8192, batch=512, microbatch=16, recompute="full", tokens=597.3, fitted=True),
    Row(name="Llama 3 70B, FSDP 32, TP 8, async TP", source=TITAN_TP, **META, gpus=256, model=LLAMA3_70B,
        tp=8, async_tp=True, seq_len=8192, batch=512, microbatch=16, recompute="full", tokens=652.4,
        fitted=False),
    Row(name="Llama 3 8B, FSDP 8, TP 8, async TP", source=TITAN_TP, **META, gpus=64, model=LLAMA3_8B, tp=8,
        async_tp=True, seq_len=8192, batch=96, microbatch=12, recompute="selective", tokens=4809.4,
        fitted=True),
    Row(name="Llama 3 8B, FSDP 8, TP 8", source=TITAN_TP, **META, gpus=64, model=LLAMA3_8B, tp=8,
        seq_len=8192, batch=96, microbatch=12, recompute="selective", tokens=4378, fitted=False),
    Row(name="Llama 3 405B, FSDP 16, TP 8", source=TITAN_LLAMA3, **META, gpus=128, model=LLAMA3_405B, tp=8,
        seq_len=8192, batch=32, microbatch=2, recompute="full", tokens=109, fitted=False),
    Row(name="Llama 2 13B, FSDP 64", source=TITAN_LLAMA2, **A100, gpus=64, model=LLAMA2_13B, seq_len=4096,
        batch=128, microbatch=2, recompute="none", tokens=2162, fitted=True),
    Row(name="Llama 2 13B, FSDP 64, selective", source=TITAN_LLAMA2, **A100, gpus=64, model=LLAMA2_13B,
        seq_len=4096, batch=128, microbatch=2, recompute="selective", tokens=1904, fitted=False),
    Row(name="Llama 2 70B, FSDP 64, full", source=TITAN_LLAMA2, **A100, gpus=64, model=LLAMA2_70B,
        seq_len=4096, batch=128, microbatch=2, recompute="full", tokens=353, fitted=True),
    Row(name="Llama 3 8B, FSDP 64, selective", source=TITAN_LLAMA3, **A100, gpus=64, model=LLAMA3_8B,
        seq_len=8192, batch=64, recompute="selective", tokens=2973, fitted=False),
    Row(name="Llama 3 70B, FSDP 64, full", source=TITAN_LLAMA3, **A100, gpus=64, model=LLAMA3_70B,
        seq_len=8192, batch=64, recompute="full", tokens=331, fitted=True),
    Row(name="MPT 1B, FSDP 8", source=MPT_H100, **H100, gpus=8, model=MPT_1B, seq_len=2048, batch=112,
        microbatch=14, recompute="none", tokens=45455, fitted=False),
    Row(name="MPT 3B, FSDP 64", source=MPT_H100, **H100, gpus=64, model=MPT_3B, seq_len=2048, batch=1152,
        microbatch=6, recompute="none", tokens=22525, fitted=True),
    Row(name="MPT 7B, FSDP 128", source=MPT_H100, **H100, gpus=128, model=MPT_7B, seq_len=2048, batch=768,
        microbatch=6, recompute="none", tokens=10475, fitted=False),
    Row(name="MPT 7B, FSDP 8", source=MPT_H100, **H100, gpus=8, model=MPT_7B, seq_len=2048, batch=48,
        microbatch=6, recompute="none", tokens=10643, fitted=True),
    Row(name="MPT 13B, FSDP 8", source=MPT_H100, **H100, gpus=8, model=MPT_13B, seq_len=2048, batch=16,
        microbatch=2, recompute="none", tokens=4792, fitted=False),
    Row(name="MPT 13B, FSDP 8, full", source=MPT_H100, **H100, gpus=8, model=MPT_13B, seq_len=4096,
        batch=240, microbatch=10, recompute="full", tokens=4717, fitted=True),
    Row(name="MPT 30B, FSDP 128, full", source=MPT_H100, **H100, gpus=128, model=MPT_30B, seq_len=2048,
        batch=1024, microbatch=8, recompute="full", tokens=2199, fitted=False),
    Row(name="MPT 70B, FSDP 64, full", source=MPT_H100, **H100, gpus=64, model=MPT_70B, seq_len=2048,
        batch=2048, microbatch=8, recompute="full", tokens=1039, fitted=True),
    Row(name="MPT 70B, FSDP 512, full", source=MPT_H100, **H100, gpus=512, model=MPT_70B, seq_len=2048,
        batch=4096, microbatch=8, recompute="full", tokens=1007, fitted=False),
    Row(name="MPT 3B, FSDP 8", source=MPT_A100, **A100, gpus=8, model=MPT_3B, seq_len=2048, batch=160,
        microbatch=10, recompute="none", tokens=10811, fitted=True),
    Row(name="MPT 7B, FSDP 8", source=MPT_A100, **A100, gpus=8, model=MPT_7B, seq_len=2048, batch=96,
        microbatch=6, recompute="none", tokens=4641, fitted=False),
    Row(name="MPT 30B, FSDP 8, full", source=MPT_A100, **A100, gpus=8, model=MPT_30B, seq_len=2048,
        batch=504, microbatch=3, recompute="full", tokens=916, fitted=True),
    Row(name="MPT 13B, FSDP 8, full", source=MPT_A100, **A100, gpus=8, model=MPT_13B, seq_len=4096,
        batch=240, microbatch=10, recompute="full", tokens=2060, fitted=False),
    Row(name="MPT 70B, FSDP 64, full", source=MPT_A100, **A100, gpus=64, model=MPT_70B, pure_bf16=True,
        seq_len=2048, batch=2048, microbatch=8, recompute="full", tokens=410, fitted=False),
    Row(name="GPT-3 175B, TP 8, PP 12, DP 4", source=MEGATRON_2021, **A100, gpus=384, model=GPT_175B, tp=8,
        pp=12, replicate=4, seq_len=2048, batch=1536, recompute="full",
        tokens=tokens_of_recomputed(153, GPT_175B, 2048), fitted=True),
    Row(name="GPT-3 175B, TP 8, PP 12, DP 16", source=MEGATRON_2021, **A100, gpus=1536, model=GPT_175B,
        tp=8, pp=12, replicate=16, seq_len=2048, batch=1536, recompute="full",
        tokens=tokens_of_recomputed(141, GPT_175B, 2048), fitted=False),
    Row(name="GPT 530B, TP 8, PP 35, DP 2", source=MEGATRON_2021, **A100, gpus=560, model=GPT_530B, tp=8,
        pp=35, replicate=2, seq_len=2048, batch=2240, recompute="full",
        tokens=tokens_of_recomputed(171, GPT_530B, 2048), fitted=True),
    Row(name="GPT 530B, TP 8, PP 35, DP 8", source=MEGATRON_2021, **A100, gpus=2240, model=GPT_530B, tp=8,
        pp=35, replicate=8, seq_len=2048, batch=2240, recompute="full",
        tokens=tokens_of_recomputed(159, GPT_530B, 2048), fitted=False),
    Row(name="GPT 22B, TP 8", source=MEGATRON_2022, **A100, gpus=8, model=GPT_22B, tp=8, seq_len=2048,
        batch=4, microbatch=4, recompute="none", tokens=tokens_of_mfu(0.415, 312e12, GPT_22B, 2048),
        fitted=True),
    Row(name="GPT-3 175B, TP 8, PP 8, 3 stages per rank", source=MEGATRON_2022, **A100, gpus=64,
        model=GPT_175B, tp=8, pp=8, schedule="Interleaved1F1B", stages_a_rank=3, seq_len=2048, batch=64,
        recompute="none", tokens=tokens_of_mfu(0.514, 312e12, GPT_175B, 2048), fitted=False),
    Row(name="Llama 3 405B, TP 8, PP 16, DP 64", source=LLAMA_3, **H100, excused=UNSTATED, gpus=8192,
        model=LLAMA3_405B, tp=8, pp=16, schedule="Interleaved1F1B", stages_a_rank=2, seq_len=8192,
        batch=2048, recompute="none", tokens=tokens_of_llama(430), fitted=False),
    Row(name="Llama 3 405B, TP 8, PP 16, DP 128", source=LLAMA_3, **H100, excused=UNSTATED, gpus=16384,
        model=LLAMA3_405B, tp=8, pp=16, schedule="Interleaved1F1B", stages_a_rank=2, seq_len=8192,
        batch=2048, recompute="none", tokens=tokens_of_llama(400), fitted=True),
    Row(name="Qwen3 30B-A3B, EP 8", source=AUTOMODEL, **H100, dispatch="deepep", balanced=True,
        attention=CUDNN, gpus=8, model=QWEN3_30B, ep=8, seq_len=4096, batch=512, microbatch=4,
        recompute="full", tokens=12_040, fitted=True),
    Row(name="Qwen3 30B-A3B, EP 16", source=BRIDGE, **H100, dispatch="hybridep", balanced=True,
        attention=CUDNN, gpus=16, model=QWEN3_30B, ep=16, seq_len=4096, batch=1024, recompute="none",
        tokens=240.5 / 241 * 10_494, fitted=False),
    Row(name="Qwen3 235B-A22B, TP 2, PP 8, EP 32, 4 stages per rank", source=BRIDGE, **H100, balanced=True,
        attention=CUDNN, gpus=256, model=QWEN3_235B, tp=2, pp=8, ep=32, schedule="Interleaved1F1B",
        stages_a_rank=4, seq_len=4096, batch=8192, recompute="none", tokens=302 / 178 * 1204, fitted=True,
        excused="its all-to-alls overlap with another microbatch, planned for Async2BW only"),
    Row(name="Qwen3 30B-A3B, FSDP 8", source=PITH, gpu="b200-180gb", gpus=8, model=QWEN3_30B, seq_len=8192,
        batch=64, microbatch=8, recompute="selective", loss_chunks=8, tokens=19_500, gib=141.8, fitted=False),
    Row(name="DeepSeek-V3 671B, PP 4, EP 64, 8 stages per rank", source=AUTOMODEL, **H100,
        dispatch="hybridep", balanced=True, attention=CUDNN, gpus=256, model=DEEPSEEK_V3, pp=4, ep=64,
        schedule="Interleaved1F1B", stages_a_rank=8, seq_len=4096, batch=512, recompute="full", tokens=1002,
        fitted=True),
    Row(name="DeepSeek-V3 671B, the same on 1024", source=AUTOMODEL, **H100, dispatch="hybridep",
        balanced=True, attention=CUDNN, gpus=1024, model=DEEPSEEK_V3, pp=4, ep=64, schedule="Interleaved1F1B",
        stages_a_rank=8, seq_len=4096, batch=8192, recompute="full", tokens=865, fitted=False),
]  # fmt: skip

UNPLANNED = [
    Unplanned("DeepSeek-V3, 2.788 M H800 hours", "arXiv 2412.19437, table 1", "it was trained in float8"),
    Unplanned("Llama 3 8B, 70B and 405B with float8", TITAN_2024, "plans do not support float8"),
    Unplanned(
        "OLMoE and Moonlight", "arXiv 2409.02060, 2502.16982", "a throughput with its layout was not found"
    ),
    Unplanned(
        "DeepSeek-V3 16B of torchtitan on 8 H100, 11,758 tokens/s",
        "pytorch/torchtitan issue 1789",
        "the batch was not found",
    ),
    Unplanned(
        "DeepSeek-V3 671B of torchtitan on 256 B200, 651 tokens/s",
        "pytorch.org/blog, MXFP8 and DeepEP on B200",
        "the layout was not found",
    ),
    Unplanned(
        "Llama 3 70B of NeMo AutoModel on 64 H100", AUTOMODEL, "plans do not support context parallelism"
    ),
]
