"""Full and read-only disks, checkpoints that are damaged or of another run, two runs in one folder.

Full and read-only disks are mounted, which needs root; the other faults need no privileges.
A run that is refused or fails must print one sentence with the cause and the fix. The fix is then applied,
and the run must reach a state that is bitwise equal to the baseline's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from _faults.baseline import (
    FLAGS,
    INTERVAL,
    STEPS,
    Baseline,
    error_line,
    line_or_status,
    make_folder,
    resume_run,
)
from _faults.checkpoints import damages, others_checkpoints, try_damaged
from _faults.disks import can_mount, mounted
from _faults.result import Attempt, Result, summarize
from _faults.runs import RECIPE, SMALL, Run, environment, start, train, train_undisturbed

__all__ = ["measure"]


def measure(scratch: Path, *, quick: bool) -> Iterator[Result]:
    """See `faults.py`."""
    folder = scratch / "baseline"
    baseline = Baseline(folder, train_undisturbed(folder, STEPS, *FLAGS))

    def summary(fault: str, attempts: list[Attempt]) -> Result:
        return summarize("storage", fault, attempts)

    if can_mount():
        sizes = [100] if quick else [75, 100]  # megabytes; a checkpoint has 60
        for mode in ("disabled", "async"):
            name = "disk full during a save" + " (async)" * (mode == "async")
            tries = [_full_at_save(scratch, baseline, mode, size) for size in sizes]
            yield summary(name, tries)
        yield summary("disk full for event files", [_full_record(scratch, baseline)])
        places = ["run", "run/checkpoint"]
        tries = [_read_only_at_start(scratch, place) for place in places]
        yield summary("folder read-only at the start", tries)
        yield summary("folder read-only during training", [_read_only_later(scratch, baseline)])
    else:
        print("full and read-only disks were not tested, because mounting needs root", file=sys.stderr)
    yield summary("disk full for the run's output", [_full_output(scratch, baseline)])
    for fault, done_to, said in damages(quick):
        tries = [
            try_damaged(scratch, baseline, f"{fault}-{number}", damage, said, repair=number == 0)
            for number, damage in enumerate(done_to)
        ]
        yield summary(f"checkpoint with {fault}", tries)
    yield from others_checkpoints(scratch, baseline, summary)
    tries = [_second_run(scratch, torchrun) for torchrun in ([False] if quick else [False, True])]
    yield summary("two runs in one folder", tries)


def _full_at_save(scratch: Path, baseline: Baseline, mode: str, megabytes: int) -> Attempt:
    folder = make_folder(scratch, f"full-{mode}-{megabytes}")
    flags = ("--checkpoint.async_mode", mode)
    with mounted(folder / "run/checkpoint", megabytes) as disk:
        process = start(folder, *FLAGS, *flags)
        latest, out = time.perf_counter(), ""
        for line in process.stdout:
            if re.match(rf"step +{2 * INTERVAL}/", line):
                latest = time.perf_counter()  # a save follows
            out += line
        run = Run(process.wait(), out, process.communicate()[1])
        notice = time.perf_counter() - latest
        said = error_line(run, r"cannot save run/checkpoint/step-8: No space left on device; free some")
        left = sorted(path.name for path in disk.folder.iterdir())
        disk.resize(1000)
        same, resume = resume_run(folder, baseline, *flags)
        good = said is not None and left == [f"step-{INTERVAL}"] and same
        lost = max(run.steps, default=0) - INTERVAL
        return Attempt(good, work_lost=lost, notice=notice, resume=resume, said=line_or_status(run, said))


def _full_record(scratch: Path, baseline: Baseline) -> Attempt:
    folder = make_folder(scratch, "full-record")
    with mounted(folder / "run", 16) as disk, mounted(folder / "run/checkpoint", 1000):
        process = start(folder, *FLAGS)
        for line in process.stdout:
            if line.startswith("step  2/"):
                disk.fill()
        _, err = process.communicate()
        warned = [line for line in err.splitlines() if "training continues" in line]
        good = process.returncode == 0 and baseline.is_reached_in(folder) and "Traceback" not in err
    return Attempt(
        good, work_lost=0, said=warned[0] if good and warned else f"{process.returncode}: {err[-300:]}"
    )


def _full_output(scratch: Path, baseline: Baseline) -> Attempt:
    folder = make_folder(scratch, "full-output")
    with open("/dev/full", "w") as full:
        process = start(folder, *FLAGS, out=full)
        _, err = process.communicate()
    good = process.returncode == 0 and baseline.is_reached_in(folder) and len(err.splitlines()) == 1
    return Attempt(good, work_lost=0, said=err.strip()[-300:])


def _read_only_at_start(scratch: Path, place: str) -> Attempt:
    folder = make_folder(scratch, f"read-only {place}")
    with mounted(folder / place, 1) as disk:
        disk.let_write(False)
        begin = time.perf_counter()
        run = train(folder, *FLAGS)
        notice = time.perf_counter() - begin
        said = error_line(run, f"cannot write to the folder {place}: Read-only file system; choose another")
        return Attempt(said is not None and not run.out, notice=notice, said=line_or_status(run, said))


def _read_only_later(scratch: Path, baseline: Baseline) -> Attempt:
    folder = make_folder(scratch, "read-only-later")
    with mounted(folder / "run/checkpoint", 1000) as disk:
        process = start(folder, *FLAGS)
        out, begin = "", 0.0
        for line in process.stdout:
            if line.startswith(f"step  {INTERVAL + 1}/"):
                disk.let_write(False)
            if line.startswith(f"step  {2 * INTERVAL}/"):
                begin = time.perf_counter()
            out += line
        run = Run(process.wait(), out, process.communicate()[1])
        notice = time.perf_counter() - begin
        said = error_line(run, "step-8: Read-only file system; make that folder writable")
        disk.let_write(True)
        same, resume = resume_run(folder, baseline)
        lost = max(run.steps, default=0) - INTERVAL
        return Attempt(
            said is not None and same,
            work_lost=lost,
            notice=notice,
            resume=resume,
            said=line_or_status(run, said),
        )


def _second_run(scratch: Path, torchrun: bool) -> Attempt:
    """A second run is refused; after the first is killed, the second starts immediately."""
    folder = make_folder(scratch, f"two-{torchrun}")
    flags = (*FLAGS, "--training.steps", 1000)
    first = start(folder, *flags)
    _until(first, "step ")
    begin = time.perf_counter()
    if torchrun:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                   "-m", "titan_async.cli", "train", str(RECIPE), *map(str, (*SMALL, *flags))]  # fmt: skip
        done = subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=300
        )
        [line] = [line for line in done.stderr.splitlines() if "another run" in line] or [done.stderr[-300:]]
        good = done.returncode != 0 and line.startswith("another run is writing to run (process ")
    else:
        run = train(folder, *flags)
        said = error_line(run, r"another run is writing to run \(process \d+ on ")
        good, line = said is not None, line_or_status(run, said)
    notice = time.perf_counter() - begin
    alive = first.poll() is None and _until(first, "step ")
    os.killpg(first.pid, signal.SIGKILL)  # the launcher; the kernel ends its ranks
    begin = time.perf_counter()
    again = start(folder, *flags)
    resumed = _until(again, "step ")
    resume = time.perf_counter() - begin
    first.communicate()
    again.send_signal(signal.SIGKILL)
    again.communicate()
    return Attempt(good and alive and resumed, notice=notice, resume=resume, said=line)


def _until(process: subprocess.Popen[str], beginning: str) -> bool:
    """Reads a run's output up to a line with this prefix; returns False if there is none."""
    return any(line.startswith(beginning) for line in process.stdout)
