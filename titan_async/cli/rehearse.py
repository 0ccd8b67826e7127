"""`titan-async rehearse RECIPE.toml [flags]`."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from titan_async.cli.command_line import parse
from titan_async.errors import UserError

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

    from titan_async.rehearsal.rank import Shape, Trained

__all__ = ["run"]

_HELP = """\
usage: titan-async rehearse RECIPE.toml [--rank K] [--steps N] [--width-divisor N] [--section.key value ...]

Try a run of many GPUs on this machine's CPU, before any of them is paid for. Each rank is built as in the
run, in a process group of that size that sends nothing:

  - one rank of each stage at its real width, without memory for it;
  - the same ranks with every width divided, which train for a few updates among imaginary neighbours: each
    part of a parameter that has had a gradient must have changed;
  - every rank's part of a checkpoint: together they must hold all of the model, of the optimizers' state and
    of the next batch's weights, each part once.

It reads no data and no tokenizer of the recipe, and compiles nothing.

flags:
  --rank K                try this rank alone; its part of a checkpoint is then not compared with others'
  --steps N               updates (default 3)
  --width-divisor N       of every width in the model (default 16); 1 for the real ones
  --section.key value     any field of the configuration, as for `titan-async train`
  -h, --help              this text
"""

_MOST_SENTENCES = 20


def run(argv: Sequence[str]) -> int:
    """Rehearses a run, or prints help; returns the exit status.

    Raises:
        UserError: a file or flag is wrong.
    """
    if "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0
    line = parse("rehearse", argv, ("rank", "steps", "width-divisor"), recipe=True)
    steps, divisor = line.whole("steps", 3, most=10**6), line.whole("width-divisor", 16, most=10**6)
    only = line.whole("rank", None, least=0)
    # A rank is on the CPU here, whatever the machine has. Before torch looks for accelerators.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from titan_async.cli.quiet import quiet
    from titan_async.config.device import ensure_device

    ensure_device()

    from titan_async.config.recipe_file import resolve
    from titan_async.rehearsal.narrow_config import narrowed, prepared, world_size
    from titan_async.training import preflight

    with quiet():
        config = resolve([*line.words, *line.recipe_flags])
        world = world_size(config)
        if only is not None and only >= world:
            raise UserError(
                f"--rank is {only}, but the degrees multiply to {world} ranks: use one below that"
            )
        _check_schedule(config)
        with tempfile.TemporaryDirectory() as folder:
            small = narrowed(prepared(config, steps=steps, folder=folder), divisor)
            preflight.check(small, world_size=world)
    try:
        return _rehearse(config, world, steps, divisor, only)
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        return 1


def _check_schedule(config: Trainer.Config) -> None:
    from titan_async.training.balance import count_stages

    parallelism = config.parallelism
    if count_stages(parallelism) > parallelism.pipeline_parallel_degree:
        raise UserError(
            "a rehearsal knows schedules of one stage a rank, and "
            f"{parallelism.pipeline_parallel_schedule} has several: set "
            'parallelism.pipeline_parallel_schedule to "Async2BW" or "1F1B"'
        )


def _rehearse(config: Trainer.Config, world: int, steps: int, divisor: int, only: int | None) -> int:
    from titan_async.rehearsal.rank import build_at_real_width, for_each, rehearse
    from titan_async.rehearsal.save_plans import check_plans, expected_entries

    stages = config.parallelism.pipeline_parallel_degree
    each = world // stages
    # Of each stage another of its ranks: they hold different parts.
    chosen = [stage * each + stage % each for stage in range(stages)] if only is None else [only]

    _say(f"{world} ranks on {stages} stages. At the real width, without memory:")
    for shape in for_each(build_at_real_width, [(config, rank, world) for rank in chosen]):
        _say(_of_shape(shape))

    _say(f"{steps} updates of them at 1/{divisor} of the width:")
    plans = {}
    train = partial(rehearse, steps=steps, divisor=divisor)
    for trained in for_each(train, [(config, rank, world) for rank in chosen]):
        plans[trained.rank] = trained.plan
        _say(_of_training(trained))
    if only is not None:
        return 0

    others = [rank for rank in range(world) if rank not in plans]
    _say(f"a checkpoint, with the parts of the other {len(others)} ranks:")
    [expected] = for_each(partial(expected_entries, divisor=divisor), [(config, world)])
    build = partial(rehearse, steps=0, divisor=divisor)
    for built in for_each(build, [(config, rank, world) for rank in others]):
        plans[built.rank] = built.plan
    wrong = check_plans([plans[rank] for rank in range(world)], expected)
    for sentence in wrong[:_MOST_SENTENCES]:
        _say(f"  {sentence}")
    if len(wrong) > _MOST_SENTENCES:
        _say(f"  and {len(wrong) - _MOST_SENTENCES} more")
    if wrong:
        print(f"the checkpoint would be wrong in {len(wrong)} places", file=sys.stderr)
        return 1
    tensors = sum(shape is not None for shape in expected.values())
    _say(f"  {len(expected):,} entries, {tensors:,} of them tensors: all are there, every part of each once")
    return 0


def _of_shape(shape: Shape) -> str:
    return (
        f"  stage {shape.stage}, rank {shape.rank}: {shape.parameters:,} parameters, "
        f"{shape.local_parameters:,} of them here; {_abbreviated(shape.modules)}"
    )


def _of_training(trained: Trained) -> str:
    line = f"  stage {trained.stage}, rank {trained.rank}: {trained.moved} parameters have changed here"
    if trained.still:
        line += f"; {len(trained.still)} had no gradient ({', '.join(trained.still)})"
    return line + ("" if trained.loss is None else f"; loss {trained.loss:.3f}")


def _abbreviated(modules: Sequence[str]) -> str:
    """The names, with one word for all layers: they follow each other."""
    layers = [name.partition(".")[2] for name in modules if name.startswith("layers.")]
    words = [name for name in modules if not name.startswith("layers.")]
    if layers:
        numbers = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        words.insert(
            words.index("tok_embeddings") + 1 if "tok_embeddings" in words else 0, f"layers {numbers}"
        )
    return ", ".join(words)


def _say(line: str) -> None:
    print(line, flush=True)
