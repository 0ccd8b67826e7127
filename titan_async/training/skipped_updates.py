"""Updates that are not made because a gradient is not finite, and when there are too many of them."""

from collections.abc import Callable
from dataclasses import dataclass

from titan_async.errors import UserError

__all__ = ["SkippedUpdates"]


@dataclass
class SkippedUpdates:
    """Counts skipped updates.

    All ranks count alike, since the norm of a gradient is global. What a hook makes of gradients after that
    is known to, and counted by, the ranks of that stage alone.
    """

    most_in_a_row: int
    """With this many in a row the run stops."""
    total: int = 0
    in_a_row: int = 0

    def note(self, finite: bool, step: int, where: str, warn: Callable[[str], None]) -> None:
        """Count the update of `step`, made if its gradient is `finite` and skipped otherwise.

        Args:
            where: what is known of the place of the first value that is not; see `not_finite.Search`.
            warn: is told of an update that is skipped.

        Raises:
            UserError: if as many as `most_in_a_row` were skipped without one that was made.
        """
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.total += not finite
        if self.in_a_row >= self.most_in_a_row:
            raise UserError(
                f"the gradient was not finite {self.in_a_row} times in a row up to step {step}{where}: "
                "lower the learning rate or training.max_norm, or look at the data (max_skipped_updates says "
                "how many)"
            )
        if not finite:
            warn(
                f"step {step}: the gradient is not finite{where}, so its update is skipped "
                f"({self.total} so far)"
            )
