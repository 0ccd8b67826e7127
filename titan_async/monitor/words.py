"""Numbers as people read them, in lines, frames and pictures alike."""

from collections.abc import Sequence

__all__ = ["format_duration", "name_stages"]


def format_duration(seconds: float) -> str:
    """As 1:02:03, or 2:03 under an hour.

    Examples:
        >>> format_duration(3723), format_duration(123)
        ('1:02:03', '2:03')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def name_stages(stages: Sequence[int]) -> str:
    """As "stage 1", or "stages 1 and 3"."""
    return ("stage " if len(stages) == 1 else "stages ") + " and ".join(map(str, stages))
