"""`titan-async plan RECIPE.toml [flags]`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_async.cli.command_line import CommandLine, parse
from titan_async.errors import UserError

if TYPE_CHECKING:
    from titan_async.planning.hardware import Cluster

__all__ = ["run"]

_HELP = """\
usage: titan-async plan RECIPE.toml [flags] [--section.key value ...]

Say what a run will need, without accelerators, data or tokenizer: time, memory and traffic of a step on the
hardware named, under its own schedule and others, a faster layout if there is one, and whether Async2BW
pays. Everything is computed from the recipe; docs/planning.md says how, and what is left out.

flags:
  --gpu NAME              h100-80gb (default), h200-141gb, a100-40gb, a100-80gb, b200-180gb, l40s-48gb or
                          rtx4090-24gb, in nodes of eight
  --nodes N               that many nodes; data_parallel_shard_degree takes the ranks that the other degrees
                          leave, and the batch stays as it is (default: the ranks that the recipe asks for)
  --schedule NAME         short for --parallelism.pipeline_parallel_schedule
  --achievable X          share of the peak that large matrix products reach (default: by GPU, 0.5 to 0.75)
  --calibration FILE      what titan-async calibrate measured, in place of the GPU's figures; the network is
                          that of --gpu, by default of the kind that was measured. Of a CPU: plan for the
                          cores of that machine
  --measured RUN_DIR      scale forward and backward to what a run measured; RUN_DIR is its dump_folder
  --mtbf HOURS            mean time between failures of the whole job: the days then count saves, restarts and
                          what is trained again
  --json [FILE]           write the plan as JSON, to stdout without FILE
  --no-suggest            do not look for a faster layout
  --section.key value     any field of the configuration, as for titan-async train
  --module MODULE         as for titan-async train
  -h, --help              this text

examples:
  titan-async plan moe_10b_200b.toml
  titan-async plan moe_10b_200b.toml --nodes 16 --gpu h200-141gb
  titan-async plan dense_1b.toml --schedule 1F1B --json plan.json
"""


_MOST_NODES = 10_000
_FLAGS = ("gpu", "nodes", "schedule", "achievable", "calibration", "measured", "mtbf")


def run(argv: Sequence[str]) -> int:
    """Prints a plan or help; returns the exit status.

    Raises:
        UserError: a file or flag is wrong, or numbers do not go together.
    """
    if "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0
    line = parse("plan", argv, _FLAGS, switches=("no-suggest",), optional=("json",), recipe=True)
    nodes = line.whole("nodes", None, most=_MOST_NODES)
    achievable = _number(line, "achievable", "a share above 0 and up to 1", lambda share: 0 < share <= 1)
    mtbf = _number(line, "mtbf", "a number of hours above 0", lambda hours: 0 < hours < math.inf)

    from titan_async.cli.quiet import quiet

    with quiet():
        _plan(line, nodes, achievable, mtbf)
    return 0


def _plan(line: CommandLine, nodes: int | None, achievable: float | None, mtbf: float | None) -> None:
    cluster = _cluster(line, achievable)

    from titan_async.config.recipe_file import resolve_recipe

    schedule = line.value("schedule")
    short = [] if schedule is None else ["--parallelism.pipeline_parallel_schedule", schedule]
    resolved = resolve_recipe([*line.words, *line.recipe_flags, *short])  # before torchtitan, for CPUs
    config = resolved.config

    from titan_async.planning.plan import Planner
    from titan_async.planning.report import print_plan
    from titan_async.planning.scale import on_nodes, on_own_ranks, world_size_of

    if nodes is None:
        # Without GPUs an open shard degree is 1, as for titan-async train.
        config = on_own_ranks(config, 1 if cluster.accelerator.on_cpu else cluster.per_node)
    else:
        config = on_nodes(config, nodes, cluster.per_node)
    if cluster.accelerator.on_cpu:
        _check_cores(world_size_of(config), cluster.per_node)
    planner = Planner(cluster)
    measured = line.value("measured")
    if measured is not None:
        from titan_async.planning.measured import calibrate

        planner = Planner(cluster, calibrate(config, cluster, measured))
    plan = planner.plan(config, resolved.recipe, suggests="no-suggest" not in line.values, mtbf=mtbf)
    if "json" not in line.values:
        print_plan(plan)
        return
    text, file = json.dumps(plan.to_json(), indent=1) + "\n", line.value("json")
    if file in (None, "-"):
        sys.stdout.write(text)
    else:
        from titan_async.file_io import write_output

        with write_output(Path(file), "--json") as partial:
            partial.write_text(text, encoding="utf-8")
        print_plan(plan)


def _cluster(line: CommandLine, achievable: float | None) -> Cluster:
    from titan_async.planning.hardware import cluster_of

    gpu, file = line.value("gpu"), line.value("calibration")
    if file is None:
        cluster = cluster_of(gpu or "h100-80gb")
        return cluster if achievable is None else cluster.reaching(achievable)
    if achievable is not None:
        raise UserError("--achievable and --calibration both say what products reach: give one of them")
    if gpu is not None:
        cluster_of(gpu)  # a name that is none is a mistake of its own

    from titan_async.planning.device_profile import calibrated_cluster, read_profile

    return calibrated_cluster(read_profile(Path(file)), gpu, file)


def _check_cores(ranks: int, cores: int) -> None:
    if ranks > cores:
        raise UserError(
            f"the plan is for {ranks} ranks, and the calibration of a machine with {cores} cores: lower the "
            "degrees of [parallelism] or --nodes; ranks that share a core are not planned"
        )


def _number(line: CommandLine, flag: str, what: str, fits: Callable[[float], bool]) -> float | None:
    text = line.value(flag)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not fits(number):
        raise UserError(f"--{flag} must be {what}, not {text}")
    return number
