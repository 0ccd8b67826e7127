"""Processor time of training runs on a CPU, measured, and planned with a calibration of the same machine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from _recipe_runs import Case, run_case

from titan_async.planning.config_variants import on_own_ranks
from titan_async.planning.device_profile import calibrated_cluster
from titan_async.planning.device_timing import profile_device
from titan_async.planning.hardware import Cluster
from titan_async.planning.plan import Planner
from titan_async.training.telemetry.stage_times import SKIPPED, STEPS

__all__ = ["CASES", "Seconds", "compare"]

CASES = [
    Case("debug_cpu", 2),
    Case("debug_cpu", 1),
    Case("debug_cpu", 2, ("--training.mixed_precision_param", "bfloat16")),
    Case("debug_moe_cpu", 2),
]


@dataclass(frozen=True)
class Seconds:
    """Seconds of a microbatch on a stage, or of a step on one stage."""

    case: Case
    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compare(cases: Sequence[Case], repeats: int) -> list[Seconds]:
    """Calibrates and runs each case, `repeats` times; returns the medians."""
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
    degree = "--parallelism.pipeline_parallel_degree", str(case.ranks)
    config, found = run_case(case, "processor_times", SKIPPED + STEPS, *degree)
    plan = Planner(cluster).plan(on_own_ranks(config, 1), case.recipe, suggests=False)
    seconds = []
    for stage in (stage for of_rank in found for stage in of_rank["stages"]):
        cost, number = plan.costs[stage["stage"]], stage["stage"]
        seconds.append(Seconds(case, f"forward of stage {number}", stage["forward"], cost.forward))
        seconds.append(Seconds(case, f"backward of stage {number}", stage["backward"], cost.backward))
    if case.ranks == 1:  # otherwise ranks also wait
        seconds.append(Seconds(case, "step", found[0]["step"], plan.time.step_seconds))
    return seconds
