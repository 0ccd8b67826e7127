"""The section `[monitor]`: what a run leaves of itself beside checkpoints and metrics."""

from dataclasses import dataclass

__all__ = ["MonitorConfig"]


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    """What is recorded for `titan-async watch`, `trace` and `plot`."""

    events: bool = True
    """Whether every rank records what it does, in `dump_folder/events`: its latest spans in 2 MiB, and a line
    for each logged step."""
