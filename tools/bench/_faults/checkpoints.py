"""Damaged checkpoints, and those of another run."""

from __future__ import annotations

import os
import pickle  # nosec B403  # only written: a pickle that must not be loaded
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from _faults.result import Attempt, Result
from _faults.runs import MOE_RECIPE, train

__all__ = ["damages", "others_checkpoints", "try_damaged"]

Damage = Callable[[Path], None]


def damages(quick: bool) -> Iterator[tuple[str, list[Damage], str]]:
    """Names of faults, functions that damage a checkpoint, and a pattern of the expected error line."""
    draw = random.Random(0)

    def some_file(checkpoint: Path) -> Path:
        return draw.choice(sorted(checkpoint.glob("*.distcp")))

    def cut(checkpoint: Path) -> None:
        file = some_file(checkpoint)
        os.truncate(file, draw.randrange(file.stat().st_size))

    def flip(checkpoint: Path, name: str | None = None) -> None:
        file = checkpoint / name if name else some_file(checkpoint)
        with open(file, "rb+") as content:
            place = draw.randrange(file.stat().st_size)
            content.seek(place)
            [byte] = content.read(1)
            content.seek(place)
            content.write(bytes([byte ^ (1 << draw.randrange(8))]))

    def remove(checkpoint: Path) -> None:
        some_file(checkpoint).unlink()

    def garble(checkpoint: Path) -> None:
        (checkpoint / ".metadata").write_bytes(draw.randbytes(1000))

    def booby_trap(checkpoint: Path) -> None:
        (checkpoint / ".metadata").write_bytes(pickle.dumps(_Trap(str(checkpoint / "ran"))))

    few = slice(1 if quick else None)
    damaged = r"the checkpoint run/checkpoint/step-8 is damaged: {}; remove that folder to resume from step 4"
    named = damaged.format(r"__\d_0\.distcp is not what was saved")
    yield "a truncated file", [cut, cut][few], named
    yield "a flipped bit", [flip, flip, flip][few], named
    yield "a missing file", [remove, remove][few], damaged.format(r"__\d_0\.distcp is missing")
    index = damaged.format(r"\.metadata is not the index of a checkpoint and was not loaded: .*")
    yield "a damaged index", [lambda at: flip(at, ".metadata"), garble, booby_trap][few], index


class _Trap:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def try_damaged(
    scratch: Path, baseline: Baseline, name: str, damage: Damage, pattern: str, *, repair: bool
) -> Attempt:
    folder = make_folder(scratch, name)
    checkpoint = baseline.copy_to(folder)
    damage(checkpoint)
    begin = time.perf_counter()
    run = train(folder, *FLAGS)
    notice = time.perf_counter() - begin
    said, resume = error_line(run, pattern), None
    good = said is not None and not (checkpoint / "ran").exists()
    if run.status == 0 and baseline.is_reached_in(folder):  # the flipped bit is never read
        good, said, notice = True, "", None
    elif repair:
        shutil.rmtree(checkpoint)
        same, resume = resume_run(folder, baseline)
        good &= same
    shutil.rmtree(folder)
    return Attempt(
        good, INTERVAL if repair else None, notice, resume, line_or_status(run, said) if notice else ""
    )


def others_checkpoints(
    scratch: Path, baseline: Baseline, summary: Callable[[str, list[Attempt]], Result]
) -> Iterator[Result]:
    other = r"the checkpoint in run/checkpoint does not match the model or optimizer of this recipe; choose"
    refused = {
        "of another width": ((), {"fault": {"kind": "width", "width": 96}}, other),
        "of another kind of model": ((), {"recipe": MOE_RECIPE}, other),
        "of another optimizer": (("--optimizer.name", "adamw"), {}, other),
        "of fewer data-parallel ranks": (
            ("--parallelism.data_parallel_shard_degree", 2),
            {},
            "data position is one of data-parallel degree 1, not 2: resume with",
        ),
    }
    for fault, (flags, options, pattern) in refused.items():
        folder = make_folder(scratch, fault)
        checkpoint = baseline.copy_to(folder)
        before = sorted(path.stat().st_mtime_ns for path in checkpoint.iterdir())
        begin = time.perf_counter()
        run = train(folder, *FLAGS, *flags, **options)
        said = error_line(run, pattern)
        untouched = sorted(path.stat().st_mtime_ns for path in checkpoint.iterdir()) == before
        seconds = time.perf_counter() - begin
        yield summary(
            f"checkpoint {fault}",
            [Attempt(said is not None and untouched, notice=seconds, said=line_or_status(run, said))],
        )
    tries = []
    for stages in (4, 1):
        folder = make_folder(scratch, f"{stages}-stages")
        baseline.copy_to(folder)
        run = train(folder, *FLAGS, "--parallelism.pipeline_parallel_degree", stages)
        good = run.status == 0 and run.steps == list(range(2 * INTERVAL + 1, STEPS + 1))
        tries.append(Attempt(good, work_lost=0, said=run.out.splitlines()[0] if good else run.err[-300:]))
    yield summary("checkpoint of another number of stages", tries)
