"""The last steps of a stage as a strip of cells, each of what took most of its time."""

from collections.abc import Sequence

import numpy as np

from titan_async.monitor.kinds import KINDS, Activity
from titan_async.monitor.stages import StepSpans
from titan_async.pipelining.recording import Kind

__all__ = ["strip"]


_ACTIVITY = np.array([KINDS[kind].activity for kind in Kind])
_LOOKS = 16  # at each cell


def strip(steps: Sequence[StepSpans], cells: int) -> tuple[Activity, ...]:
    """What took most of the time of each cell.

    Each cell is looked at 16 times, so that a part of it shorter than 1/16 may go unseen.

    Args:
        steps: shown one after another, without what lies between them; `cells` may then be fewer by none.
        cells: how many.
    """
    if not steps or cells < 1:
        return ()
    starts = np.array([step.start for step in steps])
    lengths = np.array([step.end - step.start for step in steps])
    bounds = lengths.cumsum()
    # The times of the looks, as if the steps followed each other without a gap, and then the clock's.
    looks = ((np.arange(cells * _LOOKS) + 0.5) * (bounds[-1] / (cells * _LOOKS))).astype(np.int64)
    step = np.searchsorted(bounds, looks, side="right").clip(max=len(steps) - 1)
    times = looks - (bounds - lengths)[step] + starts[step]
    # The innermost of the spans around a time begins last, and it is written last here.
    seen = np.zeros(len(times), np.int64)
    records = np.concatenate([step.records for step in steps])
    records = records[np.argsort(records["start"], kind="stable")]
    first, last = np.searchsorted(times, records["start"]), np.searchsorted(times, records["end"])
    for begin, end, doing in zip(first, last, _ACTIVITY[records["kind"]], strict=True):
        seen[begin:end] = doing
    counts = np.stack([(seen.reshape(cells, _LOOKS) == doing).sum(axis=1) for doing in Activity])
    return tuple(Activity(doing) for doing in counts.argmax(axis=0))
