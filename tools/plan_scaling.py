# ruff: noqa: E402
"""Plans two mixtures of experts on 8 to 8192 GPUs, and writes the tables of docs/planning.md. Run by hand:

    python tools/plan_scaling.py [--gpu h100-80gb] [--only 10b,100b] [--schedules Async2BW,1F1B,ZBVZeroBubble]
    [--json scaling.json] [--write docs/planning.md]

The batch is fixed, so that this is strong scaling: each number of GPUs gets the fastest layout that fits,
for each schedule by itself. Nothing is measured; the figures are the same on every machine. It takes some
minutes.
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
from typing import Any

from titan_async.config.device import ensure_device

ensure_device()  # before torchtitan is imported

from torchtitan.trainer import Trainer

from titan_async.planning.hardware import cluster_of
from titan_async.planning.plan import Planner
from titan_async.planning.scale import with_schedule
from titan_async.planning.step_time import StepTime
from titan_async.recipes._training import SMOLLM_VOCAB, on_gpus
from titan_async.recipes.moe import moe_10b_200b
from titan_async.recipes.moe_models import moe, moe_spec

WORLD_SIZES = [2**n for n in range(3, 14)]
SCHEDULES = ("Async2BW", "1F1B", "ZBVZeroBubble")


def moe_100b() -> Trainer.Config:
    """104 B parameters, 9 B active: the 10B recipe at twice its width, with twice the experts of 1.8 times
    their width. Two trillion tokens in batches of 33.6 M, as a model of that size may have."""
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
        stages=8,  # over which ZBV's two stages a rank split it too
        head_layers=2,
        shards=8,
        local_sequences=1024,
        microbatch=1,
        experts_over=8,
        subset="sample-350BT",
    )


MODELS: dict[str, Callable[[], Trainer.Config]] = {"10b": moe_10b_200b, "100b": moe_100b}


@dataclasses.dataclass(frozen=True)
class Row:
    """The fastest layout of one schedule on some GPUs."""

    world_size: int
    schedule: str
    layout: str
    time: StepTime


def scale(make: Callable[[], Trainer.Config], gpu: str, schedules: Sequence[str]) -> list[Row]:
    """The rows of one model; what does not fit or cannot be shared out is left out."""
    planner, rows = Planner(cluster_of(gpu)), []
    planner.parts_of(make())
    for schedule in schedules:
        config = with_schedule(make(), schedule)
        for world_size in WORLD_SIZES:
            found = planner.searcher.fastest(config, world_size)
            if found is not None:
                time, best = found
                rows.append(Row(world_size, schedule, words_of(best), time))
                print(
                    f"{schedule} on {world_size}: {rows[-1].layout}, {time.step_seconds:.2f} s",
                    file=sys.stderr,
                )
    return rows


def words_of(config: Trainer.Config) -> str:
    """Stages x replicas x shards, experts' ranks, sequences of a microbatch, lookahead, overlapped pairs."""
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


def table(rows: list[Row], schedules: Sequence[str]) -> str:
    """The rows as a Markdown table: GPUs down, schedules across."""
    headings = ["GPUs", *(text for schedule in schedules for text in (schedule, "step; MFU; bubble; days"))]
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    found = {(row.world_size, row.schedule): row for row in rows}
    for world_size in WORLD_SIZES:
        cells = [str(world_size)]
        for schedule in schedules:
            row = found.get((world_size, schedule))
            cells += ["-", "-"] if row is None else [row.layout, _figures(row.time)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _figures(time: StepTime) -> str:
    days = f"{time.days:.1f}" if time.days < 10 else f"{time.days:.0f}"
    return f"{time.step_seconds:.2f} s; {time.mfu:.1%}; {time.bubble:.1%}; {days}"


def write_table(path: Path, name: str, text: str) -> None:
    """Put a table between the two marks that have its name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    document = path.read_text(encoding="utf-8")
    if not pattern.search(document):
        sys.exit(f"{path} has no marks {begin} and {end}")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", document), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="separated by commas")
    parser.add_argument("--json", type=Path, help="file for every number")
    parser.add_argument("--write", type=Path, help="document to put the tables into")
    arguments = parser.parse_args()
    models = arguments.only.split(",")
    if unknown := sorted(set(models) - set(MODELS)):
        parser.error(f"--only {','.join(unknown)}: the models are {', '.join(MODELS)}")
    schedules = arguments.schedules.split(",")
    if unknown := sorted(set(schedules) - set(SCHEDULES)):
        parser.error(f"--schedules {','.join(unknown)}: the schedules are {', '.join(SCHEDULES)}")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module="torchtitan")
    record: dict[str, Any] = {}
    for name in models:
        rows = scale(MODELS[name], arguments.gpu, schedules)
        print(table(rows, schedules))
        record[name] = [dataclasses.asdict(row) for row in rows]
        if arguments.write:
            write_table(arguments.write, f"scaling {name}", table(rows, schedules))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
