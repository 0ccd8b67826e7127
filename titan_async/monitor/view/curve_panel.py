"""The part of a live view that has the loss and the learning rate as curves."""

from rich.console import ConsoleOptions, Group, RenderableType
from rich.layout import Layout
from rich.style import Style
from rich.text import Text

from titan_async.monitor.journal import History, Series
from titan_async.monitor.view.plot import curve

__all__ = ["draw_curves"]


def draw_curves(steps: int, history: History, options: ConsoleOptions, height: int) -> RenderableType:
    """The curves side by side, at the options' width.

    Args:
        steps: that the run is to reach: there is room for them.
        history: what the journal has told.
        options: of the console.
        height: in lines, the titles included; at least 2.
    """
    width = options.max_width
    left = width * 3 // 5
    loss = f"loss {_loss(history.last_loss)}"
    if history.validation is not None:
        loss += f", validation {_loss(history.validation[1])} at {history.validation[0]:,}"
    rate = history.last_learning_rate
    layout = Layout()
    layout.split_row(
        Layout(_plot(loss, history.loss, steps, options.update(width=left - 2), height, "cyan"), size=left),
        Layout(
            _plot(
                f"learning rate {'-' if rate is None else f'{rate:.2e}'}",
                history.learning_rate,
                steps,
                options.update(width=width - left),
                height,
                "magenta",
                low=0.0,
            )
        ),
    )
    return layout


def _plot(
    title: str,
    series: Series,
    steps: int,
    options: ConsoleOptions,
    height: int,
    colour: str,
    low: float | None = None,
) -> RenderableType:
    """A title, and a curve with its range at the left; at the right edge the run ends."""
    values = [value for _, value in series.points]
    labels = [""] * (height - 1)
    if values:
        bottom = min(values) if low is None else min(low, *values)
        labels[-1], labels[0] = _short(bottom), _short(max(values))
        if labels[0] == labels[-1]:
            labels[-1] = ""
    margin = max(map(len, labels))
    lines = curve(
        series.points,
        max(options.max_width - margin - 1, 1),
        height - 1,
        last_x=steps,
        low=low,
        ascii_only=options.ascii_only,
    )
    style = Style.parse(colour)
    drawn = [
        Text.assemble((f"{label:>{margin}} ", "dim"), (line, style), no_wrap=True, overflow="crop")
        for label, line in zip(labels, lines, strict=True)
    ]
    return Group(Text(title, "bold", no_wrap=True, overflow="crop"), *drawn)


def _short(value: float) -> str:
    return f"{value:.3g}" if value == 0 or 0.01 <= abs(value) < 10_000 else f"{value:.1e}"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
