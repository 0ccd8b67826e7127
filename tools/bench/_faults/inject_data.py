"""Harm to the data that a run reads, and to the processes that read them, while it trains."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

from titan_async.data import token_batches
from titan_async.training.trainer import AsyncTrainer


def install(
    rank: int,
    after: int | None = None,
    cut: str | None = None,
    unlink: str | None = None,
    kill_loader: bool = False,
    pairs_at_once: int | None = None,
) -> None:
    """Do harm between two steps, from rank 0.

    Args:
        rank: of this process.
        after: so many steps of this start; None for no harm.
        cut: a file of which half is to be left.
        unlink: a file that is to vanish.
        kill_loader: whether the process that loads this rank's data is to be killed.
        pairs_at_once: what token files are read ahead, on all ranks.
    """
    if pairs_at_once is not None:
        token_batches._PAIRS_AT_ONCE = pairs_at_once
    if rank or after is None:
        return
    train_step, done = AsyncTrainer.train_step, 0

    def harm(trainer: AsyncTrainer, *args: Any) -> None:
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

    AsyncTrainer.train_step = harm
