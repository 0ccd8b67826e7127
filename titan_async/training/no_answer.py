"""What to say where a rank has waited in vain for another: which one did not answer, and what it is at.

The error of the wait itself knows neither: a rank waits for its neighbour, which may well wait for the next.
But every rank leaves in the run's event files what it does, whatever becomes of it.
"""

import re
from pathlib import Path
from typing import Any

from titan_async.errors import UserError
from titan_async.monitor.view.snapshot import RunWatch

__all__ = ["name_the_silent", "seconds_waited"]

_WAITED = re.compile(r"Timed out waiting (\d+)ms")
_LIMITS = ("train_timeout_seconds", "init_timeout_seconds")


def seconds_waited(error: BaseException) -> float | None:
    """How long a rank has waited in vain before this error; None if it is another error."""
    found = _WAITED.search(str(error))
    return None if found is None else int(found[1]) / 1000


def name_the_silent(seconds: float, rank: int, folder: Path | None, comm: Any) -> str:
    """The sentence for a wait that was in vain.

    Args:
        seconds: that it has lasted.
        rank: that has waited. It has closed its event files.
        folder: the run's folder of events; None if it leaves none.
        comm: the configuration's `comm` section.
    """
    culprits = [] if folder is None else _culprits(folder, seconds / 2)
    limit = next((f"comm.{name}" for name in _LIMITS if getattr(comm, name) == seconds), None)
    waited = f"{seconds:.0f} s" + (f" ({limit})" if limit else "")
    slow = f", or raise {limit} if ranks are only slow" if limit else ""
    who = f"{'; '.join(culprits)}, and" if culprits else "a rank does not answer:"
    return f"{who} rank {rank} has waited for {waited} in vain: start the same command again{slow}"


def _culprits(folder: Path, seconds: float) -> list[str]:
    try:
        run = RunWatch(folder)
    except UserError:  # the files have gone
        return []
    run.poll()
    return run.culprits(seconds)
