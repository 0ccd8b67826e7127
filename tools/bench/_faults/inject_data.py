"""Faults in the data that a run reads, and in the processes that read them, while it trains."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

from titan_async.training.trainer import AsyncTrainer


def install(
    rank: int,
    after: int | None = None,
    cut: str | None = None,
    unlink: str | None = None,
    kill_loader: bool = False,
    break_at: int | None = None,
) -> None:
    """Injects a fault on rank 0 between two steps, or into the streams of all ranks.

    Args:
        rank: of this process.
        after: number of steps of this start before the fault; None for no fault.
        cut: a file to truncate to half of its size.
        unlink: a file to delete.
        kill_loader: whether to kill the process that loads this rank's data.
        break_at: the number, from 1, of the document at which each iterator of `datasets` fails.
    """
    if break_at is not None:
        _break_streams(break_at)
    if rank or after is None:
        return
    train_step, done = AsyncTrainer.train_step, 0

    def train_step_with_fault(trainer: AsyncTrainer, *args: Any) -> None:
        nonlocal done
        if done == after:
            if cut is not None:
                os.truncate(cut, os.path.getsize(cut) // 2)
            if unlink is not None:
                os.unlink(unlink)
            if kill_loader:
                for process in multiprocessing.active_children():
                    os.kill(process.pid, signal.SIGKILL)
        train_step(trainer, *args)
        done += 1

    AsyncTrainer.train_step = train_step_with_fault


def _break_streams(number: int) -> None:
    from datasets import IterableDataset

    read = IterableDataset.__iter__

    def broken(self: IterableDataset) -> Iterator[Any]:
        yield from itertools.islice(read(self), number - 1)
        raise ConnectionError("the peer has reset the connection")

    IterableDataset.__iter__ = broken
