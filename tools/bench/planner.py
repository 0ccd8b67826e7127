"""Compares plans with measurements on this machine.

    python tools/bench/planner.py [--only time,memory,rates] [--json results.json]

"time": steps of every schedule with stages that sleep 20 ms forward and 40 ms backward, as in schedule.py,
compared with their simulation.

"memory": peak bytes of live tensors on ranks of the debug recipes in four steps, compared with the plan.

"rates": processor time of forwards, backwards and steps of the debug recipes, compared with plans that use a
calibration of this machine, as by titan-async calibrate.

Each part takes four minutes on two idle cores.
"""

from dataclasses import asdict

import _planned_memory
import _planned_rates
import _planned_time
from _harness import Bench, Measured, record_of, table

BENCH = Bench(__doc__, repeats=5, quick="the smallest case of each part, once")


def _shapes(bench: Bench) -> list[tuple[int, int]]:
    return [(2, 3)] if bench.quick else _planned_time.SHAPES


@BENCH.part("time", lambda bench: {1, 2, *(ranks for ranks, _ in _shapes(bench))})
def _time(bench: Bench) -> Measured:
    overheads = _planned_time.measure_overheads(bench.pool, bench.repeats)
    steps = _planned_time.compare(bench.pool, _shapes(bench), overheads, bench.repeats)
    found = {(step.schedule, step.ranks, step.microbatches): step for step in steps}

    def cell(schedule: str, shape: tuple[int, int]) -> str | None:
        step = found[schedule, *shape]
        if step.measured is None:
            return None
        return f"{1e3 * step.measured:.0f}  {1e3 * step.predicted:.0f}  {step.error:+.1%}"

    costs = table(
        "Overheads, measured with one and two ranks",
        {
            "overhead": lambda item: item[0].replace("_", " "),
            "milliseconds": lambda item: f"{1e3 * item[1]:.2f}",
        },
        asdict(overheads).items(),
    )
    columns = {
        f"{shape[0]} ranks, m={shape[1]}": lambda schedule, shape=shape: cell(schedule, shape)
        for shape in _shapes(bench)
    }
    schedules = dict.fromkeys(step.schedule for step in steps)
    times = table(
        "Milliseconds per step: measured, predicted, error", {"schedule": str, **columns}, schedules
    )
    record = {"overheads": asdict(overheads), "steps": [record_of(step) for step in steps]}
    return Measured(record, [costs, times])


@BENCH.part("memory")
def _memory(bench: Bench) -> Measured:
    peaks = _planned_memory.compare(_planned_memory.CASES[: 1 if bench.quick else None])
    columns = {
        "recipe": lambda p: p.case.recipe,
        "ranks": lambda p: p.case.ranks,
        "flags": lambda p: (
            " ".join(flag.rpartition(".")[2] for flag in p.case.flags)
            + " (loss in chunks)" * p.case.in_chunks
        ),
        "stage": lambda p: p.pp_rank,
        "measured MB": lambda p: f"{p.measured / 1e6:.2f}",
        "planned MB": lambda p: f"{p.predicted / 1e6:.2f}",
        "error": lambda p: f"{p.error:+.1%}",
        "peak during": lambda p: p.moment,
    }
    shown = table("Peak of a rank's live tensors", columns, peaks)
    shown.caption = f"largest error {max(abs(p.error) for p in peaks):.1%}"
    return Measured({"peaks": [record_of(peak) for peak in peaks]}, [shown])


@BENCH.part("rates")
def _rates(bench: Bench) -> Measured:
    rounds = bench.arguments.repeats or (1 if bench.quick else 3)
    found = _planned_rates.compare(_planned_rates.CASES[: 1 if bench.quick else None], rounds)
    columns = {
        "recipe": lambda s: s.case.recipe,
        "stages": lambda s: s.case.ranks,
        "flags": lambda s: " ".join(s.case.flags[1::2]),
        "what": lambda s: s.what,
        "measured ms": lambda s: f"{1e3 * s.measured:.1f}",
        "planned ms": lambda s: f"{1e3 * s.predicted:.1f}",
        "error": lambda s: f"{s.error:+.0%}",
    }
    shown = table("Processor time with a calibration of this machine", columns, found)
    return Measured({"seconds": [record_of(seconds) for seconds in found]}, [shown])


if __name__ == "__main__":
    BENCH.main()
