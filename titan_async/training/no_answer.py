"""What to say where a rank has waited in vain for another: which one did not answer, and what it is at.

The error of the wait itself knows neither: a rank waits for its neighbour, which may well wait for the next.
But every rank leaves in the run's event files what it does, whatever becomes of it. Over gloo the wait raises
an error; over NCCL a watchdog aborts the process, and the launcher asks here.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_async.errors import UserError
from titan_async.monitor.formatting import name_stages
from titan_async.monitor.snapshot import RunMonitor
from titan_async.training.failures import Failure

__all__ = ["name_the_silent", "seconds_waited", "watchdog_failure"]

_WAITED = re.compile(r"Timed out waiting (\d+)ms")
_WATCHDOG_TIMEOUT = re.compile(r"Watchdog caught collective operation timeout: .*?Timeout\(ms\)=(\d+)")
_WATCHDOG_ERROR = re.compile(
    r"(?:watchdog thread terminated with exception: |(?=ProcessGroupNCCL's watchdog got stuck))(.{1,300})"
)
_LIMITS = ("train_timeout_seconds", "init_timeout_seconds")


def seconds_waited(error: BaseException) -> float | None:
    """How long a rank has waited in vain before this error; None if it is another error."""
    found = _WAITED.search(str(error))
    return None if found is None else int(found[1]) / 1000


def watchdog_failure(rank: int, stderr: str, explain: Callable[[int, float], str]) -> Failure | None:
    """Why NCCL's watchdog has aborted a rank; None if it was not that.

    Args:
        rank: that a SIGABRT has ended.
        stderr: the end of what it wrote there.
        explain: the sentence for a rank that has waited for so many seconds in vain.
    """
    if found := _WATCHDOG_TIMEOUT.search(stderr):
        return Failure(rank, "no_answer", explain(rank, int(found[1]) / 1000), time.time())
    if found := _WATCHDOG_ERROR.search(stderr):
        # Another rank is gone, as a rule.
        return Failure(rank, "lost_peer", f"ended by NCCL's watchdog: {found[1]}", time.time())
    return None


def name_the_silent(
    seconds: float, rank: int, folder: Path | None, comm: Any, *, by_watchdog: bool = False
) -> str:
    """The sentence for a wait that was in vain.

    Args:
        seconds: that it has lasted.
        rank: that has waited. It has closed its event files.
        folder: the run's folder of events; None if it leaves none.
        comm: the configuration's `comm` section.
        by_watchdog: whether NCCL's watchdog has ended the rank for it; its event files are not closed.
    """
    run = _read_run(folder)
    culprits = [] if run is None else run.stragglers(seconds / 2)
    culprits = [who for who in culprits if not who.startswith(f"rank {rank} (")]
    limit = next((f"comm.{name}" for name in _LIMITS if getattr(comm, name) == seconds), None)
    waited = f"{seconds:.0f} s" + (f" ({limit})" if limit else "")
    slow = f", or raise {limit} if ranks are only slow" if limit else ""
    if by_watchdog:
        stage = "" if run is None else f" ({name_stages(run.info.ranks[rank])})"
        what = f"rank {rank}{stage} was ended by NCCL's watchdog after {waited} without an answer"
    else:
        what = f"rank {rank} has waited for {waited} in vain"
    who = f"{'; '.join(culprits)}, and" if culprits else "a rank does not answer:"
    return f"{who} {what}: start the same command again{slow}"


def _read_run(folder: Path | None) -> RunMonitor | None:
    try:
        run = None if folder is None else RunMonitor(folder)
    except UserError:  # the files have gone
        return None
    if run is not None:
        run.poll()
    return run
