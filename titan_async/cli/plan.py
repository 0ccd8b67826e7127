"""`titan-async plan RECIPE.toml [flags]`."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_async.cli.command_line import VerbParser, checked, integer, quiet
from titan_async.errors import UserError

if TYPE_CHECKING:
    from titan_async.planning.hardware import Cluster

__all__ = ["run"]

_PARSER = VerbParser(
    "plan",
    "RECIPE.toml",
    """\
Predict the time, memory and traffic of a step on the given hardware, under the recipe's schedule and others,
without accelerators, data or tokenizer. Also print a faster layout, if there is one, and whether Async2BW
pays off. docs/planning.md describes the computation and its limits.""",
    recipe=True,
    examples=(
        "plan moe_10b_200b.toml",
        "plan moe_10b_200b.toml --nodes 16 --gpu h200-141gb",
        "plan dense_1b.toml --schedule 1F1B --json plan.json",
    ),
)
_PARSER.option(
    "--gpu",
    "h100-80gb (default), h200-141gb, a100-40gb, a100-80gb, b200-180gb, l40s-48gb or rtx4090-24gb; eight per "
    "node",
    metavar="NAME",
)
_PARSER.option(
    "--nodes",
    "number of nodes; data_parallel_shard_degree takes the remaining ranks, and the batch size does not "
    "change (default: the ranks that the recipe requires)",
    metavar="N",
    type=integer(1, 10_000),
)
_PARSER.option("--schedule", "same as --parallelism.pipeline_parallel_schedule", metavar="NAME")
_PARSER.option(
    "--achievable",
    "fraction of the peak that large matrix products reach (default: by GPU, 0.5 to 0.75)",
    metavar="X",
    type=checked(float, "a fraction above 0 and up to 1", lambda fraction: 0 < fraction <= 1),
)
_PARSER.option(
    "--calibration",
    "measurements of titan-async calibrate, instead of the GPU's specification; the network is that of --gpu "
    "(default: the kind that was measured). If a CPU was measured, plan for the cores of that machine",
    metavar="FILE",
)
_PARSER.option(
    "--measured",
    "scale forward and backward to the times that a run measured; RUN_DIR is its dump_folder",
    metavar="RUN_DIR",
)
_PARSER.option(
    "--mtbf",
    "mean time between failures of the whole job: the days then include saves, restarts and repeated steps",
    metavar="HOURS",
    type=checked(float, "a number of hours above 0", lambda hours: 0 < hours < math.inf),
)
_PARSER.option(
    "--json", "write the plan as JSON to FILE (default: stdout)", metavar="FILE", nargs="?", const="-"
)
_PARSER.option("--no-suggest", "do not search for a faster layout", action="store_true")


def run(argv: Sequence[str]) -> int:
    """Prints a plan; returns the exit status.

    Raises:
        UserError: a file or flag is wrong, or numbers do not fit together.
    """
    line = _PARSER.parse(argv)
    with quiet():
        _plan(line)
    return 0


def _plan(line: Namespace) -> None:
    cluster = _cluster(line)

    from titan_async.config.recipe_file import resolve_recipe

    short = ["--parallelism.pipeline_parallel_schedule", line.schedule] if line.schedule else []
    resolved = resolve_recipe([*line.operands, *line.recipe_flags, *short])  # before torchtitan, for CPUs
    config = resolved.config

    from titan_async.planning.config_variants import on_nodes, on_own_ranks, world_size_of
    from titan_async.planning.plan import Planner
    from titan_async.planning.report import print_plan

    if line.nodes is None:
        # Without GPUs an open shard degree is 1, as for titan-async train.
        config = on_own_ranks(config, 1 if cluster.accelerator.on_cpu else cluster.per_node)
    else:
        config = on_nodes(config, line.nodes, cluster.per_node)
    if cluster.accelerator.on_cpu:
        _check_cores(world_size_of(config), cluster.per_node)
    planner = Planner(cluster)
    if line.measured is not None:
        from titan_async.planning.measured_times import calibrate

        planner = Planner(cluster, calibrate(config, cluster, line.measured))
    plan = planner.plan(config, resolved.recipe, suggests=not line.no_suggest, mtbf=line.mtbf)
    if line.json is None:
        print_plan(plan)
        return
    text = json.dumps(plan.to_json(), indent=1) + "\n"
    if line.json == "-":
        sys.stdout.write(text)
    else:
        from titan_async.file_io import write_output

        with write_output(Path(line.json), "--json") as partial:
            partial.write_text(text, encoding="utf-8")
        print_plan(plan)


def _cluster(line: Namespace) -> Cluster:
    from titan_async.planning.hardware import cluster_of

    gpu, file, achievable = line.gpu, line.calibration, line.achievable
    if file is None:
        cluster = cluster_of(gpu or "h100-80gb")
        return cluster if achievable is None else cluster.reaching(achievable)
    if achievable is not None:
        raise UserError(
            "--achievable and --calibration both set the rate of matrix products: give one of them"
        )
    if gpu is not None:
        cluster_of(gpu)  # which raises for an unknown name

    from titan_async.planning.device_profile import calibrated_cluster, read_profile

    return calibrated_cluster(read_profile(Path(file)), gpu, file)


def _check_cores(ranks: int, cores: int) -> None:
    if ranks > cores:
        raise UserError(
            f"the plan is for {ranks} ranks, but the calibration is of a machine with {cores} cores: lower "
            "the degrees of [parallelism] or --nodes; ranks that share a core are not supported"
        )
