"""Processor time of training runs on a CPU, against plans with a calibration that was made just before."""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_async.cli.launch import launch
from titan_async.config.device import ensure_device

ensure_device()  # before anything of torchtitan

from titan_async.config.recipe_file import resolve  # noqa: E402
from titan_async.planning.config_variants import on_own_ranks  # noqa: E402
from titan_async.planning.device_profile import calibrated_cluster  # noqa: E402
from titan_async.planning.device_timing import profile_device  # noqa: E402
from titan_async.planning.hardware import Cluster  # noqa: E402
from titan_async.planning.plan import Planner  # noqa: E402
from titan_async.training.stage_times import SKIPPED, STEPS  # noqa: E402

__all__ = ["CASES", "Case", "Seconds", "compare"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """A run of a recipe file of the project."""

    recipe: str
    stages: int
    flags: tuple[str, ...] = ()


CASES = [
    Case("debug_cpu", 2),
    Case("debug_cpu", 1),
    Case("debug_cpu", 2, ("--training.mixed_precision_param", "bfloat16")),
    Case("debug_moe_cpu", 2),
]


@dataclass(frozen=True)
class Seconds:
    """Of a microbatch on a stage, or of a step on one stage."""

    case: Case
    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compare(cases: Sequence[Case], repeats: int) -> list[Seconds]:
    """Calibrate, run each case, and again; the medians of all rounds."""
    rounds: list[list[Seconds]] = []
    for _ in range(repeats):
        cluster = calibrated_cluster(profile_device("cpu"), None, "this machine")
        rounds.append([entry for case in cases for entry in _compare(case, cluster)])
    return [
        Seconds(
            entries[0].case,
            entries[0].what,
            statistics.median(entry.measured for entry in entries),
            statistics.median(entry.predicted for entry in entries),
        )
        for entries in zip(*rounds, strict=True)
    ]


def _compare(case: Case, cluster: Cluster) -> list[Seconds]:
    with tempfile.TemporaryDirectory() as folder:
        argv = [str(ROOT / "toml_configs" / f"{case.recipe}.toml"), *case.flags, "--dump_folder", folder]
        argv += ["--parallelism.pipeline_parallel_degree", str(case.stages)]
        argv += ["--training.steps", str(SKIPPED + STEPS), "--checkpoint.no-enable", "--validator.no-enable"]
        worker = [sys.executable, str(Path(__file__).with_name("_trainer_times.py")), folder, *argv]
        os.environ["TITAN_ASYNC_LOG"] = "ERROR"
        if launch(case.stages, worker):
            raise RuntimeError(f"the run of {case} failed")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.stages)]
        plan = Planner(cluster).plan(on_own_ranks(resolve(argv), 1), case.recipe, suggests=False)
    seconds = []
    for stage in (stage for of_rank in found for stage in of_rank["stages"]):
        cost, number = plan.costs[stage["stage"]], stage["stage"]
        seconds.append(Seconds(case, f"forward of stage {number}", stage["forward"], cost.forward))
        seconds.append(Seconds(case, f"backward of stage {number}", stage["backward"], cost.backward))
    if case.stages == 1:  # else ranks also wait
        seconds.append(Seconds(case, "step", found[0]["step"], plan.time.step_seconds))
    return seconds
