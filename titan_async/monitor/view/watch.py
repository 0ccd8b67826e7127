"""The live view: a full screen that is updated up to four times a second.

When output is not a terminal, plain lines are printed.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from titan_async.monitor.journal import JournalReader
from titan_async.monitor.processes import Launched, has_exited
from titan_async.monitor.run_folder import RunInfo, read_info
from titan_async.monitor.snapshot import RunMonitor, Snapshot
from titan_async.monitor.view.frame import ViewOptions, clean, render_frame
from titan_async.monitor.view.terminal import Interrupts, reading_keys

__all__ = ["STOPPING", "print_frame", "print_lines", "watch"]

_PERIOD = 0.25
_TOGGLES = {"p": "paused", "s": "by_slowest", "?": "help", "h": "help"}

STOPPING = "stopping after this step and saving; Ctrl-C again stops immediately"


def watch(console: Console, source: Path | Launched) -> int:
    """Displays a run until the user quits; returns the exit status.

    Args:
        console: a terminal.
        source: a run's folder of events, or the runs of a launcher. In the latter case the view ends with the
            run, and a first Ctrl-C, which the training receives as well, only displays a note.

    Raises:
        UserError: the run cannot be read.
    """
    run = (
        None if isinstance(source, Launched) else RunMonitor(source)
    )  # errors are raised before the screen is cleared

    def show(interrupts: Interrupts) -> None:
        with (
            reading_keys() as read_keys,
            Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live,
        ):
            view = _View(console, live, run)
            over = False
            while not over:
                begin = time.monotonic()
                if isinstance(source, Launched):
                    view.follow(source.latest())
                    over = source.is_over(view.run.history.end if view.run else None)
                if interrupts.count:
                    view.shown = replace(view.shown, note="stopping" if view.run is None else STOPPING)
                view.refresh()  # after the check, so that the last entries are displayed
                over = over or view.press(read_keys(max(_PERIOD - (time.monotonic() - begin), 0.01)))

    return _run_until_quit(source, show)


def print_lines(file: TextIO, source: Path | Launched) -> int:
    """Prints the log of a run from its beginning to its end; returns the exit status.

    Args:
        file: the output.
        source: as for `watch`.

    Raises:
        UserError: the run cannot be read.
    """

    def show(interrupts: Interrupts) -> None:
        folder: Path | None = None
        info: RunInfo | None = None
        reader: JournalReader | None = None
        end: str | None = None
        over = False
        while not over:
            latest = source.latest() if isinstance(source, Launched) else source
            if latest is not None and latest != folder:
                folder, info, reader, end = latest, read_info(latest), JournalReader(latest), None
            if isinstance(source, Launched):
                over = source.is_over(end)
            else:
                over = end is not None or (info is not None and has_exited(info))
            for entry in reader.new_entries() if reader is not None else []:
                if entry["kind"] in ("log", "warning"):
                    warning = "warning: " if entry["kind"] == "warning" else ""
                    file.write(f"{warning}{clean(str(entry.get('text')))}\n")
                elif entry["kind"] == "end":
                    end = str(entry.get("reason"))
            file.flush()
            if not over and (end is None or isinstance(source, Launched)):
                time.sleep(_PERIOD)

    return _run_until_quit(source, show)


def print_frame(console: Console, folder: Path) -> None:
    """Prints one frame of a run, of the console's size.

    Raises:
        UserError: the run cannot be read.
    """
    run = RunMonitor(folder)
    run.poll()
    console.print(render_frame(console, run.snapshot(), run.history, ViewOptions(), *console.size))


def _run_until_quit(source: Path | Launched, show: Callable[[Interrupts], None]) -> int:
    """Calls `show` until Ctrl-C, with a launcher until the second one; returns the exit status."""
    launched = isinstance(source, Launched)
    with Interrupts(ignored=1 if launched else 0) as interrupts:
        try:
            show(interrupts)
        except KeyboardInterrupt:
            return 130 if launched else 0
    return 0


class _View:
    """The state of the screen and its options."""

    def __init__(self, console: Console, live: Live, run: RunMonitor | None) -> None:
        self._console, self._live = console, live
        self._drawn: object = None
        self._began = time.monotonic()
        self._snapshot: Snapshot | None = None
        self.run = run
        self.shown = ViewOptions()

    def follow(self, folder: Path | None) -> None:
        """Displays the run of this folder from now on."""
        if folder is not None and (self.run is None or folder != self.run.folder):
            self.run = RunMonitor(folder)

    def press(self, keys: str) -> bool:
        """Handles keys; returns whether to quit."""
        for key in keys:
            if key in "qQ":
                return True
            if (choice := _TOGGLES.get(key)) is not None:
                pressed = {choice: not getattr(self.shown, choice)}
                self.shown = replace(self.shown, **pressed)  # type: ignore[arg-type]
        return False

    def refresh(self) -> None:
        """Reads new events and draws; while paused, it draws only if the options or the size change."""
        if self.run is not None and (not self.shown.paused or self._snapshot is None):
            self.run.poll()
            self._snapshot = self.run.snapshot()
        size, shown, run, seen = self._console.size, self.shown, self.run, self._snapshot
        if run is None or seen is None:
            waited = int(time.monotonic() - self._began)
            self._draw((waited, size, shown), lambda: self._waiting(waited))
        else:
            self._draw(
                (seen, size, shown), lambda: render_frame(self._console, seen, run.history, shown, *size)
            )

    def _draw(self, key: object, make: Callable[[], RenderableType]) -> None:
        if key != self._drawn:
            self._live.update(make(), refresh=True)
            self._drawn = key

    def _waiting(self, seconds: int) -> Text:
        text = Text(f"waiting for the training processes to start ({seconds} s)\n\n")
        return text.append(self.shown.note or "q quits this view; training continues", "dim")
