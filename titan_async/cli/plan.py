"""`titan-async plan RECIPE.toml [flags]`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titan_async.errors import UserError
from titan_async.training.edit import nearest

__all__ = ["run"]

_HELP = """\
usage: titan-async plan RECIPE.toml [flags] [--section.key value ...]

Say what a run will need, without accelerators, data or tokenizer: time, memory and traffic of a step on the
hardware named, under its own schedule and others, and a faster layout if there is one. Everything is
computed from the recipe; docs/planning.md says how, and what is left out.

flags:
  --gpu NAME              h100-80gb (default), h200-141gb, a100-40gb, a100-80gb, b200-180gb, l40s-48gb or
                          rtx4090-24gb, in nodes of eight
  --nodes N               that many nodes; data_parallel_shard_degree takes the ranks that the other degrees
                          leave, and the batch stays as it is (default: the ranks that the recipe asks for)
  --schedule NAME         short for --parallelism.pipeline_parallel_schedule
  --achievable X          share of the peak that layers reach by themselves (default: by GPU, about 0.5)
  --measured RUN_DIR      scale forward and backward to what a run measured; RUN_DIR is its dump_folder
  --json [FILE]           write the plan as JSON, to stdout without FILE
  --no-suggest            do not look for a faster layout
  --section.key value     any field of the configuration, as for titan-async train
  --module MODULE         as for titan-async train
  -h, --help              this text

examples:
  titan-async plan toml_configs/moe_10b_200b.toml
  titan-async plan toml_configs/moe_10b_200b.toml --nodes 16 --gpu h200-141gb
  titan-async plan toml_configs/dense_1b.toml --schedule 1F1B --json plan.json
"""


@dataclass
class _Arguments:
    rest: list[str] = field(default_factory=list)
    gpu: str = "h100-80gb"
    nodes: int | None = None
    schedule: str | None = None
    achievable: float | None = None
    measured: str | None = None
    json: str | None = None
    """A file, or "-" for stdout."""
    suggests: bool = True


_VALUES = ("gpu", "nodes", "schedule", "achievable", "measured")


def run(argv: Sequence[str]) -> int:
    """Prints a plan or help; returns the exit status.

    Raises:
        UserError: a file or flag is wrong, or numbers do not go together.
    """
    if "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0
    arguments = _parse(argv)

    import logging
    import warnings

    from titan_async.planning.hardware import cluster_of

    cluster = cluster_of(arguments.gpu)
    if arguments.achievable is not None:
        cluster = cluster.reaching(arguments.achievable)
    # torchtitan's remarks about a configuration, which training makes too, and about running on a CPU.
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module="torchtitan")

    from titan_async.training.recipe_file import resolve_recipe

    resolved = resolve_recipe(arguments.rest)  # before torchtitan is imported, for CPUs
    config = resolved.config

    from titan_async.planning.plan import Planner
    from titan_async.planning.report import print_plan
    from titan_async.planning.scale import on_nodes, on_own_ranks

    if arguments.nodes is None:
        config = on_own_ranks(config, cluster.per_node)
    else:
        config = on_nodes(config, arguments.nodes, cluster.per_node)
    planner = Planner(cluster)
    if arguments.measured is not None:
        from titan_async.planning.measured import calibrate

        planner = Planner(cluster, calibrate(config, cluster, arguments.measured))
    plan = planner.plan(config, resolved.recipe, suggests=arguments.suggests)
    if arguments.json != "-":
        print_plan(plan)
    if arguments.json is not None:
        _write(arguments.json, json.dumps(plan.to_json(), indent=1) + "\n")
    return 0


def _write(file: str, text: str) -> None:
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; give another file to --json") from error


def _parse(argv: Sequence[str]) -> _Arguments:
    """Takes the flags of its own; what is left is for `resolve_recipe`."""
    arguments, words = _Arguments(), list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in (*_VALUES, "json", "no-suggest"):
            if word.startswith("--"):
                _refuse_alike(word.partition("=")[0])
            arguments.rest.append(word)
        elif name == "no-suggest":
            arguments.suggests = False
        elif name == "json":
            follows = bool(words) and not words[0].startswith("--")
            arguments.json = value if equals else words.pop(0) if follows else "-"
        else:
            if not equals:
                if not words or words[0].startswith("--"):
                    raise UserError(f"--{name} needs a value, as in titan-async plan --help")
                value = words.pop(0)
            _set(arguments, name, value)
    if arguments.schedule is not None:
        arguments.rest += ["--parallelism.pipeline_parallel_schedule", arguments.schedule]
    return arguments


def _set(arguments: _Arguments, name: str, value: str) -> None:
    if name == "nodes":
        if not re.fullmatch(r"[1-9]\d{0,6}", value):
            raise UserError(f"--nodes must be a positive integer, not {value}")
        arguments.nodes = int(value)
    elif name == "achievable":
        try:
            arguments.achievable = float(value)
        except ValueError:
            arguments.achievable = 0.0
        if not 0 < arguments.achievable <= 1:
            raise UserError(f"--achievable must be a share above 0 and up to 1, not {value}")
    else:
        setattr(arguments, name, value)


def _refuse_alike(flag: str) -> None:
    own = [f"--{name}" for name in (*_VALUES, "json", "no-suggest")]
    close = nearest(flag, [*own, "--module"], cutoff=0.8)
    if close and close != flag and "." not in flag:
        raise UserError(f"unknown flag {flag}; did you mean {close}?")
