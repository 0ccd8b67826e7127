"""The runs that a launcher starts while a view waits for them."""

import time
from pathlib import Path

from titan_async.monitor.run_folder import runs_in
from titan_async.monitor.view.processes import is_alive

__all__ = ["Launched"]

_AFTER_FAILURE = 5.0  # seconds in which a failed run may be started again


class Launched:
    """The runs that a launcher starts in a `dump_folder` from now on: one, or another when it fails.

    Args:
        run_dir: the `dump_folder`; it need not exist yet.
        pid: of the launcher.
    """

    def __init__(self, run_dir: str, pid: int) -> None:
        self._run_dir, self._pid = run_dir, pid
        self._earlier = set(runs_in(run_dir))
        self._failed_at: float | None = None

    def latest(self) -> Path | None:
        """The folder of events of the latest of them; None as long as there is none."""
        runs = [folder for folder in runs_in(self._run_dir) if folder not in self._earlier]
        return runs[-1] if runs else None

    def is_over(self, end: str | None) -> bool:
        """Whether nothing more is to come.

        Args:
            end: why the latest run has ended; None if it goes on.
        """
        if end != "failed":
            self._failed_at = None
        elif self._failed_at is None:
            self._failed_at = time.monotonic()
        waited = self._failed_at is not None and time.monotonic() - self._failed_at > _AFTER_FAILURE
        return waited or end in ("finished", "stopped") or not is_alive(self._pid)
