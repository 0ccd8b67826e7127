"""The section `[monitor]`, and the recording of a run: spans of every rank, and rank 0's journal."""

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
from typing import Any

import torch
import torch.distributed as dist
import torchtitan
from torchtitan.trainer import Trainer

from titan_async import __version__
from titan_async.monitor.events import EventWriter
from titan_async.monitor.journal import Journal
from titan_async.monitor.recorder import EventRecorder, clock_of
from titan_async.monitor.run_folder import RunInfo, RunShape, events_folder, write_info
from titan_async.pipelining.recording import Kind
from titan_async.training._titan_internals import stages_of
from titan_async.training.callbacks import Callback, EndReason
from titan_async.training.pipeline.schedule import (
    delays_gradients,
    overlaps,
    synchronous_steps,
    tokens_per_step,
)
from titan_async.training.telemetry.reporter import Reporter
from titan_async.training.telemetry.stage_spans import ModelSpans, StageSpans

__all__ = ["MonitorConfig", "Recorded", "Recording"]


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    """Recording for `titan-async watch`, `trace` and `plot`."""

    events: bool = True
    """Whether every rank records what it does, in `dump_folder/events`: its latest spans in 2 MiB, and a line
    for each logged step."""


class Recording(Callback):
    """Records a rank's spans from its first step to the end of training, and on rank 0 a journal.

    Records nothing with `monitor.no-events`, and with the fake backend. A rank that cannot write its files
    continues without them.

    Args:
        reporter: prints a warning if files cannot be written, and writes its lines to the journal too.
    """

    def __init__(self, reporter: Reporter | None = None) -> None:
        self._reporter = reporter
        self.events: EventRecorder | None = None
        self.journal: Journal | None = None
        self.folder: Path | None = None
        """The folder of the files."""
        self._spans: StageSpans | ModelSpans | None = None
        self._interval_start = 0  # the first step of the current interval

    def before_first_step(self, trainer: Trainer) -> None:
        """Start to record. A collective over all ranks."""
        config = trainer.config
        if not config.monitor.events or dist.get_backend() == "fake":
            return
        stages = stages_of(trainer.pp_schedule) if trainer.parallel_dims.pp_enabled else []
        shape = _shape_of(trainer, stages)
        self._open(config.dump_folder, shape, [stage.stage_index for stage in stages] or [0], trainer.device)
        if self.events is None:
            return
        if delays_gradients(config.parallelism):
            trainer.pp_schedule.recorder = self.events
        elif stages:
            self._spans = StageSpans(stages, self.events)
        else:
            self._spans = ModelSpans(trainer.model_parts[0], self.events)

    def _open(
        self,
        dump_folder: str | os.PathLike[str],
        shape: RunShape,
        stages: Sequence[int],
        device: torch.device,
    ) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        new_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        mine = (new_id, socket.gethostname(), os.getpid(), tuple(stages))
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        run_id, host, pid, _ = everyone[0]
        folder = events_folder(dump_folder, run_id)

        def failed(error: OSError) -> None:
            if self._reporter is not None:
                self._reporter.warn_from_any_rank(
                    f"rank {rank} no longer records events in {folder}: {error.strerror}; training "
                    "continues (monitor.no-events turns them off)"
                )

        journal = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.environ.get("LOCAL_RANK", "0") == "0":  # nodes may have their own disks
                info = RunInfo(
                    run_id=run_id,
                    started=time.time(),
                    host=host,
                    pid=pid,
                    ranks=tuple(of for *_, of in everyone),
                    device=_device_name(device),
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
                memory=_memory_statistics(device),
                failed=failed,
            )
        except OSError as error:
            failed(error)
            return
        self.events, self.journal, self.folder = events, journal, folder
        self._interval_start = shape.first_step + 1
        if self._reporter is not None:
            self._reporter.journal = journal

    def span(self, kind: Kind, step: int) -> AbstractContextManager[None]:
        """Record a span of a training step, counted from 1."""
        return contextlib.nullcontext() if self.events is None else self.events.span(kind, step)

    def record_pass(self, batch: int, first_microbatch: int) -> AbstractContextManager[None]:
        """Record a pass of some microbatches of a batch, where the schedule does not do so itself.

        Args:
            batch: its number since the first step.
            first_microbatch: how many microbatches of the batch were in earlier passes.
        """
        if self._spans is None:
            return contextlib.nullcontext()
        return self._spans.record_pass(batch, first_microbatch)

    def write(self, kind: str, **fields: Any) -> None:
        """Add an entry to the journal."""
        if self.journal is not None:
            self.journal.write(kind, **fields)

    def end_interval(self, step: int) -> None:
        """Summarize the steps up to this one since the last call."""
        if self.events is not None:
            self.events.end_interval(self._interval_start, step)
            self._interval_start = step + 1

    def utilization(self) -> dict[int, float]:
        """The share of the last interval that each stage of this rank was busy; see `EventRecorder`."""
        return {} if self.events is None else self.events.utilization()

    def after_training(self, trainer: Trainer, reason: EndReason) -> None:
        """Write the end of the journal, and close the files. May be called again."""
        self.write("end", reason=reason)
        if self.events is not None:
            self.events.close()
        if self.journal is not None:
            self.journal.close()
        self.events = self.journal = None


class Recorded:
    """A component of torchtitan's trainer that prints and records what it does."""

    reporter: Reporter | None = None
    recording: Recording = Recording()

    def report(self, line: str) -> None:
        """Print a line."""
        if self.reporter is not None:
            self.reporter.log(line)


def _shape_of(trainer: Trainer, stages: Sequence[Any]) -> RunShape:
    config = trainer.config
    delayed = delays_gradients(config.parallelism)
    microbatches = trainer.num_pipeline_parallel_microbatches if stages else 1
    return RunShape(
        model=f"{config.model_spec.name} {config.model_spec.flavor}",
        first_step=trainer.step - 1,
        steps=config.training.steps,
        log_every=config.metrics.log_freq,
        schedule=config.parallelism.pipeline_parallel_schedule if stages else "none",
        microbatches=microbatches * trainer.gradient_accumulation_steps,
        lookahead=config.pipeline.lookahead if delayed else 0,
        overlap=overlaps(config),
        stages=stages[0].num_stages if stages else 1,
        synchronous_steps=synchronous_steps(config),
        tokens_per_step=tokens_per_step(trainer),
    )


def _device_name(device: torch.device) -> str:
    return device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def _memory_statistics(device: torch.device) -> Callable[[], tuple[int, int, int]]:
    """A function that returns bytes in use, peak bytes, and total bytes."""
    if device.type == "cpu":
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        unit = 1 if sys.platform == "darwin" else 1024

        def resident() -> tuple[int, int, int]:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            try:
                now = int(Path("/proc/self/statm").read_text().split()[1]) * page
            except OSError:  # not on Linux
                now = peak
            return now, max(peak, now), total

        return resident
    module = torch.get_device_module(device)
    limit = module.get_device_properties(device).total_memory
    return lambda: (module.memory_allocated(device), module.max_memory_allocated(device), limit)
