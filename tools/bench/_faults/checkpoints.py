"""Checkpoints that are damaged, or another run's."""

from __future__ import annotations

import os
import pickle  # nosec B403  # only written, as a trap that must not go off
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _faults.result import Attempt, Result
from _faults.runs import MOE_RECIPE, train
from _faults.undisturbed import FLAGS, INTERVAL, STEPS, Undisturbed, go_on, made, sentence_of, words_of

__all__ = ["damages", "others_checkpoints", "try_damaged"]

Damage = Callable[[Path], None]


def damages(quick: bool) -> Iterator[tuple[str, list[Damage], str]]:
    """Each with how often it is tried and what is to be said."""
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
    damaged = r"the checkpoint run/checkpoint/step-8 is damaged: {}; remove that folder to go on from step 4"
    named = damaged.format(r"__\d_0\.distcp is not what was saved")
    yield "a truncated file", [cut, cut][few], named
    yield "a flipped bit", [flip, flip, flip][few], named
    yield "a missing file", [remove, remove][few], damaged.format(r"__\d_0\.distcp is missing")
    index = damaged.format(r"\.metadata is not the index of a checkpoint and was not loaded: .*")
    yield "a damaged index", [lambda at: flip(at, ".metadata"), garble, booby_trap][few], index


class _Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def try_damaged(
    scratch: Path, undisturbed: Undisturbed, name: str, damage: Damage, pattern: str, *, mend: bool
) -> Attempt:
    folder = made(scratch, name)
    checkpoint = undisturbed.copy_to(folder)
    damage(checkpoint)
    begin = time.perf_counter()
    run = train(folder, *FLAGS)
    notice = time.perf_counter() - begin
    said, resume = sentence_of(run, pattern), None
    good = said is not None and not (checkpoint / "ran").exists()
    if run.status == 0 and undisturbed.is_reached_in(folder):  # the bit was one that nobody reads
        good, said, notice = True, "", None
    elif mend:
        shutil.rmtree(checkpoint)
        same, resume = go_on(folder, undisturbed)
        good &= same
    shutil.rmtree(folder)
    return Attempt(good, INTERVAL if mend else None, notice, resume, words_of(run, said) if notice else "")


def others_checkpoints(
    scratch: Path, undisturbed: Undisturbed, summary: Callable[[str, list[Attempt]], Result]
) -> Iterator[Result]:
    other = (
        r"the checkpoint in run/checkpoint is of another model or optimizer than this recipe; choose another"
    )
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
        folder = made(scratch, fault)
        checkpoint = undisturbed.copy_to(folder)
        before = sorted(path.stat().st_mtime_ns for path in checkpoint.iterdir())
        begin = time.perf_counter()
        run = train(folder, *FLAGS, *flags, **options)
        said = sentence_of(run, pattern)
        untouched = sorted(path.stat().st_mtime_ns for path in checkpoint.iterdir()) == before
        seconds = time.perf_counter() - begin
        yield summary(
            f"checkpoint {fault}",
            [Attempt(said is not None and untouched, notice=seconds, said=words_of(run, said))],
        )
    tries = []
    for stages in (4, 1):
        folder = made(scratch, f"{stages}-stages")
        undisturbed.copy_to(folder)
        run = train(folder, *FLAGS, "--parallelism.pipeline_parallel_degree", stages)
        good = run.status == 0 and run.steps == list(range(2 * INTERVAL + 1, STEPS + 1))
        tries.append(Attempt(good, work_lost=0, said=run.out.splitlines()[0] if good else run.err[-300:]))
    yield summary("checkpoint of other stages", tries)
