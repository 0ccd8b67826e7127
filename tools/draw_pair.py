"""Draws a forward and a backward of two layers with experts: one after the other, and as an overlapped pair.

    python tools/draw_pair.py --out docs/images/pair.svg

Attention and experts take 1 forward and 2 backward, and an all-to-all 0.75, so that messages take half as
long as the computation. Nothing is measured.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from titan_async.monitor.figures import save, style
from titan_async.monitor.gantt import Box, Chart, draw_charts
from titan_async.pipelining.recording import Kind

MESSAGE = 0.75
FORWARD = [1.0, 1.0, 1.0, 1.0, 0.0]
"""Computation before each all-to-all, alternately of attention and experts, and after the last one."""
BACKWARD = [0.0, 2.0, 2.0, 2.0, 2.0]
KINDS = (Kind.BACKWARD, Kind.FORWARD)
ROWS = ("computation", "tokens of the backward", "tokens of the forward")


def one_after_the_other() -> list[Box]:
    """The boxes if each half waits for its own tokens."""
    boxes: list[Box] = []
    now = 0.0
    for half in (1, 0):
        for segment in (FORWARD if half else BACKWARD)[:-1]:
            boxes += _segment(half, now, segment)
            now = boxes[-1].end
        boxes += _segment(half, now, (FORWARD if half else BACKWARD)[-1])[:1]
        now = boxes[-1].end
    return boxes


def together() -> list[Box]:
    """The boxes of a pair: a half continues when its tokens have arrived and the other half waits."""
    boxes: list[Box] = []
    now, arrived = 0.0, [0.0, 0.0]
    for number, segments in enumerate(zip(BACKWARD, FORWARD, strict=True), 1):
        for half, segment in enumerate(segments):
            of_segment = _segment(half, max(now, arrived[half]), segment)
            now, arrived[half] = of_segment[0].end, of_segment[1].end
            boxes += of_segment[: 1 if number == len(BACKWARD) else 2]
    return boxes


def _segment(half: int, start: float, seconds: float) -> list[Box]:
    """A computation of a half, and its following all-to-all."""
    end = start + seconds
    return [Box(0, start, end, KINDS[half]), Box(1 + half, end, end + MESSAGE, KINDS[half], tint=0.45)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("pair.svg"), help="a .svg or .png file")
    arguments = parser.parse_args()
    charts = [
        Chart("one after the other", ROWS, one_after_the_other()),
        Chart("an overlapped pair", ROWS, together()),
    ]
    until = max(box.end for chart in charts for box in chart.boxes)
    with style():
        figure = Figure((9.5, 3.0), layout="constrained")
        draw_charts(figure, charts, "time, attention of a microbatch", until)
        save(figure, arguments.out)


if __name__ == "__main__":
    main()
