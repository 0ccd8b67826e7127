"""Training runs of the project's recipe files with measurements, for `planner.py`.

As a script it is one rank of such a run: python _recipe_runs.py MEASURE FOLDER RECIPE.toml [flags]. It calls
a function of `MEASURES` and writes the result to the folder.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from titan_async.cli.launch import launch
from titan_async.config.device import ensure_device

ensure_device()  # before anything of torchtitan

from titan_async.config.recipe_file import resolve  # noqa: E402
from titan_async.planning.storage_tracker import peak_of_training  # noqa: E402
from titan_async.training.telemetry import stage_times  # noqa: E402
from titan_async.training.trainer import AsyncTrainer  # noqa: E402

__all__ = ["Case", "run_case"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """A run of a recipe file of the project."""

    recipe: str
    ranks: int
    flags: tuple[str, ...] = ()
    in_chunks: bool = False
    """Whether the loss is computed in chunks, by the recipe of that name in `_chunked_recipes.py`."""


def run_case(case: Case, measure: str, steps: int, *flags: str) -> tuple[AsyncTrainer.Config, list[Any]]:
    """Trains for `steps` steps; returns the configuration, and the measurement of each rank.

    Raises:
        RuntimeError: if the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        argv = [*_recipe(case, Path(folder)), *case.flags, *flags, "--dump_folder", folder]
        argv += ["--training.steps", str(steps), "--checkpoint.no-enable", "--validator.no-enable"]
        os.environ["TITAN_ASYNC_LOG"] = "ERROR"
        if launch(case.ranks, [sys.executable, __file__, measure, folder, *argv]):
            raise RuntimeError(f"the run of {case} failed")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.ranks)]
        return resolve(argv), found


def _recipe(case: Case, folder: Path) -> list[str]:
    file = ROOT / "toml_configs" / f"{case.recipe}.toml"
    if not case.in_chunks:
        return [str(file)]
    changed = folder / file.name
    changed.write_text(file.read_text().replace('recipe = "debug"', 'recipe = "debug_in_chunks"'))
    return [str(changed), "--module", "_chunked_recipes"]


def _processor_times(config: AsyncTrainer.Config) -> dict[str, Any]:
    """Seconds of steps and stages in thread time, without other programs and waiting."""
    stage_times.time = SimpleNamespace(perf_counter=time.thread_time)  # type: ignore[assignment]
    trainer = config.build()
    step, seconds = trainer.train_step, []

    def timed(*args: object) -> object:
        begin = time.thread_time()
        try:
            return step(*args)
        finally:
            seconds.append(time.thread_time() - begin)

    trainer.train_step = timed
    trainer.train()
    stages = trainer.stage_timer.seconds() if trainer.stage_timer is not None else []
    trainer.close()
    return {"step": median(seconds[stage_times.SKIPPED :]), "stages": stages}


MEASURES = {"peak": peak_of_training, "processor_times": _processor_times}


if __name__ == "__main__":
    _, measure, folder, *argv = sys.argv
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(MEASURES[measure](resolve(argv))))
