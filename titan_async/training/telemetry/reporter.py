"""What a run says on the terminal: one line a logged step from rank 0, and a progress bar if it is one."""

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
    """Writes the lines of a run to stdout, if this is the rank that speaks.

    Args:
        speaks: whether this rank writes at all.
        steps: the number of steps that the run is to reach.
    """

    def __init__(self, speaks: bool, steps: int) -> None:
        self._speaks, self._steps = speaks, steps
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self.journal: Journal | None = None
        """Gets every line too, while a run is recorded."""
        self._output_lost = False
        self._first_step = self._latest = 0
        self._start = time.perf_counter()

    def start(self, step: int) -> None:
        """Begin to count time, with `step` steps already done."""
        self._first_step = self._latest = step
        self._start = time.perf_counter()
        if self._speaks and self._console.is_terminal and step < self._steps:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True, refresh_per_second=2)
            self._progress.start()
            self._task = self._progress.add_task("train", total=self._steps, completed=step)

    def advance(self, step: int) -> None:
        """Note that `step` has ended, of which the line may come later; move the progress bar."""
        self._latest = step
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def step(self, report: StepReport) -> None:
        """Write the line of one step."""
        elapsed = time.perf_counter() - self._start
        latest = max(self._latest, report.step)
        remaining = elapsed / max(latest - self._first_step, 1) * (self._steps - latest)
        norm = "     -" if report.grad_norm is None else f"{report.grad_norm:6.3f}"
        self.say(
            f"step {report.step:>{len(str(self._steps))}}/{self._steps}  loss {report.loss:7.4f}  "
            f"grad_norm {norm}  tok/s {report.tokens_per_second:,.0f}  lr {report.learning_rate:.2e}  "
            f"elapsed {format_duration(elapsed)}  remaining {format_duration(remaining)}"
        )

    def say(self, line: str) -> None:
        """Write any other line."""
        self._write("log", line)

    def warn(self, line: str) -> None:
        """Write a line that deserves attention."""
        self._write("warning", line)

    def warn_from_any_rank(self, line: str) -> None:
        """Write a warning that other ranks do not have, on stderr. Any thread may."""
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
        if self.journal is not None:
            self.journal.write("warning", text=line)

    def _write(self, kind: str, line: str) -> None:
        if self._speaks:
            try:
                self._console.print(line, markup=False)
            except OSError as error:
                self._tell_of_lost_output(error)
        if self.journal is not None:
            self.journal.write(kind, text=line)

    def _tell_of_lost_output(self, error: OSError) -> None:
        if not self._output_lost:
            self._output_lost = True
            self.warn_from_any_rank(
                f"cannot write the lines of this run to its output: {error.strerror}; training goes on"
            )

    def stop(self) -> None:
        """Take the progress bar away. Harmless to call again."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
