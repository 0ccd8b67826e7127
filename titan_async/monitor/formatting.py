"""Formats of durations and stages in messages, the live view and plots."""

from collections.abc import Sequence

__all__ = ["approximate_duration", "format_duration", "name_stages"]


def format_duration(seconds: float) -> str:
    """Formats seconds as 1:02:03, or as 2:03 under an hour.

    Examples:
        >>> format_duration(3723), format_duration(123)
        ('1:02:03', '2:03')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def approximate_duration(seconds: float) -> str:
    """Formats seconds as 12 s, 3 min, 2 h 5 min or 4 d 2 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def name_stages(stages: Sequence[int]) -> str:
    """Formats stages as "stage 1" or "stages 1 and 3"."""
    return ("stage " if len(stages) == 1 else "stages ") + " and ".join(map(str, stages))
