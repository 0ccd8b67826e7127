"""A run's record of itself: the spans of every rank, and rank 0's journal."""

import contextlib
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torchtitan

from titan_async import __version__
from titan_async.monitor.events import EventWriter
from titan_async.monitor.journal import Journal
from titan_async.monitor.recorder import EventRecorder, clock_of
from titan_async.monitor.run_folder import RunInfo, RunShape, events_folder, write_info
from titan_async.pipelining.recording import Kind

__all__ = ["MonitorConfig", "Recording", "start_recording"]


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    """What is recorded for `titan-async watch`, `trace` and `plot`."""

    events: bool = True
    """Whether every rank records what it does, in `dump_folder/events`: its latest spans in 2 MiB, and a line
    for each logged step."""


@dataclass
class Recording:
    """What a rank records. Without files, nothing; with a journal on rank 0 alone."""

    events: EventRecorder | None = None
    journal: Journal | None = None
    _first_step: int = 0
    """Of the next interval."""
    folder: Path | None = None
    """Where the files are."""

    def span(self, kind: Kind, step: int) -> AbstractContextManager[None]:
        """Record what happens inside as part of a training step, from 1."""
        return contextlib.nullcontext() if self.events is None else self.events.span(kind, step)

    def write(self, kind: str, **fields: Any) -> None:
        """Add an entry to the journal."""
        if self.journal is not None:
            self.journal.write(kind, **fields)

    def end_interval(self, step: int) -> None:
        """Summarize the steps up to this one since the last call."""
        if self.events is not None:
            self.events.end_interval(self._first_step, step)
            self._first_step = step + 1

    def utilization(self) -> dict[int, float]:
        """The share of the last interval that each stage of this rank was busy; see `EventRecorder`."""
        return {} if self.events is None else self.events.utilization()

    def close(self, reason: Literal["finished", "stopped", "failed"]) -> None:
        """Write what is left. Harmless to call again."""
        self.write("end", reason=reason)
        if self.events is not None:
            self.events.close()
        if self.journal is not None:
            self.journal.close()
        self.events = self.journal = None


def start_recording(
    dump_folder: str | os.PathLike[str],
    shape: RunShape,
    stages: Sequence[int],
    device: torch.device,
    warn: Callable[[str], None],
) -> Recording:
    """Start to record a run. A collective over all ranks.

    A rank whose files cannot be written, from the start or at some time, goes on without recording.

    Args:
        dump_folder: the run's.
        shape: of the run.
        stages: the indices of this rank's stages.
        device: on which it computes.
        warn: is told what is wrong.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    new_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    mine = (new_id, socket.gethostname(), os.getpid(), tuple(stages))
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    run_id, host, pid, _ = everyone[0]
    folder = events_folder(dump_folder, run_id)

    def failed(error: OSError) -> None:
        warn(
            f"rank {rank} no longer records events in {folder}: {error.strerror}; training goes on "
            "(monitor.no-events turns them off)"
        )

    journal = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.environ.get("LOCAL_RANK", "0") == "0":  # nodes may have disks of their own
            info = RunInfo(
                run_id=run_id,
                started=time.time(),
                host=host,
                pid=pid,
                ranks=tuple(of for *_, of in everyone),
                device=_name_of(device),
                versions={
                    "titan_async": __version__,
                    "torch": str(torch.__version__),
                    "torchtitan": torchtitan.__version__,
                },
                **vars(shape),
            )
            write_info(folder, info)
        if rank == 0:
            journal = Journal(folder)
        events = EventRecorder(
            EventWriter(folder, rank),
            clock_of(device),
            stages,
            first_step=shape.first_step,
            memory=_memory_of(device),
            failed=failed,
        )
    except OSError as error:
        failed(error)
        return Recording()
    return Recording(events, journal, shape.first_step + 1, folder)


def _name_of(device: torch.device) -> str:
    return device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def _memory_of(device: torch.device) -> Callable[[], tuple[int, int, int]]:
    """Tells bytes in use, at most so far, and in all."""
    if device.type == "cpu":
        page = os.sysconf("SC_PAGE_SIZE")
        everything = page * os.sysconf("SC_PHYS_PAGES")
        unit = 1 if sys.platform == "darwin" else 1024

        def resident() -> tuple[int, int, int]:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            try:
                now = int(Path("/proc/self/statm").read_text().split()[1]) * page
            except OSError:  # not on Linux
                now = peak
            return now, max(peak, now), everything

        return resident
    module = torch.get_device_module(device)
    limit = module.get_device_properties(device).total_memory
    return lambda: (module.memory_allocated(device), module.max_memory_allocated(device), limit)
