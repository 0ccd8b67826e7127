"""SIGTERM, Ctrl-C and SIGSTOP, to the launcher, to torchrun and to a rank, and hung ranks.

Each run is resumed afterwards, and must reach the state of a run without faults.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from _faults.result import Attempt, Result, summarize
from _faults.runs import is_same, saved_state, train_undisturbed
from _faults.watched import SHUTDOWN_TIMEOUT, Watched, under_the_launcher, under_torchrun
from titan_async.monitor.processes import is_alive
from titan_async.monitor.snapshot import RunMonitor
from titan_async.monitor.spans import find_run
from titan_async.pipelining.recording import Kind

__all__ = ["measure"]

STEPS, INTERVAL, AT = 20, 5, 8

PATIENCE = 15
"""Timeout in seconds of ranks that wait for an unresponsive one."""

PAUSE = 20.0
"""Seconds for which a rank is stopped."""

FLAGS = ("--training.steps", STEPS, "--checkpoint.interval", INTERVAL, "--lr_scheduler.warmup_steps", 3)

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
STARTERS = {"the launcher": under_the_launcher, "torchrun": under_torchrun}

State = dict[str, torch.Tensor]


def measure(scratch: Path, *, quick: bool) -> Iterator[Result]:
    """See `faults.py`."""
    expected = train_undisturbed(scratch / "undisturbed", STEPS, *FLAGS)
    for number, name in NAMES.items():
        for whom in list(STARTERS)[: 1 if quick else 2]:
            folder = scratch / f"{number}-{whom}"
            yield summarize("signals", f"{name} to {whom}", [_once(folder / "once", number, whom, expected)])
            twice = _twice(folder / "twice", number, whom, expected)
            yield summarize("signals", f"{name} twice to {whom}, with a hung rank", [twice])
    yield summarize("signals", f"SIGSTOP of a rank for {PAUSE:.0f} s", _paused(scratch / "paused", expected))
    ranks = (1,) if quick else (1, 0)
    stopped = [_silent(scratch / f"stopped-{rank}", rank, expected, hangs=False) for rank in ranks]
    yield summarize("signals", "permanent SIGSTOP of a rank", stopped)
    stuck = [_silent(scratch / f"stuck-{rank}", rank, expected, hangs=True) for rank in ranks]
    yield summarize("signals", "a rank stuck in a forward", stuck)


def _once(folder: Path, number: signal.Signals, whom: str, expected: State) -> Attempt:
    """One signal: all ranks save and end."""
    folder.mkdir(parents=True)
    run = STARTERS[whom](folder, *FLAGS)
    run.wait_for_step(AT)
    ranks, sent = run.ranks(), time.time()
    _send(run, number)
    status = run.wait(timeout=300)
    said = [line.text for line in run.out if line.text.startswith(f"{NAMES[number]}: saved step ")]
    wanted = 0 if number == signal.SIGTERM else 128 + number
    # The exit status of torchrun after a signal is not checked.
    right = len(said) == 1 and (status == wanted or whom == "torchrun")
    return _resumed(folder, run, ranks, sent, expected, right, said[0] if said else run.last_error_line)


def _twice(folder: Path, number: signal.Signals, whom: str, expected: State) -> Attempt:
    """Two signals during a step that hangs: after the second, all processes end immediately.

    torchrun forwards a second SIGTERM as well, and kills its processes after its shutdown timeout.
    """
    folder.mkdir(parents=True)
    run = STARTERS[whom](folder, *FLAGS, fault=_stuck(1))
    run.wait_for_step(AT - 1)
    time.sleep(2)
    ranks = run.ranks()
    _send(run, number)
    time.sleep(3)
    waits = len(run.ranks()) == len(ranks)
    sent = time.time()
    _send(run, number)
    status = run.wait(timeout=300)
    slow = whom == "torchrun" and number == signal.SIGTERM
    soon = time.time() - sent < PATIENCE + (SHUTDOWN_TIMEOUT if slow else 0)
    said = f"stopped by {number.name}" if whom != "torchrun" else f"got signal: {number.value}"
    right = waits and soon and status != 0 and any(said in line.text for line in run.err)
    return _resumed(folder, run, ranks, sent, expected, right, run.last_error_line)


def _silent(folder: Path, rank: int, expected: State, *, hangs: bool) -> Attempt:
    """An unresponsive rank: the others wait until their timeout, and report that rank."""
    folder.mkdir()
    run = under_the_launcher(
        folder, *FLAGS, "--comm.train_timeout_seconds", PATIENCE, fault=_stuck(rank) if hangs else None
    )
    run.wait_for_step(AT - 1)
    ranks, sent = run.ranks(), time.time()
    if not hangs:
        os.kill(ranks[rank], signal.SIGSTOP)
    status = run.wait(timeout=300)
    said = [line.text for line in run.err]
    does = "computes the forward" if hangs else "has sent no heartbeat"
    right = status == 1 and len(said) == 1 and said[0].startswith(f"rank {rank} (stage {rank}) {does}")
    return _resumed(folder, run, ranks, sent, expected, right, run.last_error_line)


def _paused(folder: Path, expected: State) -> list[Attempt]:
    """Pauses each rank in turn: the others wait, the view names the rank, and the run continues."""
    folder.mkdir()
    run = under_the_launcher(folder, *FLAGS)
    attempts = []
    for rank in (1, 0):
        run.wait_for_step(AT - 2 * rank)
        pid, stopped = run.ranks()[rank], time.time()
        view = RunMonitor(find_run(folder / "run"))
        os.kill(pid, signal.SIGSTOP)
        said = _until(lambda view=view, rank=rank: _named(view, rank), stopped + PAUSE)
        noticed = time.time()
        time.sleep(max(stopped + PAUSE - time.time(), 0.0))
        before, continued = run.steps()[-1][0], time.time()
        os.kill(pid, signal.SIGCONT)
        run.wait_for_step(before + 1)
        attempts.append((said, noticed - stopped, run.steps(continued)[0][1] - continued))
    right = run.wait(timeout=300) == 0 and not run.err and is_same(saved_state(folder, STEPS), expected)
    return [Attempt(right and said != "", 0, notice, resume, said) for said, notice, resume in attempts]


def _named(view: RunMonitor, rank: int) -> str:
    view.poll()
    texts = (stall.text for stall in view.snapshot().stalls)
    return next((text for text in texts if text.startswith(f"rank {rank} ")), "")


def _until(look: Callable[[], str], end: float) -> str:
    found = ""
    while not found and time.time() < end:
        time.sleep(0.1)
        found = look()
    return found


def _stuck(rank: int) -> dict[str, object]:
    span = int(Kind.FORWARD)
    return {"kind": "stop", "of_rank": rank, "span": span, "step": AT, "seconds": None, "hangs": True}


def _send(run: Watched, number: signal.Signals) -> None:
    # Ctrl-C is sent to the whole foreground process group.
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)
    else:
        run.process.send_signal(number)


def _resumed(
    folder: Path,
    run: Watched,
    ranks: dict[int, int],
    sent: float,
    expected: State,
    right: bool,
    said: str,
) -> Attempt:
    """Resumes a run under the launcher, and judges it."""
    ended = time.time()
    right = right and not any(map(is_alive, ranks.values()))
    started = time.time()
    again = under_the_launcher(folder, *FLAGS)
    right = again.wait(timeout=600) == 0 and not again.err and right
    first, at = again.steps()[0]
    lost = run.steps()[-1][0] - (first - 1)
    right = right and 0 <= lost <= INTERVAL and is_same(saved_state(folder, STEPS), expected)
    return Attempt(right, lost, ended - sent, at - started, re.sub(r"^.*\] ", "", said))
