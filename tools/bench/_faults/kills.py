"""SIGKILL of either rank at random times of each phase: whether the run resumes, and the steps it loses.

The ranks of one long run under torchrun kill themselves at planned times; the run must reach the state of a
run without faults. Times are drawn uniformly from the median duration of the phase.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from _faults.inject_kill import Kill, when_killed
from _faults.result import Attempt, Result, summarize
from _faults.runs import is_same, saved_state, start, train, train_undisturbed
from _faults.watched import Watched, under_torchrun
from titan_async.monitor.journal import JournalReader
from titan_async.monitor.processes import is_alive
from titan_async.monitor.spans import RunSpans, find_run, load_spans
from titan_async.pipelining.recording import Kind

__all__ = ["measure", "plan_kills"]

INTERVAL = 5
"""Steps between saves; each save drains the pipeline, and a validation follows."""

ROUNDS, QUICK_ROUNDS = 6, 1

PATIENCE = 900.0
"""Seconds until its next kill after which a run counts as hung."""

FLAGS = (
    "--checkpoint.interval", INTERVAL, "--checkpoint.keep_latest_k", 2, "--lr_scheduler.warmup_steps", 3,
    "--validator.enable", "--validator.freq", INTERVAL, "--validator.steps", 2,
)  # fmt: skip

_MESSAGES = (Kind.FORWARD, Kind.BACKWARD, Kind.RECEIVE, Kind.SEND)


def measure(scratch: Path, *, quick: bool) -> Iterator[Result]:
    """See `faults.py`."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    flags = (*FLAGS, "--training.steps", steps := 2 * INTERVAL * rounds + 2)
    undisturbed = scratch / "undisturbed"
    expected = train_undisturbed(undisturbed, steps, *flags)
    plan = plan_kills(rounds, load_spans(find_run(undisturbed / "run")), random.Random(0))
    attempts = _under_torchrun(scratch / "torchrun", plan, flags, expected)
    for phase in dict.fromkeys(kill.phase for kill in plan):
        of_phase = [done for kill, done in zip(plan, attempts, strict=True) if kill.phase == phase]
        yield summarize("kills", f"SIGKILL {phase}, torchrun", of_phase)
    own = [
        _under_the_launcher(scratch / f"launcher-{rank}", rank, flags, expected) for rank in (1, 0)[:rounds]
    ]
    yield summarize("kills", "SIGKILL, the project's launcher", own)


def plan_kills(rounds: int, run: RunSpans, draw: random.Random) -> list[Kill]:
    """One kill in each phase of each round, ordered by step; rounds alternate between ranks.

    Args:
        rounds: number of rounds, each of twice `INTERVAL` steps.
        run: a run without faults, for the durations of its spans.
        draw: random number generator.
    """
    plan = []
    for number in range(rounds):
        rank, first = number % 2, 2 * INTERVAL * number

        def moment(kind: Kind, rank: int = rank) -> float:
            records = run.ranks[rank].of_kind(kind)
            return draw.random() * float(np.median(records["end"] - records["start"])) / 1e9

        def kill(phase: str, step: int, *kinds: Kind, nth: int = 0, draining: bool = False,
                 rank: int = rank, first: int = first) -> Kill:  # fmt: skip
            delay = moment(kinds[0]) if kinds else 0.0
            return Kill(phase, rank, first + step, tuple(map(int, kinds)), nth, delay, draining)

        fills = (Kind.FORWARD,) if rank == 0 else (Kind.RECEIVE, Kind.FORWARD)
        plan += [
            kill("in steady state", draw.choice((2, 3)), *_MESSAGES, nth=draw.randrange(12)),
            kill("in clip_grad_norm_", draw.choice((3, 4)), Kind.CLIP),
            kill("in an update", 4, Kind.OPTIMIZER),
            kill("in a drain", INTERVAL, nth=draw.randrange(8), draining=True),
            kill("in a save", INTERVAL, Kind.SAVE),
            kill("while the pipeline fills", INTERVAL + 1, *fills, nth=draw.randrange(2)),
            # Not at the step of that save: a run that resumes from it does not repeat its validation.
            kill("in a validation", 2 * INTERVAL, Kind.VALIDATE),
        ]
    return plan


def _under_torchrun(
    folder: Path, plan: Sequence[Kill], flags: tuple[object, ...], expected: dict[str, torch.Tensor]
) -> list[Attempt]:
    notes = folder / "kills"
    notes.mkdir(parents=True)
    fault = {"kind": "kill", "plan": list(map(asdict, plan)), "folder": str(notes)}
    run = under_torchrun(folder, *flags, restarts=len(plan), fault=fault)
    gone = _when_gone(run, notes, len(plan))
    status = run.wait()
    same = status == 0 and is_same(saved_state(folder, int(flags[-1])), expected)
    killed = [when_killed(notes, number) for number in range(len(plan))]
    attempts = []
    for number, at in enumerate(killed):
        if at is None or gone[number] is None:
            attempts.append(Attempt(False, said=run.last_error_line))
            continue
        following = killed[number + 1] if number + 1 < len(plan) else None
        before = run.steps((gone[number - 1] or 0.0) if number else 0.0, gone[number])
        after = run.steps(gone[number], following or time.time())
        resumed = _resumed_at(run, gone[number])
        # A start that was killed in its first step has lost nothing.
        lost = before[-1][0] - resumed if before else 0
        attempts.append(
            Attempt(
                survived=same and 0 <= lost <= INTERVAL,
                work_lost=lost,
                notice=gone[number] - at,
                resume=after[0][1] - gone[number] if after else None,
                said=_said(run, at),
            )
        )
    return attempts


def _when_gone(run: Watched, notes: Path, kills: int) -> list[float | None]:
    """For each kill, when all processes of that start had ended, in seconds since the epoch."""
    gone: list[float | None] = [None] * kills
    workers: list[int] = []
    number, since = 0, time.time()
    while run.process.poll() is None and number < kills:
        if time.time() - since > PATIENCE:
            run.process.terminate()  # hung
        if when_killed(notes, number) is None:
            workers = list(run.ranks().values()) or workers
        elif not any(map(is_alive, workers)):
            gone[number] = time.time()
            workers, number, since = [], number + 1, time.time()
        time.sleep(0.01)
    return gone


def _resumed_at(run: Watched, after: float) -> int:
    """The step from which the next start resumed."""
    first = next(
        (line.text for line in run.out if line.time >= after and line.text.startswith("training ")), ""
    )
    found = re.search(r", resumed at step (\d+)$", first)
    return int(found[1]) if found else 0


def _said(run: Watched, after: float) -> str:
    lines = (line.text for line in run.err if line.time >= after)
    found = (re.search(r"failed \(exitcode: -9\) local_rank: \d+", text) for text in lines)
    return next((f"torchrun: {match[0]}" for match in found if match), "")


def _under_the_launcher(
    folder: Path, rank: int, flags: tuple[object, ...], expected: dict[str, torch.Tensor]
) -> Attempt:
    """A run that ends when a rank is killed, and resumes on the next start."""
    notes = folder / "kills"
    notes.mkdir(parents=True)
    kill = Kill("", rank, INTERVAL + 3, tuple(map(int, _MESSAGES)), nth=5)
    process = start(folder, *flags, fault={"kind": "kill", "plan": [asdict(kill)], "folder": str(notes)})
    out, err = process.communicate(timeout=600)
    at, ended = when_killed(notes, 0), time.time()
    started = time.time()
    resumed = train(folder, *flags, timeout=600)
    entries = JournalReader(find_run(folder / "run")).new_entries()
    first_step = next(entry["time"] for entry in entries if entry["kind"] == "step")
    sentence = f"rank {rank} was killed by SIGKILL; the other ranks were stopped\n"
    right = (process.returncode, err) == (1, sentence) and (resumed.status, resumed.err) == (0, "")
    reported = [int(step) for step in re.findall(r"^step +(\d+)/", out, re.MULTILINE)]
    lost = reported[-1] - (resumed.steps[0] - 1)
    right = right and 0 <= lost <= INTERVAL
    return Attempt(
        survived=right and is_same(saved_state(folder, int(flags[-1])), expected),
        work_lost=lost,
        notice=None if at is None else ended - at,
        resume=first_step - started,
        said=err.strip().splitlines()[-1],
    )
