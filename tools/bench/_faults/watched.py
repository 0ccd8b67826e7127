"""Runs whose output is read during training: lines with their times, and the processes of ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from _faults.runs import command, environment, start
from tests.support.training import processes_of

__all__ = ["SHUTDOWN_TIMEOUT", "Watched", "under_the_launcher", "under_torchrun"]

SHUTDOWN_TIMEOUT = 100
"""torchrun's --shutdown-timeout, as in docs/clusters.md."""


@dataclass(frozen=True)
class Line:
    """A line of a run, and its time, in seconds since the epoch."""

    time: float
    text: str


class Watched:
    """Reads the output of a run.

    Args:
        process: the launcher, with pipes for stdout and stderr.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out: list[Line] = []
        self.err: list[Line] = []
        streams = (process.stdout, self.out), (process.stderr, self.err)
        self._readers = [threading.Thread(target=_read, args=of, daemon=True) for of in streams]
        for reader in self._readers:
            reader.start()

    def ranks(self) -> dict[int, int]:
        """The process ids of running ranks, by rank."""
        return processes_of(self.process.pid)

    def wait_for_step(self, number: int) -> None:
        """Waits until the run logs a step.

        Raises:
            RuntimeError: the run ended before.
        """
        while all(step < number for step, _ in self.steps()):
            if self.process.poll() is not None:
                raise RuntimeError(f"ended before step {number}: {self.last_error_line}")
            time.sleep(0.01)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the exit status.

        Raises:
            subprocess.TimeoutExpired: the run did not end in time.
        """
        status = self.process.wait(timeout)
        for reader in self._readers:
            reader.join()
        return status

    def steps(self, begin: float = 0.0, end: float = float("inf")) -> list[tuple[int, float]]:
        """The steps that it logged between two times, each with its time."""
        found = ((re.match(r"step +(\d+)/", line.text), line.time) for line in list(self.out))
        return [(int(step[1]), at) for step, at in found if step and begin <= at < end]

    @property
    def last_error_line(self) -> str:
        """The last line on stderr."""
        return next((line.text for line in reversed(self.err) if line.text.strip()), "")


def under_the_launcher(folder: Path, *flags: object, fault: Mapping[str, Any] | None = None) -> Watched:
    """Starts a run as `start` does."""
    return Watched(start(folder, *flags, fault=fault))


def under_torchrun(
    folder: Path, *flags: object, restarts: int = 0, fault: Mapping[str, Any] | None = None
) -> Watched:
    """Starts a run of two ranks under torchrun, which restarts all of them if one dies."""
    argv = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", 1, "--nproc-per-node", 2,
        "--max-restarts", restarts, "--monitor-interval", 0.1, "--shutdown-timeout", SHUTDOWN_TIMEOUT,
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *command(*flags)[1:],
    ]  # fmt: skip
    process = subprocess.Popen(
        list(map(str, argv)), cwd=folder, text=True, start_new_session=True,
        env=environment(fault) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return Watched(process)


def _read(stream: IO[str], lines: list[Line]) -> None:
    for text in stream:
        lines.append(Line(time.time(), text.rstrip("\n")))
