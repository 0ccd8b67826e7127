"""The section `[lr_scheduler]`: torchtitan's schedule, whose warm-up is a share of the steps."""

import dataclasses
from dataclasses import dataclass

from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

__all__ = ["AsyncLRSchedulers", "share_of"]


def share_of(steps: int, ratio: float) -> int:
    """A share of the steps, rounded down."""
    return int(round(steps * ratio, 6))  # 0.29 * 100 is 28.999999999999996


class AsyncLRSchedulers(LRSchedulersContainer):
    """torchtitan's learning-rate schedulers, with a warm-up that follows `training.steps`."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        warmup_steps: int | None = None  # type: ignore[assignment]
        """Steps of the linear warm-up. "none" for `warmup_ratio` of all steps; a number takes its place."""

        warmup_ratio: float = 0.1
        """Share of the steps (`training.steps`, or `total_steps` where that is set) that are warm-up, rounded
        down. Without effect where `warmup_steps` is a number."""

        def resolved_warmup_steps(self, training_steps: int) -> int:
            """The steps of warm-up in a run of so many."""
            if self.warmup_steps is not None:
                return self.warmup_steps
            steps = training_steps if self.total_steps is None else self.total_steps
            return share_of(steps, self.warmup_ratio)

        def build(  # type: ignore[override]
            self, *, optimizers: OptimizersContainer, training_steps: int
        ) -> LRSchedulersContainer:
            """See `LRSchedulersContainer.Config`."""
            resolved = dataclasses.replace(self, warmup_steps=self.resolved_warmup_steps(training_steps))
            # By name: a dataclass with slots is another class than the one super() would look for.
            return LRSchedulersContainer.Config.build(  # type: ignore[no-any-return]
                resolved, optimizers=optimizers, training_steps=training_steps
            )
