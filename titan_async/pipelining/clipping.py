"""Clips each batch's gradient by a norm whose reduction began when the gradient was complete."""

from collections.abc import Callable

from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async.pipelining._torch_internals import identity_of
from titan_async.pipelining.gradient_norm import GradientNorm, NormReducer, clip_

__all__ = ["Clipper"]

_Gradients = list[Tensor | None]


class Clipper:
    """The norms of the batches of one stage, from the completion of a gradient to its clip.

    Nothing is reduced before the first clip, for the sake of those who never clip.

    Args:
        stage: the stage of this rank.
        counted: leaves out what another stage counts.
    """

    def __init__(self, stage: _PipelineStageBase, counted: Callable[[_Gradients], _Gradients]) -> None:
        self._stage = stage
        self._counted = counted
        self._reducer: NormReducer | None = None
        self._norms: dict[int, GradientNorm] = {}  # of batches that are not delivered yet
        self._norm: GradientNorm | None = None  # of the gradient that is delivered
        self._marks: list[tuple[int, int] | None] | None = None  # what tells whether it is still the same

    def start(self, batch: int, gradients: _Gradients) -> None:
        """Start reducing the norm of `gradients`, which `.grad` will hold when `batch` is delivered."""
        if self._reducer is not None:
            self._norms[batch] = self._reducer.start(self._counted(gradients))

    def deliver(self, batch: int, gradients: _Gradients) -> None:
        """Note that `.grad` now holds `gradients`, with those of `batch`."""
        self._norm = self._norms.pop(batch, None)
        self._marks = [identity_of(gradient) for gradient in gradients]

    def clip(self, gradients: _Gradients, max_norm: float) -> Tensor:
        """Clip `gradients`, which `.grad` holds; see `ScheduleAsync2BW.clip_grad_norm_`."""
        if self._reducer is None:
            self._reducer = NormReducer(self._stage)
            self._norm = self._reducer.start(self._counted(gradients))
        if [identity_of(gradient) for gradient in gradients] != self._marks:
            raise RuntimeError(
                "the gradient in .grad is not what step() has delivered, so its norm is not known; clip it "
                "once, before you change it"
            )
        assert self._norm is not None
        norm = self._norm.value()
        clip_(gradients, max_norm, norm)
        self._marks = None
        return norm

    def is_finite(self) -> bool:
        """Whether the gradient that was clipped last is finite on all ranks."""
        if self._norm is None:
            raise RuntimeError("the norm is not known; call clip_grad_norm_() first")
        return self._norm.is_finite()
