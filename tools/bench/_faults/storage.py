"""Disks that are full or read-only, checkpoints that are damaged or another run's, two runs in one folder.

Disks are made full and read-only for real, which needs the right to mount (root); the others need no rights.
A run that is refused or ends must say why in one sentence; what that sentence advises is then done, and the
run must reach the very state of an undisturbed one.
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

from _faults.checkpoints import damages, others_checkpoints, try_damaged
from _faults.disks import can_mount, mounted
from _faults.result import Attempt, Result, summarize
from _faults.runs import RECIPE, SMALL, Run, environment, start, train, train_undisturbed
from _faults.undisturbed import FLAGS, INTERVAL, STEPS, Undisturbed, go_on, made, sentence_of, words_of

__all__ = ["measure"]


def measure(scratch: Path, *, quick: bool) -> Iterator[Result]:
    """See `faults.py`."""
    folder = scratch / "undisturbed"
    undisturbed = Undisturbed(folder, train_undisturbed(folder, STEPS, *FLAGS))

    def summary(fault: str, attempts: list[Attempt]) -> Result:
        return summarize("storage", fault, attempts)

    if can_mount():
        sizes = [100] if quick else [75, 100]  # megabytes, of which a checkpoint takes 60
        for mode in ("disabled", "async"):
            name = "disk full in a save" + ", saving meanwhile" * (mode == "async")
            tries = [_full_at_save(scratch, undisturbed, mode, size) for size in sizes]
            yield summary(name, tries)
        yield summary("disk full, files of the record", [_full_record(scratch, undisturbed)])
        places = ["run", "run/checkpoint"]
        tries = [_read_only_at_start(scratch, place) for place in places]
        yield summary("folder read-only at the start", tries)
        yield summary("folder read-only from a step on", [_read_only_later(scratch, undisturbed)])
    else:
        print("no disk can be mounted, so none was full or read-only", file=sys.stderr)
    yield summary("no room for what the run prints", [_full_output(scratch, undisturbed)])
    for fault, done_to, said in damages(quick):
        tries = [
            try_damaged(scratch, undisturbed, f"{fault}-{number}", damage, said, mend=number == 0)
            for number, damage in enumerate(done_to)
        ]
        yield summary(f"checkpoint with {fault}", tries)
    yield from others_checkpoints(scratch, undisturbed, summary)
    tries = [_second_run(scratch, torchrun) for torchrun in ([False] if quick else [False, True])]
    yield summary("two runs in one folder", tries)


def _full_at_save(scratch: Path, undisturbed: Undisturbed, mode: str, megabytes: int) -> Attempt:
    folder = made(scratch, f"full-{mode}-{megabytes}")
    flags = ("--checkpoint.async_mode", mode)
    with mounted(folder / "run/checkpoint", megabytes) as disk:
        process = start(folder, *FLAGS, *flags)
        latest, out = time.perf_counter(), ""
        for line in process.stdout:
            if re.match(rf"step +{2 * INTERVAL}/", line):
                latest = time.perf_counter()  # what it does next is save
            out += line
        run = Run(process.wait(), out, process.communicate()[1])
        notice = time.perf_counter() - latest
        said = sentence_of(run, r"cannot save run/checkpoint/step-8: No space left on device; make room")
        left = sorted(path.name for path in disk.folder.iterdir())
        disk.resize(1000)
        same, resume = go_on(folder, undisturbed, *flags)
        good = said is not None and left == [f"step-{INTERVAL}"] and same
        lost = max(run.steps, default=0) - INTERVAL
        return Attempt(good, work_lost=lost, notice=notice, resume=resume, said=words_of(run, said))


def _full_record(scratch: Path, undisturbed: Undisturbed) -> Attempt:
    folder = made(scratch, "full-record")
    with mounted(folder / "run", 16) as disk, mounted(folder / "run/checkpoint", 1000):
        process = start(folder, *FLAGS)
        for line in process.stdout:
            if line.startswith("step  2/"):
                disk.fill()
        _, err = process.communicate()
        warned = [line for line in err.splitlines() if "training goes on" in line]
        good = process.returncode == 0 and undisturbed.is_reached_in(folder) and "Traceback" not in err
    return Attempt(
        good, work_lost=0, said=warned[0] if good and warned else f"{process.returncode}: {err[-300:]}"
    )


def _full_output(scratch: Path, undisturbed: Undisturbed) -> Attempt:
    folder = made(scratch, "full-output")
    with open("/dev/full", "w") as full:
        process = start(folder, *FLAGS, out=full)
        _, err = process.communicate()
    good = process.returncode == 0 and undisturbed.is_reached_in(folder) and len(err.splitlines()) == 1
    return Attempt(good, work_lost=0, said=err.strip()[-300:])


def _read_only_at_start(scratch: Path, place: str) -> Attempt:
    folder = made(scratch, f"read-only {place}")
    with mounted(folder / place, 1) as disk:
        disk.let_write(False)
        begin = time.perf_counter()
        run = train(folder, *FLAGS)
        notice = time.perf_counter() - begin
        said = sentence_of(run, f"cannot write to the folder {place}: Read-only file system; choose another")
        return Attempt(said is not None and not run.out, notice=notice, said=words_of(run, said))


def _read_only_later(scratch: Path, undisturbed: Undisturbed) -> Attempt:
    folder = made(scratch, "read-only-later")
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
        said = sentence_of(run, "step-8: Read-only file system; make that folder writable")
        disk.let_write(True)
        same, resume = go_on(folder, undisturbed)
        lost = max(run.steps, default=0) - INTERVAL
        return Attempt(
            said is not None and same, work_lost=lost, notice=notice, resume=resume, said=words_of(run, said)
        )


def _second_run(scratch: Path, torchrun: bool) -> Attempt:
    """Another run is refused; the first is then killed, and the other starts at once."""
    folder = made(scratch, f"two-{torchrun}")
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
        said = sentence_of(run, r"another run is writing to run \(process \d+ on ")
        good, line = said is not None, words_of(run, said)
    notice = time.perf_counter() - begin
    alive = first.poll() is None and _until(first, "step ")
    os.killpg(first.pid, signal.SIGKILL)  # the launcher, with which the kernel ends the ranks
    begin = time.perf_counter()
    again = start(folder, *flags)
    resumed = _until(again, "step ")
    resume = time.perf_counter() - begin
    first.communicate()
    again.send_signal(signal.SIGKILL)
    again.communicate()
    return Attempt(good and alive and resumed, notice=notice, resume=resume, said=line)


def _until(process: subprocess.Popen[str], beginning: str) -> bool:
    """Read what a run says until a line begins so; False if none does."""
    return any(line.startswith(beginning) for line in process.stdout)
