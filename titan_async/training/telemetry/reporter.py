"""The output of a run on rank 0: a line for each logged step, and on a terminal a progress bar."""

import contextlib
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from titan_async.monitor.formatting import format_duration
from titan_async.monitor.journal import Journal

__all__ = ["Reporter", "StepReport"]


@dataclass(frozen=True)
class StepReport:
    """The figures of one logged step."""

    step: int
    loss: float
    """Mean over the batch's valid tokens, in nats."""
    grad_norm: float | None
    """Norm of the whole model's gradient before clipping, at the latest update; None before the first."""
    tokens_per_second: float
    """Of the whole run, all data-parallel ranks together."""
    learning_rate: float


class Reporter:
    """Prints the lines of a run to stdout, on the logging rank.

    Args:
        is_logging_rank: whether this rank prints.
        steps: the last step of the run.
    """

    def __init__(self, is_logging_rank: bool, steps: int) -> None:
        self._is_logging_rank, self._steps = is_logging_rank, steps
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self.journal: Journal | None = None
        """Receives every line too, while the run is recorded."""
        self._output_lost = False
        self._first_step = self._latest = 0
        self._start = time.perf_counter()

    def start(self, step: int) -> None:
        """Start the clock, with `step` steps already done."""
        self._first_step = self._latest = step
        self._start = time.perf_counter()
        if self._is_logging_rank and self._console.is_terminal and step < self._steps:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True, refresh_per_second=2)
            self._progress.start()
            self._task = self._progress.add_task("train", total=self._steps, completed=step)

    def advance(self, step: int) -> None:
        """Advance the progress bar to `step`, whose line may follow later."""
        self._latest = step
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def step(self, report: StepReport) -> None:
        """Print the line of one step."""
        elapsed = time.perf_counter() - self._start
        latest = max(self._latest, report.step)
        remaining = elapsed / max(latest - self._first_step, 1) * (self._steps - latest)
        norm = "     -" if report.grad_norm is None else f"{report.grad_norm:6.3f}"
        self.log(
            f"step {report.step:>{len(str(self._steps))}}/{self._steps}  loss {report.loss:7.4f}  "
            f"grad_norm {norm}  tok/s {report.tokens_per_second:,.0f}  lr {report.learning_rate:.2e}  "
            f"elapsed {format_duration(elapsed)}  remaining {format_duration(remaining)}"
        )

    def log(self, line: str) -> None:
        """Print a line."""
        self._write("log", line)

    def warn(self, line: str) -> None:
        """Print a warning."""
        self._write("warning", line)

    def warn_from_any_rank(self, line: str) -> None:
        """Print a warning of this rank alone to stderr. Thread-safe."""
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
        if self.journal is not None:
            self.journal.write("warning", text=line)

    def _write(self, kind: str, line: str) -> None:
        if self._is_logging_rank:
            try:
                self._console.print(line, markup=False)
            except OSError as error:
                self._warn_of_lost_output(error)
        if self.journal is not None:
            self.journal.write(kind, text=line)

    def _warn_of_lost_output(self, error: OSError) -> None:
        if not self._output_lost:
            self._output_lost = True
            self.warn_from_any_rank(
                f"cannot write the lines of this run to its output: {error.strerror}; training continues"
            )

    def stop(self) -> None:
        """Remove the progress bar. May be called again."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
