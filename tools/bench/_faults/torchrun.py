"""Runs under torchrun, which starts all processes again when one dies."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from _faults.runs import command, environment
from titan_async.monitor.view.processes import is_alive

__all__ = ["Restarting", "children_of"]


@dataclass(frozen=True)
class Line:
    """A line of a run, and when it came, in seconds since the epoch."""

    time: float
    text: str


@dataclass
class Restarting:
    """A run of two ranks under torchrun.

    Args:
        folder: the run writes to `folder`/run.
        flags: of the run.
        restarts: how often torchrun may start all processes again.
        fault: that they do to themselves.
    """

    folder: Path
    flags: tuple[object, ...]
    restarts: int
    fault: Mapping[str, Any]
    out: list[Line] = field(default_factory=list)
    err: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        argv = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", 1, "--nproc-per-node", 2,
            "--max-restarts", self.restarts, "--monitor-interval", 0.1, "--shutdown-timeout", 100,
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *command(*self.flags)[1:],
        ]  # fmt: skip
        self.process = subprocess.Popen(
            list(map(str, argv)), cwd=self.folder, text=True, start_new_session=True,
            env=environment(self.fault) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        streams = (self.process.stdout, self.out), (self.process.stderr, self.err)
        self._readers = [threading.Thread(target=_read, args=of, daemon=True) for of in streams]
        for reader in self._readers:
            reader.start()

    def workers(self) -> list[int]:
        """The processes of the ranks."""
        return children_of(self.process.pid)

    def wait(self) -> int:
        """Wait for the end, and return torchrun's exit status."""
        status = self.process.wait()
        for reader in self._readers:
            reader.join()
        return status

    def steps(self, begin: float, end: float) -> list[tuple[int, float]]:
        """The steps that were reported between two times, each with its time."""
        found = ((re.match(r"step +(\d+)/", line.text), line.time) for line in self.out)
        return [(int(step[1]), at) for step, at in found if step and begin <= at < end]


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, without those that have ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [child for child in map(int, children) if is_alive(child)]


def _read(stream: IO[str], lines: list[Line]) -> None:
    for text in stream:
        lines.append(Line(time.time(), text.rstrip("\n")))
