"""A run as plain lines, where there is no terminal to draw on."""

import time
from pathlib import Path
from typing import Any, TextIO

from titan_async.monitor.journal import JournalReader
from titan_async.monitor.processes import Launched, has_gone
from titan_async.monitor.run_folder import RunInfo, read_info
from titan_async.monitor.view.frame import clean
from titan_async.monitor.view.signals import Interrupts

__all__ = ["print_lines"]

_PERIOD = 0.25


def print_lines(file: TextIO, source: Path | Launched) -> int:
    """Write what a run says, from its beginning to its end; returns the exit status.

    Args:
        file: where to.
        source: as for `titan_async.monitor.view.watch.watch`.

    Raises:
        UserError: the run cannot be read.
    """
    launched = source if isinstance(source, Launched) else None
    with Interrupts(survives=1 if launched else 0):
        try:
            _follow(file, source)
        except KeyboardInterrupt:
            return 130 if launched else 0
    return 0


def _follow(file: TextIO, source: Path | Launched) -> None:
    folder: Path | None = None
    info: RunInfo | None = None
    reader: JournalReader | None = None
    end: str | None = None
    while True:
        latest = source.latest() if isinstance(source, Launched) else source
        if latest is not None and latest != folder:
            folder, info, reader, end = latest, read_info(latest), JournalReader(latest), None
        if isinstance(source, Launched):
            over = source.is_over(end)
        else:
            over = end is not None or (info is not None and has_gone(info))
        for entry in reader.new_entries() if reader else []:
            line = _line(entry)
            if line is not None:
                file.write(line + "\n")
            if entry["kind"] == "end":
                end = str(entry.get("reason"))
        file.flush()
        if over:
            return
        if end is None or isinstance(source, Launched):
            time.sleep(_PERIOD)


def _line(entry: dict[str, Any]) -> str | None:
    if entry["kind"] == "log":
        return clean(str(entry.get("text")))
    if entry["kind"] == "warning":
        return f"warning: {clean(str(entry.get('text')))}"
    return None
