# ruff: noqa: E402
"""Compares plans with published training runs.

    python tools/bench/published.py [--only Llama] [--json results.json] [--markdown]

The runs are those of `_published_rows.py`. The constants of `titan_async/planning/hardware.py` were fitted to
half of them; the others are held out. The exit status is 1 if the plan of a held-out run is off by more than
15 % in time or 10 % in memory, unless its row gives a reason. It takes two minutes."""

import dataclasses
import importlib
import logging
import math
import sys
import warnings
from collections.abc import Sequence

from titan_async.config.device import ensure_device

ensure_device()  # before torchtitan is imported

from _harness import Bench, Measured, record_of
from _published_rows import ROWS, UNPLANNED, Dense, Registered, Row
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_async.planning.hardware import Cluster, cluster_of
from titan_async.planning.layout import Layout, layout_of
from titan_async.planning.memory import memory_of
from titan_async.planning.step_time import stage_costs, step_time
from titan_async.planning.traced_parts import Part, trace_parts
from titan_async.recipes.debug import debug
from titan_async.recipes.dense_models import dense_spec, llama
from titan_async.training.pipeline.model_parts import alike_layers

BENCH = Bench(__doc__)
BENCH.add_argument("--only", dest="name", default="", metavar="TEXT", help="runs whose name contains this")
BENCH.add_argument("--markdown", action="store_true", help="print the table of docs/planning.md")

TIME_BOUND, MEMORY_BOUND = 1.15, 1.10

_RECOMPUTE = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row and its plan."""

    name: str
    source: str
    gpus: str
    fitted: bool
    published_tokens: float
    """Per second and GPU."""
    planned_tokens: float
    published_gib: float | None
    planned_gib: float
    excused: str

    @property
    def time(self) -> float:
        """Planned over published."""
        return self.published_tokens / self.planned_tokens

    @property
    def memory(self) -> float | None:
        """Planned over published."""
        return self.planned_gib / self.published_gib if self.published_gib else None

    @property
    def missed(self) -> bool:
        """Whether a bound applies and is missed."""
        if self.fitted or self.excused:
            return False
        return _apart(self.time) > TIME_BOUND or _apart(self.memory or 1.0) > MEMORY_BOUND


def _apart(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def cluster_for(row: Row) -> Cluster:
    """The hardware of a row, with its deviations from the data sheet."""
    cluster = cluster_of(row.gpu)
    accelerator = cluster.accelerator
    if row.attention:
        accelerator = dataclasses.replace(accelerator, attention=row.attention)
    if row.watts:
        accelerator = accelerator.limited_to(row.watts)
    if row.memory_bandwidth:
        accelerator = dataclasses.replace(accelerator, memory_bandwidth=row.memory_bandwidth)
    return dataclasses.replace(cluster, accelerator=accelerator)


def config_for(row: Row) -> Trainer.Config:
    """A recipe with the row's model and layout, and AdamW."""
    base, spec = debug(), _spec(row.model, row.dispatch)
    shards = row.gpus // (row.pp * row.tp * row.replicate)
    layers = math.ceil(len(spec.model.layers) / (row.pp * row.stages_a_rank))
    loss = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    if row.loss_chunks > 1:
        loss = ChunkedLossWrapper.Config(num_chunks=row.loss_chunks, loss_fn=loss)
    return dataclasses.replace(
        base,
        model_spec=spec,
        loss=loss,
        optimizer=dataclasses.replace(base.optimizer, name="adamw"),
        training=dataclasses.replace(
            base.training,
            local_batch_size=row.batch // (shards * row.replicate) if row.pp > 1 else row.microbatch,
            global_batch_size=row.batch,
            seq_len=row.seq_len,
            dtype="bfloat16" if row.pure_bf16 else "float32",
            mixed_precision_param="bfloat16",
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=row.pp,
            pipeline_parallel_schedule=row.schedule,
            pipeline_parallel_microbatch_size=row.microbatch,
            pipeline_parallel_layers_per_stage=layers if row.stages_a_rank > 1 else None,
            pipeline_parallel_first_stage_less_layers=0,
            pipeline_parallel_last_stage_less_layers=0,
            data_parallel_replicate_degree=row.replicate,
            data_parallel_shard_degree=shards,
            tensor_parallel_degree=row.tp,
            expert_parallel_degree=row.ep,
        ),
        debug=dataclasses.replace(base.debug, moe_force_load_balance=row.balanced),
        compile=CompileConfig(enable=True, enable_async_tensor_parallel=row.async_tp),
        activation_checkpoint=_RECOMPUTE[row.recompute],
    )


def _spec(model: Dense | Registered, dispatch: str) -> ModelSpec:
    if isinstance(model, Registered):
        module = importlib.import_module(f"torchtitan.models.{model.module}")
        return module.model_registry(model.flavor, attn_backend="flex", moe_comm_backend=dispatch)
    return dense_spec(
        "published",
        llama(
            vocab_size=model.vocabulary,
            dim=model.dim,
            n_layers=model.layers,
            n_heads=model.heads,
            hidden_dim=model.ffn,
            n_kv_heads=model.kv_heads,
        ),
    )


def parts_for(row: Row) -> dict[str, Part]:
    """The parts of the row's model, from one layer of each kind. The communication backend of experts does
    not change them, and would need its package."""
    config = config_for(dataclasses.replace(row, dispatch="standard", pp=1, tp=1, ep=1, gpus=1, replicate=1,
                                            batch=row.microbatch, stages_a_rank=1))  # fmt: skip
    model = config.model_spec.model
    kinds = alike_layers(model.layers)
    first = sorted(set(kinds))
    few = dataclasses.replace(model, layers=[model.layers[index] for index in first])
    config = dataclasses.replace(config, model_spec=dataclasses.replace(config.model_spec, model=few))
    traced = trace_parts(config)
    parts = {"tok_embeddings": traced["tok_embeddings"]}
    for index, kind in enumerate(kinds):
        old, name = f"layers.{first.index(kind)}", f"layers.{index}"
        weights = tuple(
            dataclasses.replace(weight, name=weight.name.replace(old, name, 1), unit=name)
            for weight in traced[old].weights
        )
        parts[name] = dataclasses.replace(traced[old], name=name, weights=weights)
    return parts | {"head": traced["head"]}


def compare(row: Row, parts: dict[str, Part]) -> Comparison:
    """Plans a row.

    Raises:
        ValueError: the planner does not support it.
    """
    config = config_for(row)
    layout, cluster = layout_of(config, row.gpus), cluster_for(row)
    time = step_time(config, layout, parts, cluster, costs=stage_costs(config, layout, parts, cluster))
    few = dataclasses.replace(layout, microbatches=min(layout.microbatches, 4 * layout.pp))
    most = max(memory_of(config, few, parts, rank).total for rank in range(layout.pp)) if row.gib else 0
    return Comparison(
        name=row.name,
        source=row.source,
        gpus=f"{row.gpus} {row.gpu.partition('-')[0].upper()}{f' at {row.watts:.0f} W' if row.watts else ''}",
        fitted=row.fitted,
        published_tokens=row.tokens,
        planned_tokens=time.tokens_per_second / row.gpus,
        published_gib=row.gib,
        planned_gib=most / 2**30,
        excused=row.excused or _stages_excuse(row, layout),
    )


def _stages_excuse(row: Row, layout: Layout) -> str:
    planned = len(layout.stages) // layout.pp
    return "" if planned == row.stages_a_rank else f"planned with {planned} stages per rank"


def markdown(found: Sequence[Comparison]) -> str:
    """The rows as a table, fitted ones first."""
    lines = ["| run | GPUs | tokens/s/GPU | time | memory | |", "|---" * 6 + "|"]
    for fitted in (True, False):
        for c in (c for c in found if c.fitted == fitted):
            memory = f"{c.memory:.2f} of {c.published_gib} GiB" if c.memory else ""
            lines.append(
                f"| {c.name} | {c.gpus} | {c.published_tokens:,.0f} | {c.time:.2f} | {memory} "
                f"| {'fitted' if c.fitted else 'held out'}{f'; {c.excused}' if c.excused else ''} |"
            )
    return "\n".join(lines)


def summary(found: Sequence[Comparison]) -> str:
    """The errors of both halves, without excused rows."""
    lines = []
    for name, fitted in (("fitted", True), ("held out", False)):
        half = [c for c in found if c.fitted == fitted and not c.excused]
        if half:
            worst = max(half, key=lambda c: _apart(c.time))
            spread = math.exp(sum(abs(math.log(c.time)) for c in half) / len(half)) - 1
            lines.append(
                f"{name}: {len(half)} runs, time off by {spread:.1%} on average, at most {worst.time:.2f} "
                f"({worst.name})"
            )
            memories = [c.memory for c in half if c.memory]
            if memories:
                lines[-1] += f"; memory at most {max(memories, key=_apart):.2f}"
    return "\n".join(lines)


@BENCH.part("runs")
def _runs(bench: Bench) -> Measured:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module="torchtitan")
    found: list[Comparison] = []
    traced: dict[tuple[object, ...], dict[str, Part]] = {}
    for row in ROWS:
        if bench.arguments.name in row.name:
            key = row.model, row.microbatch, row.seq_len, row.recompute, row.pure_bf16, row.loss_chunks
            traced[key] = traced.get(key) or parts_for(row)
            found.append(compare(row, traced[key]))
            print(f"{found[-1].time:.2f} {row.name} ({found[-1].gpus})", file=sys.stderr)
    text = summary(found)
    if bench.arguments.markdown:
        unplanned = [f"- {each.name} ({each.source}): {each.why}." for each in UNPLANNED]
        text = "\n".join([markdown(found), "\nWithout a row:\n", *unplanned, "", text])
    missed = ", ".join(c.name for c in found if c.missed)
    record = [record_of(comparison) for comparison in found]
    return Measured(record, [text], f"missed held-out runs: {missed}" if missed else "")


if __name__ == "__main__":
    BENCH.main()
