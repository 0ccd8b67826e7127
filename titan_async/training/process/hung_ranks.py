"""Describes which rank a timed-out wait was for, and what that rank does.

The error of the wait does not name it: a rank waits for its neighbor, which may itself wait for the next. But
every rank records what it does in the run's event files. Over gloo the wait raises an error; over NCCL a
watchdog aborts the process, and the launcher calls this module.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_async.errors import UserError
from titan_async.monitor.formatting import name_stages
from titan_async.monitor.snapshot import RunMonitor
from titan_async.training.process.failures import Failure
from titan_async.training.process.library_errors import watchdog_error, watchdog_timeout

__all__ = ["describe_hung_ranks", "watchdog_failure"]

_LIMITS = ("train_timeout_seconds", "init_timeout_seconds")


def watchdog_failure(rank: int, stderr: str, explain: Callable[[int, float], str]) -> Failure | None:
    """The failure of a rank that NCCL's watchdog has aborted; None if the watchdog did not.

    Args:
        rank: ended by SIGABRT.
        stderr: the end of its stderr.
        explain: returns the message for a rank whose wait has timed out after some seconds.
    """
    if (seconds := watchdog_timeout(stderr)) is not None:
        return Failure(rank, "no_answer", explain(rank, seconds), time.time())
    if (message := watchdog_error(stderr)) is not None:  # usually another rank has died
        return Failure(rank, "lost_peer", f"ended by NCCL's watchdog: {message}", time.time())
    return None


def describe_hung_ranks(
    seconds: float, rank: int, folder: Path | None, comm: Any, *, by_watchdog: bool = False
) -> str:
    """The message for a wait that has timed out.

    Args:
        seconds: the timeout.
        rank: that has waited. It has closed its event files.
        folder: the run's folder of events; None if events are not recorded.
        comm: the configuration's `comm` section.
        by_watchdog: whether NCCL's watchdog has aborted the rank; its event files are not closed.
    """
    run = _read_run(folder)
    stragglers = [] if run is None else run.stragglers(seconds / 2)
    stragglers = [who for who in stragglers if not who.startswith(f"rank {rank} (")]
    limit = next((f"comm.{name}" for name in _LIMITS if getattr(comm, name) == seconds), None)
    waited = f"{seconds:.0f} s" + (f" ({limit})" if limit else "")
    slow = f", or raise {limit} if ranks are only slow" if limit else ""
    if by_watchdog:
        stage = "" if run is None else f" ({name_stages(run.info.ranks[rank])})"
        what = f"rank {rank}{stage} was ended by NCCL's watchdog after {waited} without an answer"
    else:
        what = f"rank {rank} timed out after waiting for {waited}"
    who = f"{'; '.join(stragglers)}, and" if stragglers else "a rank does not answer:"
    return f"{who} {what}: start the same command again{slow}"


def _read_run(folder: Path | None) -> RunMonitor | None:
    try:
        run = None if folder is None else RunMonitor(folder)
    except UserError:  # the files were removed
        return None
    if run is not None:
        run.poll()
    return run
