"""Whether Async2BW pays: compares its fastest known layout with the fastest synchronous one.

Both have the same ranks and the same batch. Candidates are the layouts of the recipe and of the plan's
suggestion, each under Async2BW and torch's schedules; the fastest layout with one stage; and, if the recipe
has another schedule, the fastest pipeline under Async2BW. All candidates can run and fit into memory.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.trainer import Trainer

from titan_async.pipelining.programs import SPLIT_BACKWARD
from titan_async.planning.config_variants import with_overlap, with_schedule, world_size_of
from titan_async.planning.layout import Layout, layout_of
from titan_async.planning.memory import memory_of
from titan_async.planning.step_time import StepTime
from titan_async.planning.suggest import LEAST_GAIN, Searcher, Suggestion
from titan_async.training.pipeline.schedule import ASYNC_SCHEDULE, is_async

__all__ = ["COMPARED", "Contender", "Outcome", "Verdict", "in_seconds", "verdict_of"]

COMPARED = (ASYNC_SCHEDULE, "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
"""The schedules that every plan compares with its own."""

Outcome = Literal["pays", "no difference", "does not pay", "only Async2BW", "only synchronous", "nothing"]
"""Which of the two is faster by at least `LEAST_GAIN`, or the only one that runs and fits."""

_CLOSE = 2 * LEAST_GAIN
"""Relative error of step times whose parts are scaled from another microbatch size."""


@dataclass(frozen=True)
class Contender:
    """A layout that can run and fits."""

    config: Trainer.Config
    layout: Layout
    step_seconds: float

    @property
    def seconds(self) -> str:
        """`step_seconds` with a unit."""
        return in_seconds(self.step_seconds)

    def __str__(self) -> str:
        """The layout and, for a synchronous pipeline, the schedule."""
        layout = self.layout
        if layout.pp == 1:
            return f"one stage of {layout.degrees}"
        text = layout.degrees
        if layout.lookahead:
            text += f", lookahead {layout.lookahead}"
        if layout.overlap:
            text += ", overlapped pairs"
        if layout.delayed:
            return text
        if layout.schedule in SPLIT_BACKWARD and self.config.compile.enable:
            text += ", not compiled"
        return f"{layout.schedule} on {text}"

    def to_json(self) -> dict[str, Any]:
        """The layout without the parts of its stages, and `step_seconds`."""
        values = dataclasses.asdict(self.layout)
        del values["stages"], values["steps"]
        return values | {"step_seconds": self.step_seconds}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether Async2BW pays for a recipe on its ranks, and its cost in memory."""

    asynchronous: Contender | None
    """The fastest under Async2BW; None if there is none."""
    synchronous: Contender | None
    """The fastest without delay."""
    second_version: int
    """Bytes of the second version of the weights, the maximum over ranks."""
    searched: bool
    """Whether other layouts than the recipe's were searched."""

    @property
    def gain(self) -> float | None:
        """Relative increase of steps per second by Async2BW; None without one of the two."""
        if self.asynchronous is None or self.synchronous is None:
            return None
        return self.synchronous.step_seconds / self.asynchronous.step_seconds - 1

    @property
    def outcome(self) -> Outcome:
        if self.gain is None:
            if self.asynchronous is not None:
                return "only Async2BW"
            return "nothing" if self.synchronous is None else "only synchronous"
        if self.gain >= LEAST_GAIN:
            return "pays"
        return "no difference" if 1 / (1 + self.gain) - 1 < LEAST_GAIN else "does not pay"

    @property
    def sentence(self) -> str:
        """The verdict as one sentence."""
        text = self._sentence()
        return text if self.searched else f"{text[:-1]}; other layouts were not searched (--no-suggest)."

    def _sentence(self) -> str:
        fast, plain = self.asynchronous, self.synchronous
        if fast is None and plain is None:
            return "No layout fits, neither under Async2BW nor without a delay."
        if fast is None:
            assert plain is not None
            if plain.layout.world_size == 1:
                return "Async2BW cannot be faster on one rank, which has no pipeline."
            if plain.layout.pp == 1 and not self.searched:
                return "Async2BW cannot be faster on one stage, which has no bubble."
            return f"No layout under Async2BW runs and fits: {plain} takes {plain.seconds} per step."
        size = self.second_version
        amount = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.2g} MB"
        cost = f"at the cost of one update of delay and up to {amount} per rank for a second weight version"
        if plain is None:
            return f"Only Async2BW runs and fits: {fast.seconds} per step ({fast}), {cost}."
        against = (
            f"{fast.seconds} per step ({fast}) against {plain.seconds} for the fastest synchronous layout "
            f"found ({plain})"
        )
        if self.outcome == "pays":
            return f"Async2BW pays: {against}, {self.gain:.0%} faster, {cost}."
        if self.outcome == "no difference":
            return f"Async2BW makes no difference: {against}, within the plan's {LEAST_GAIN:.0%} error."
        loser = "No pipeline pays" if plain.layout.pp == 1 else "Async2BW does not pay"
        return f"{loser}: {plain} takes {plain.seconds} per step, Async2BW {fast.seconds} ({fast})."

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values: seconds, bytes."""
        return {
            "outcome": self.outcome,
            "asynchronous": self.asynchronous and self.asynchronous.to_json(),
            "synchronous": self.synchronous and self.synchronous.to_json(),
            "gain": self.gain,
            "second_version": self.second_version,
            "searched": self.searched,
            "sentence": self.sentence,
        }


def in_seconds(seconds: float) -> str:
    """A time with its unit."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def verdict_of(
    config: Trainer.Config,
    searcher: Searcher,
    time: Callable[[Trainer.Config], StepTime],
    suggested: Suggestion | None,
    *,
    searches: bool,
) -> Verdict:
    """Compare the layouts that can run and fit, on the ranks of a configuration and for its batch.

    Args:
        config: the recipe's; its shard degree is not -1.
        searcher: of the plan.
        time: simulates a step of a configuration, with parts traced for its microbatch size.
        suggested: a faster layout that the plan has found.
        searches: whether to search for layouts with one stage and, if the recipe has another schedule, for
            pipelines under Async2BW.
    """
    found = list(_contenders(config, searcher, time))
    if suggested is not None:
        found += _contenders(suggested.config, searcher, time)
    if searches:
        world_size, is_one = world_size_of(config), [each.layout.pp == 1 for each in found]
        if not any(is_one):
            found += _fastest(searcher, config, lambda layout: layout.pp == 1)
        if world_size > 1 and (all(is_one) or not is_async(config.parallelism)):
            delayed = with_schedule(config, ASYNC_SCHEDULE)
            found += _fastest(searcher, delayed, lambda layout: layout.delayed)
    asynchronous = _first([each for each in found if each.layout.delayed])
    synchronous = _first([each for each in found if not each.layout.delayed])
    if asynchronous and synchronous and _close(asynchronous, synchronous):
        # The search scales parts from traced sizes, which may change the outcome.
        asynchronous, synchronous = _retimed(asynchronous, time), _retimed(synchronous, time)
    return Verdict(
        asynchronous=asynchronous,
        synchronous=synchronous,
        second_version=_second_version(asynchronous, searcher) if asynchronous else 0,
        searched=searches,
    )


def _close(one: Contender, other: Contender) -> bool:
    return abs(one.step_seconds / other.step_seconds - 1) < _CLOSE


def _retimed(contender: Contender, time: Callable[[Trainer.Config], StepTime]) -> Contender:
    return dataclasses.replace(contender, step_seconds=time(contender.config).step_seconds)


def _first(contenders: Sequence[Contender]) -> Contender | None:
    return min(contenders, key=lambda contender: contender.step_seconds, default=None)


def _contenders(
    config: Trainer.Config, searcher: Searcher, time: Callable[[Trainer.Config], StepTime]
) -> Iterator[Contender]:
    """A layout under each schedule, without gradient accumulation over passes, and with overlapped pairs."""
    layout = layout_of(config, world_size_of(config))
    for schedule in COMPARED if layout.pp > 1 else [layout.schedule]:
        try:
            changed = with_schedule(config, schedule)
            if _fits(changed, searcher):
                yield _contender(changed, time(changed))
            if schedule == ASYNC_SCHEDULE and layout.pp > 1 and layout.ep > 1:
                changed = with_overlap(changed, not changed.pipeline.overlap)
                if _fits(changed, searcher):
                    yield _contender(changed, time(changed))
        except ValueError:  # a UserError is one
            continue


def _fits(config: Trainer.Config, searcher: Searcher) -> bool:
    return searcher.fits(config, layout_of(config, world_size_of(config)), searcher.parts_of(config))


def _contender(config: Trainer.Config, time: StepTime) -> Contender:
    return Contender(config, layout_of(config, time.world_size), time.step_seconds)


def _fastest(searcher: Searcher, config: Trainer.Config, only: Callable[[Layout], bool]) -> list[Contender]:
    found = searcher.fastest(config, world_size_of(config), only=only)
    if found is None:
        return []
    time, changed = found
    return [_contender(changed, time)]


def _second_version(contender: Contender, searcher: Searcher) -> int:
    """Bytes of the second version of the weights, the maximum over ranks."""
    config, layout = contender.config, contender.layout
    parts = searcher.parts_of(config)
    memory = [memory_of(config, layout, parts, rank) for rank in range(layout.pp)]
    return max(of_rank.items.get("second version", 0) for of_rank in memory)
