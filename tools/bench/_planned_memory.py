"""Peak bytes of live tensors in training runs, measured and planned."""

from collections.abc import Sequence
from dataclasses import dataclass

from _recipe_runs import Case, run_case

from titan_async.planning.layout import layout_of
from titan_async.planning.memory import memory_of
from titan_async.planning.traced_parts import trace_parts

__all__ = ["CASES", "Peak", "compare"]

STEPS = 4
"""Async2BW reaches its peak in the third step."""


def _schedule(name: str) -> tuple[str, ...]:
    return ("--parallelism.pipeline_parallel_schedule", name)


SHARDS = ("--parallelism.data_parallel_shard_degree", "2")
EXPERTS = (*SHARDS, "--parallelism.expert_parallel_degree", "2")
BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
DEEP = ("--parallelism.pipeline_parallel_degree", "4")


def _one_stage(shards: int, policy: str) -> tuple[str, ...]:
    """Flags of one stage with small microbatches, so that weights and gradients dominate activations."""
    degrees = ("--parallelism.pipeline_parallel_degree", "1", *SHARDS[:1], str(shards))
    batch = ("--training.local_batch_size", "2", "--training.global_batch_size", str(4 * shards))
    policies = ("--parallelism.fsdp_reshard_after_forward", policy)
    return *degrees, *batch, "--training.seq_len", "128", *policies


CASES = [
    Case("debug_cpu", 2),
    Case("debug_cpu", 2, ("--pipeline.lookahead", "1")),
    Case("debug_cpu", 2, ("activation_checkpoint:selective",)),
    Case("debug_cpu", 2, ("activation_checkpoint:full",)),
    Case("debug_cpu", 2, BFLOAT16),
    Case("debug_cpu", 4, SHARDS),
    Case("debug_cpu", 4, DEEP),
    *(
        Case("debug_cpu", 2, _schedule(name))
        for name in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    ),
    Case("debug_cpu", 4, (*_schedule("1F1B"), *SHARDS)),
    *(
        Case("debug_cpu", shards, _one_stage(shards, policy))
        for shards in (2, 4)
        for policy in ("always", "default", "never")
    ),
    *(
        Case("debug_cpu", ranks, flags, in_chunks=True)
        for ranks, flags in [
            (2, ()),
            (2, BFLOAT16),
            (2, _schedule("1F1B")),
            (4, (*_schedule("1F1B"), *SHARDS)),
            (2, _one_stage(2, "always")),
            (2, _one_stage(2, "never")),
        ]
    ),
    Case("debug_moe_cpu", 2),
    Case("debug_moe_cpu", 4, EXPERTS),
    Case("debug_moe_cpu", 4, (*_schedule("1F1B"), *EXPERTS)),
]


@dataclass(frozen=True)
class Peak:
    """Peak bytes of a stage: of its rank with the most."""

    case: Case
    pp_rank: int
    measured: int
    predicted: int
    moment: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compare(cases: Sequence[Case]) -> list[Peak]:
    """Runs and plans each case."""
    return [peak for case in cases for peak in _compare(case)]


def _compare(case: Case) -> list[Peak]:
    config, found = run_case(case, "peak", STEPS)
    layout, parts = layout_of(config, case.ranks), trace_parts(config, on_cpu=True)
    share = case.ranks // layout.pp
    peaks = []
    for rank in range(layout.pp):
        memory = memory_of(config, layout, parts, rank, on_cpu=True)
        fullest = max(found[rank * share : (rank + 1) * share])
        peaks.append(Peak(case, rank, fullest, memory.total, memory.moment))
    return peaks
