"""`titan-async rehearse RECIPE.toml [flags]`."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from titan_async.cli.command_line import VerbParser, integer, quiet
from titan_async.errors import UserError

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

    from titan_async.rehearsal.rank import Shape, Trained

__all__ = ["run"]

_PARSER = VerbParser(
    "rehearse",
    "RECIPE.toml",
    """\
Try a run of many GPUs on this machine's CPU, before paying for them. Each rank is built as in the run, in a
fake process group of the same size, without communication:

  - one rank of each stage at its real width, on the meta device;
  - the same ranks with every width divided, which train for a few updates: each shard of a parameter that
    has had a gradient must have changed;
  - every rank's shards of a checkpoint: together they must contain the model, the state of the optimizers
    and the weights of the next batch, each shard once.

It does not read the data and tokenizer of the recipe, and does not compile.""",
    recipe=True,
    examples=("rehearse moe_10b_200b.toml", "rehearse moe_10b_200b.toml --rank 63 --steps 1"),
)
_PARSER.option(
    "--rank",
    "try only this rank; its shards of a checkpoint are then not compared with those of other ranks",
    metavar="K",
    type=integer(0),
)
_PARSER.option("--steps", "number of updates (default 3)", metavar="N", type=integer(1, 10**6), default=3)
_PARSER.option(
    "--width-divisor",
    "divisor of every width in the model (default 16); 1 keeps the real widths",
    metavar="N",
    type=integer(1, 10**6),
    default=16,
)

_MAX_SENTENCES = 20
_print = partial(print, flush=True)


def run(argv: Sequence[str]) -> int:
    """Rehearses a run; returns the exit status.

    Raises:
        UserError: a file or flag is wrong.
    """
    line = _PARSER.parse(argv)
    # All ranks are on the CPU. This must be set before torch initializes CUDA.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from titan_async.config.device import ensure_device

    ensure_device()

    from titan_async.config.recipe_file import resolve
    from titan_async.rehearsal.narrow_config import narrowed, prepared, world_size
    from titan_async.training.preflight.check import check

    with quiet():
        config = resolve([*line.operands, *line.recipe_flags])
        world = world_size(config)
        if line.rank is not None and line.rank >= world:
            raise UserError(
                f"--rank is {line.rank}, but the recipe has {world} ranks: use a rank below {world}"
            )
        _check_schedule(config)
        with tempfile.TemporaryDirectory() as folder:
            small = narrowed(prepared(config, steps=line.steps, folder=folder), line.width_divisor)
            check(small, world_size=world)
    try:
        return _rehearse(config, world, line.steps, line.width_divisor, line.rank)
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        return 1


def _check_schedule(config: Trainer.Config) -> None:
    from titan_async.training.pipeline.balance import count_stages

    parallelism = config.parallelism
    if count_stages(parallelism) > parallelism.pipeline_parallel_degree:
        raise UserError(
            "a rehearsal supports schedules with one stage per rank, but "
            f"{parallelism.pipeline_parallel_schedule} has several: set "
            'parallelism.pipeline_parallel_schedule to "Async2BW" or "1F1B"'
        )


def _rehearse(config: Trainer.Config, world: int, steps: int, divisor: int, only: int | None) -> int:
    from titan_async.rehearsal.rank import build_at_real_width, for_each, rehearse
    from titan_async.rehearsal.save_plans import check_plans, expected_entries

    stages = config.parallelism.pipeline_parallel_degree
    each = world // stages
    # A different rank of each stage: they have different shards.
    chosen = [stage * each + stage % each for stage in range(stages)] if only is None else [only]

    _print(f"{world} ranks on {stages} stages. At the real width, on the meta device:")
    for shape in for_each(build_at_real_width, [(config, rank, world) for rank in chosen]):
        _print(_format_shape(shape))

    _print(f"{steps} updates at 1/{divisor} of the width:")
    plans = {}
    train = partial(rehearse, steps=steps, divisor=divisor)
    for trained in for_each(train, [(config, rank, world) for rank in chosen]):
        plans[trained.rank] = trained.plan
        _print(_format_training(trained))
    if only is not None:
        return 0

    others = [rank for rank in range(world) if rank not in plans]
    _print(f"a checkpoint, with the shards of the other {len(others)} ranks:")
    [expected] = for_each(partial(expected_entries, divisor=divisor), [(config, world)])
    build = partial(rehearse, steps=0, divisor=divisor)
    for built in for_each(build, [(config, rank, world) for rank in others]):
        plans[built.rank] = built.plan
    wrong = check_plans([plans[rank] for rank in range(world)], expected)
    for sentence in wrong[:_MAX_SENTENCES]:
        _print(f"  {sentence}")
    if len(wrong) > _MAX_SENTENCES:
        _print(f"  and {len(wrong) - _MAX_SENTENCES} more")
    if wrong:
        print(f"the checkpoint would have {len(wrong)} errors", file=sys.stderr)
        return 1
    tensors = sum(shape is not None for shape in expected.values())
    _print(f"  {len(expected):,} entries, {tensors:,} of them tensors: complete, with each shard once")
    return 0


def _format_shape(shape: Shape) -> str:
    return (
        f"  stage {shape.stage}, rank {shape.rank}: {shape.parameters:,} parameters, "
        f"{shape.local_parameters:,} of them here; {_abbreviated(shape.modules)}"
    )


def _format_training(trained: Trained) -> str:
    line = f"  stage {trained.stage}, rank {trained.rank}: {trained.changed} parameters have changed here"
    if trained.without_gradient:
        line += f"; {len(trained.without_gradient)} had no gradient ({', '.join(trained.without_gradient)})"
    return line + ("" if trained.loss is None else f"; loss {trained.loss:.3f}")


def _abbreviated(modules: Sequence[str]) -> str:
    """Returns the names of modules, with a range for the layers, which are consecutive."""
    layers = [name.partition(".")[2] for name in modules if name.startswith("layers.")]
    words = [name for name in modules if not name.startswith("layers.")]
    if layers:
        numbers = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        words.insert(
            words.index("tok_embeddings") + 1 if "tok_embeddings" in words else 0, f"layers {numbers}"
        )
    return ", ".join(words)
