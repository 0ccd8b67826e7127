# ruff: noqa: E402
"""Computes the tables and the figure of docs/when.md: plans of Async2BW and of other schedules.

    python tools/when_it_pays.py [--only bubbles,dense,...] [--json when.json] [--write]

Strong scaling of a dense model and of two MoE models: the fastest layout that fits, for each number of GPUs
and each family of layouts. Then the bubble by microbatches, slower networks, and memory. Nothing is measured;
the results are the same on every machine. It takes some minutes.
"""

import argparse
import dataclasses
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from titan_async.config.device import ensure_device

ensure_device()  # before torchtitan is imported

from matplotlib.figure import Figure
from torchtitan.trainer import Trainer

from titan_async.monitor.figures import save, style
from titan_async.pipelining.actions import min_microbatches
from titan_async.pipelining.programs import schedule_programs, stages_of_ranks
from titan_async.pipelining.simulation import Timing, simulate
from titan_async.planning.config_variants import with_schedule
from titan_async.planning.hardware import Cluster, cluster_of
from titan_async.planning.layout import Layout, layout_of
from titan_async.planning.memory import Memory, memory_of
from titan_async.planning.plan import Planner
from titan_async.planning.step_time import Receives, StepTime
from titan_async.planning.suggest import LEAST_GAIN
from titan_async.planning.verdict import in_seconds
from titan_async.recipes._training import SMOLLM_VOCAB, on_gpus
from titan_async.recipes.dense_models import dense_spec, llama
from titan_async.recipes.moe import moe_10b_200b
from titan_async.recipes.moe_models import moe, moe_spec

DOCS = Path(__file__).parents[1] / "docs"
GPU = "h100-80gb"


def dense_8b() -> Trainer.Config:
    """Llama 3 8B's shape, in batches of 512 sequences of 8192 tokens."""
    model = llama(
        vocab_size=128_256,
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14_336,
        rope_theta=500_000,
    )
    return on_gpus(
        dense_spec("8B", model),
        name="dense_8b",
        lr=3e-4,
        steps=100_000,
        sequences=512,
        seq_len=8192,
        stages=4,
        head_layers=2,
        shards=8,
        local_sequences=64,
        microbatch=1,
        subset="sample-350BT",
    )


def moe_100b() -> Trainer.Config:
    """104 B parameters, 9 B active: twice the width of the 10B recipe, and twice as many experts of 1.8 times
    the width. Two trillion tokens in batches of 33.6 M."""
    return on_gpus(
        moe_spec(
            "104B-A9B",
            moe(
                vocab_size=SMOLLM_VOCAB,
                dim=4096,
                n_layers=46,
                n_heads=32,
                n_kv_heads=8,
                n_experts=128,
                top_k=8,
                expert_dim=1408,
                n_shared_experts=1,
            ),
        ),
        name="moe_100b",
        lr=3e-4,
        steps=59_605,
        sequences=8192,
        seq_len=4096,
        stages=8,  # also possible with ZBV's two stages per rank
        head_layers=2,
        shards=8,
        local_sequences=1024,
        microbatch=1,
        experts_over=8,
        subset="sample-350BT",
    )


def layout_label(config: Trainer.Config) -> str:
    """Stages x replicas x shards, expert-parallel degree, sequences per microbatch, lookahead, pairs."""
    parallelism = config.parallelism
    degrees = [
        parallelism.pipeline_parallel_degree,
        parallelism.data_parallel_replicate_degree,
        parallelism.data_parallel_shard_degree,
    ]
    lookahead = config.pipeline.lookahead
    return (
        f"{'x'.join(map(str, degrees))}, {parallelism.expert_parallel_degree}, "
        f"{parallelism.pipeline_parallel_microbatch_size}{f', +{lookahead}' if lookahead else ''}"
        f"{', pairs' if config.pipeline.overlap else ''}"
    )


def write_table(path: Path, name: str, text: str) -> None:
    """Replaces a table between the two comments with its name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    document = path.read_text(encoding="utf-8")
    if not pattern.search(document):
        sys.exit(f"{path} has no comments {begin} and {end}")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", document), encoding="utf-8")


MODELS: dict[str, Callable[[], Trainer.Config]] = {
    "dense": dense_8b,
    "mixture": moe_10b_200b,
    "large mixture": moe_100b,
}
WORLD_SIZES = {
    "dense": [2**n for n in range(3, 10)],
    "mixture": [2**n for n in range(3, 10)],
    "large mixture": [64, 256, 1024, 4096, 8192],
}
MEMORY_WORLD_SIZES = {"dense": 32, "mixture": 32, "large mixture": 1024}


@dataclasses.dataclass(frozen=True)
class Family:
    """Layouts of one kind."""

    name: str
    colour: str
    schedule: str
    holds: Callable[[Layout], bool]
    overlap: bool = False

    def of(self, config: Trainer.Config, receives: Receives) -> Trainer.Config:
        """A recipe under this family's schedule."""
        config = with_schedule(config, self.schedule)
        pipeline = dataclasses.replace(config.pipeline, overlap=self.overlap, early_receives=receives)
        return dataclasses.replace(config, pipeline=pipeline)


FAMILIES = (
    Family("one stage", "#555555", "Async2BW", lambda layout: layout.pp == 1),
    Family("1F1B", "#5b9bd5", "1F1B", lambda layout: layout.pp > 1),
    Family("ZBVZeroBubble", "#b07aa1", "ZBVZeroBubble", lambda layout: layout.pp > 1),
    Family("Async2BW", "#d55e00", "Async2BW", lambda layout: layout.delayed and not layout.overlap),
    Family("Async2BW, overlapped", "#1b7f5c", "Async2BW", lambda layout: layout.overlap, overlap=True),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """The fastest layout of a family on some GPUs."""

    family: str
    world_size: int
    layout: str
    time: StepTime
    memory: Memory
    """Of the rank with the highest peak."""


def families_of(name: str) -> list[Family]:
    """The families of a model; dense models have no overlapped pairs."""
    return [family for family in FAMILIES if name != "dense" or not family.overlap]


def fastest(
    planner: Planner, config: Trainer.Config, family: Family, world_size: int, receives: Receives = "auto"
) -> Row | None:
    """The fastest layout of a family, or None if none fits or the batch is not divisible."""
    found = planner.searcher.fastest(family.of(config, receives), world_size, only=family.holds)
    if found is None:
        return None
    time, best = found
    layout, parts = layout_of(best, world_size), planner.parts_of(best)
    few = dataclasses.replace(layout, microbatches=min(layout.microbatches, 4 * layout.pp), passes=1)
    memory = max((memory_of(best, few, parts, rank) for rank in range(layout.pp)), key=lambda m: m.total)
    label = layout_label(best) + (", early" if receives == "always" else "")
    print(f"{family.name} on {world_size}: {label}, {in_seconds(time.step_seconds)}", file=sys.stderr)
    return Row(family.name, world_size, label, time, memory)


def scale(name: str) -> list[Row]:
    """All families of a model on all numbers of GPUs."""
    planner, config = Planner(cluster_of(GPU)), MODELS[name]()
    planner.parts_of(config)
    rows = [
        fastest(planner, config, family, world_size)
        for family in families_of(name)
        for world_size in WORLD_SIZES[name]
    ]
    return [row for row in rows if row is not None]


def cells(rows: Sequence[Row | None]) -> list[str]:
    """Step times and layouts, with those within `LEAST_GAIN` of the fastest in bold."""
    least = min((row.time.step_seconds for row in rows if row), default=0.0)
    words = []
    for row in rows:
        if row is None:
            words.append("-")
            continue
        seconds = in_seconds(row.time.step_seconds)
        if row.time.step_seconds <= least * (1 + LEAST_GAIN):
            seconds = f"**{seconds}**"
        words.append(f"{seconds}; {row.layout}")
    return words


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
        + ["| " + " | ".join(line) + " |" for line in lines]
    )


def scaling_table(name: str, rows: Sequence[Row]) -> str:
    """A row for each number of GPUs, a column for each family."""
    found = {(row.world_size, row.family): row for row in rows}
    names = [family.name for family in families_of(name)]
    lines = [[str(n), *cells([found.get((n, family)) for family in names])] for n in WORLD_SIZES[name]]
    return markdown(["GPUs", *names], lines)


BUBBLE_STAGES, BUBBLE_TIMES = (4, 8, 16), (1, 2, 4, 8)
BUBBLE_SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "Async2BW", "Async2BW, overlapped")


def bubble(schedule: str, stages: int, microbatches: int) -> float | None:
    """Idle fraction of a step, for equal stages, backwards twice as long as forwards, and messages and
    updates that take no time; None if there are too few microbatches."""
    schedule, _, overlapped = schedule.partition(", ")
    if schedule == "Async2BW" and microbatches < min_microbatches(stages, 0, overlap=bool(overlapped)):
        return None
    total = sum(map(len, stages_of_ranks(schedule, stages)))
    batches = 6 if schedule == "Async2BW" else 3  # until the steady state
    programs = schedule_programs(schedule, stages, microbatches, batches, overlap=bool(overlapped))
    return 1 - simulate(programs, Timing([1.0] * total, [2.0] * total)).utilization


def bubble_table() -> str:
    """A row for each schedule, a column for each number of stages and microbatches."""
    shapes = [(d, times * d) for d in BUBBLE_STAGES for times in BUBBLE_TIMES]
    lines = []
    for schedule in BUBBLE_SCHEDULES:
        found = [bubble(schedule, *shape) for shape in shapes]
        lines.append([schedule, *("-" if each is None else f"{max(each, 0.0):.0%}" for each in found)])
    return markdown(["stages, microbatches", *(f"{d}, {m}" for d, m in shapes)], lines)


NETWORKS = {
    "400 Gb/s a GPU": (50e9, 12e-6),
    "100 Gb/s a GPU": (12.5e9, 25e-6),
    "25 Gb/s a GPU": (3.125e9, 50e-6),
    "100 Gb/s a node of 8": (1.5625e9, 50e-6),
}
"""Bytes per second from a GPU to other nodes, and latency in seconds; within a node always NVLink."""

NETWORK_WORLD_SIZE = 32


def network_table(name: str) -> str:
    """A row for each network, a column for each family, on four nodes."""
    names, lines = [family.name for family in families_of(name)], []
    for network, (bandwidth, latency) in NETWORKS.items():
        cluster: Cluster = dataclasses.replace(
            cluster_of(GPU), network_bandwidth=bandwidth, network_latency=latency
        )
        planner, config = Planner(cluster), MODELS[name]()
        planner.parts_of(config)
        found = [_fastest_by_receives(planner, config, family) for family in families_of(name)]
        lines.append([network, *cells(found)])
    return markdown(["network", *names], lines)


def _fastest_by_receives(planner: Planner, config: Trainer.Config, family: Family) -> Row | None:
    """The fastest layout, with early receives if they are faster, as in slow networks."""
    early: tuple[Receives, ...] = ("auto", "always") if family.name.startswith("Async2BW") else ("auto",)
    rows = [fastest(planner, config, family, NETWORK_WORLD_SIZE, receives) for receives in early]
    return min((row for row in rows if row), key=lambda row: row.time.step_seconds, default=None)


_HELD = ("second version", "error feedback", "activations")


def memory_table(rows: dict[str, list[Row]]) -> str:
    """Memory of the rank with the highest peak, for `MEMORY_WORLD_SIZES`."""
    lines = [
        [name, str(row.world_size), row.family, row.layout, f"{row.memory.total / 1e9:.1f}"]
        + [f"{row.memory.items.get(kind, 0) / 1e9:.1f}" for kind in _HELD]
        for name, of_model in rows.items()
        for row in of_model
        if row.world_size == MEMORY_WORLD_SIZES[name]
    ]
    return markdown(["model", "GPUs", "", "layout", "GB", *_HELD], lines)


def draw(rows: dict[str, list[Row]], path: Path) -> None:
    """Plots MFU against GPUs, with a panel for each model."""
    titles = {
        "dense": "8B dense, 4.2 M tokens a batch",
        "mixture": "10B mixture, 2.1 M tokens a batch",
        "large mixture": "104B mixture, 33.6 M tokens a batch",
    }
    with style():
        figure = Figure((10, 3), layout="constrained")
        for axes, (name, of_model) in zip(
            figure.subplots(1, len(rows), squeeze=False)[0], rows.items(), strict=True
        ):
            for family in families_of(name):
                there = [row for row in of_model if row.family == family.name]
                axes.plot(
                    [row.world_size for row in there], [100 * row.time.mfu for row in there], marker="o",
                    markersize=3, linewidth=1.2, color=family.colour, label=family.name,
                )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_xticks(WORLD_SIZES[name], [str(n) for n in WORLD_SIZES[name]])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.set(title=titles[name], xlabel="H100, the same batch", ylabel="MFU, %")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=7
        )
        save(figure, path)


TABLES = ("bubbles", *MODELS, "network dense", "network mixture", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(TABLES), help=f"of {', '.join(TABLES)}")
    parser.add_argument("--json", type=Path, help="file for every number of the scaling tables")
    parser.add_argument("--write", action="store_true", help="update tables and figure of docs/when.md")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := sorted(set(wanted) - set(TABLES)):
        parser.error(f"--only {','.join(unknown)}: the tables are {', '.join(TABLES)}")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module="torchtitan")
    scaled = {name: scale(name) for name in MODELS if name in wanted or "memory" in wanted}
    made: dict[str, str] = {}
    for table in wanted:
        name = table.removeprefix("network ")
        if table == "bubbles":
            made[table] = bubble_table()
        elif table == "memory":
            made[table] = memory_table(scaled)
        else:
            made[table] = scaling_table(name, scaled[name]) if name == table else network_table(name)
        print(f"{table}\n\n{made[table]}\n")
        if arguments.write:
            write_table(DOCS / "when.md", f"when {table}", made[table])
    if arguments.write and len(scaled) == len(MODELS):
        draw(scaled, DOCS / "images" / "when.svg")
    if arguments.json:
        record = {name: [dataclasses.asdict(row) for row in rows] for name, rows in scaled.items()}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
