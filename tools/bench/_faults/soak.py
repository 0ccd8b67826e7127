"""A long run: memory, file descriptors, threads, logs and event files of every rank must not grow.

It trains the MoE recipe with validation, checkpoints, an average of the weights and TensorBoard, in many
small steps, and ends by SIGTERM.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from _faults.result import Attempt, Result, summarize
from _faults.runs import MOE_RECIPE, start
from tests.support.training import processes_of

MEGABYTES_AN_HOUR = 20.0
"""Maximum growth of a rank's private memory, and of its allocated part."""

LOG_MEGABYTES_AN_HOUR = 20.0
"""Maximum growth of all files in the run's folder except checkpoints."""

_PERIOD = 5.0
_WARM_UP = 0.2
"""Fraction of the time that is not counted: allocators and caches fill."""

FLAGS = ("--training.steps", 1_000_000, "--metrics.log_freq", 10, "--checkpoint.interval", 200,
         "--validator.enable", "--validator.freq", 200, "--validator.steps", 2, "--ema.decay", 0.99,
         "--metrics.enable_tensorboard", "--comm.trace_buf_size", 1000)  # fmt: skip
"""The flight recorder is small enough to be full before the end of the warm-up: it keeps a traceback of each
collective, and with torchtitan's default of 20,000 it would grow by some 20 MB in half an hour."""


@dataclass(frozen=True)
class Sample:
    """Resources of a process at one time."""

    seconds: float
    memory: float
    """Megabytes of private memory in RAM."""
    files: int
    threads: int


def measure(scratch: Path, *, minutes: float) -> Iterator[Result]:
    """Trains for `minutes` minutes."""
    with open(scratch / "out", "w") as out:
        fault = {"kind": "memory", "folder": str(scratch)}
        run = start(scratch, *FLAGS, recipe=MOE_RECIPE, fault=fault, out=out)
    samples: dict[str, list[Sample]] = {}
    sizes: list[tuple[float, float]] = []
    begin = time.monotonic()
    while time.monotonic() < begin + 60 * minutes and run.poll() is None:
        time.sleep(_PERIOD)
        now = time.monotonic() - begin
        for name, pid in _processes(run.pid):
            sample = _sample(now, pid)
            if sample:
                samples.setdefault(name, []).append(sample)
        sizes.append((now, _written(scratch / "run") / 1e6))
    run.send_signal(signal.SIGTERM)
    status = run.wait(timeout=120)
    steps = sum(1 for line in (scratch / "out").read_text().splitlines() if line.startswith("step ")) * 10
    for name, series in sorted(samples.items()):
        yield _judge(name, series, _in_use(scratch / name, begin), minutes)
    slope = _slope(sizes)
    said = f"{slope:.2f} MB per hour, {sizes[-1][1]:.1f} MB at the end"
    yield summarize("soak", "files except checkpoints", [Attempt(slope < LOG_MEGABYTES_AN_HOUR, said=said)])
    said = f"{minutes:g} minutes, about {steps} steps, ended with status {status}"
    yield summarize("soak", "end at SIGTERM", [Attempt(status == 0, said=said)])


def _judge(name: str, series: list[Sample], in_use: list[tuple[float, float]], minutes: float) -> Result:
    begin = _WARM_UP * 60 * minutes
    counted = [sample for sample in series if sample.seconds > begin]
    slope = _slope([(sample.seconds, sample.memory) for sample in counted])
    files, threads = ({getattr(sample, kind) for sample in counted} for kind in ("files", "threads"))
    said = (
        f"{counted[0].memory:.0f} to {counted[-1].memory:.0f} MB ({slope:+.1f} MB per hour), "
        f"{_range(files)} files, {_range(threads)} threads"
    )
    slopes = [slope]
    if in_use:
        slopes.append(_slope([point for point in in_use if point[0] > begin]))
        said += f"; in use {slopes[-1]:+.1f} MB per hour"
    # The minimum, because writing a checkpoint opens another file, and leaked files are never closed.
    grown = any(
        min(getattr(sample, kind) for sample in counted[-(len(counted) // 10) :])
        > min(getattr(sample, kind) for sample in counted[: len(counted) // 2])
        for kind in ("files", "threads")
    )
    return summarize("soak", name, [Attempt(max(slopes) < MEGABYTES_AN_HOUR and not grown, said=said)])


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _slope(points: list[tuple[float, float]]) -> float:
    """Slope of a line through the points, per hour."""
    seconds, values = np.array(points).T
    return float(np.polyfit(seconds / 3600, values, 1)[0])


def _processes(launcher: int) -> list[tuple[str, int]]:
    """The launcher and its ranks, by name."""
    return [("launcher", launcher), *((f"rank {rank}", pid) for rank, pid in processes_of(launcher).items())]


def _in_use(file: Path, begin: float) -> list[tuple[float, float]]:
    """The values that `inject_memory` wrote, by seconds since `begin`; none for the launcher."""
    if not file.exists():
        return []
    lines = (line.split() for line in file.read_text().splitlines())
    return [(float(seconds) - begin, float(megabytes)) for seconds, megabytes in lines]


def _sample(seconds: float, pid: int) -> Sample | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "RssAnon" not in fields:  # a zombie
        return None
    return Sample(seconds, int(fields["RssAnon"].split()[0]) / 1e3, files, int(fields["Threads"]))


def _written(folder: Path) -> int:
    """Bytes of the files of a run, except checkpoints."""
    total = 0
    for path, folders, names in os.walk(folder):
        if "checkpoint" in folders:
            folders.remove("checkpoint")
        for name in names:
            total += (Path(path) / name).stat().st_size
    return total
