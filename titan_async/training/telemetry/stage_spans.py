"""Spans of torch's own schedules, and of a model without a pipeline, which do not call a recorder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from titan_async.pipelining.recording import Kind, Recorder
from titan_async.training._titan_internals import wrap_waits

__all__ = ["ModelSpans", "StageSpans"]


class StageSpans:
    """Records the forwards, backwards and reductions of stages, and the waits of torch's schedules.

    FSDP's gathers and reductions within a forward or backward are part of it. A wait is for all messages of
    one exchange, so it is recorded without a microbatch, for the first stage.

    Args:
        stages: of this rank.
        recorder: receives the spans.
    """

    def __init__(self, stages: Sequence[Any], recorder: Recorder) -> None:
        self._stages, self._recorder = stages, recorder
        self._batch = self._first = 0
        for stage in stages:
            self._wrap(stage, "forward_one_chunk", lambda args, kwargs: Kind.FORWARD)
            self._wrap(stage, "backward_one_chunk", _kind_of_backward)
            self._wrap(stage, "backward_weight_one_chunk", lambda args, kwargs: Kind.BACKWARD_WEIGHT)
            self._wrap(stage, "perform_reduce_grad", lambda args, kwargs: Kind.REDUCE)
        wrap_waits(self._record_wait)

    @contextmanager
    def record_pass(self, batch: int, first_microbatch: int) -> Iterator[None]:
        """See `Recording.record_pass`."""
        self._batch, self._first = batch, first_microbatch
        yield

    def _wrap(self, stage: Any, name: str, kind_of: Callable[[tuple, dict], Kind]) -> None:
        function = getattr(stage, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not stage.has_backward:  # a validation, which has its own span
                return function(*args, **kwargs)
            kind = kind_of(args, kwargs)
            chunk = None if kind is Kind.REDUCE else self._first + (args[0] if args else _chunk_of(kwargs))
            # A synchronous schedule updates after every batch.
            self._recorder.begin(kind, stage.stage_index, self._batch, chunk, self._batch)
            result = function(*args, **kwargs)
            self._recorder.end()
            return result

        setattr(stage, name, recorded)

    def _record_wait(self, wait: Callable[[], None]) -> None:
        if not self._stages[0].has_backward:
            wait()
            return
        self._recorder.begin(Kind.RECEIVE, self._stages[0].stage_index, self._batch)
        wait()
        self._recorder.end()


class ModelSpans:
    """Records the forward of a model, and the rest of the pass as its backward.

    Args:
        model: computes the logits.
        recorder: receives the spans.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._model, self._recorder = model, recorder

    @contextmanager
    def record_pass(self, batch: int, first_microbatch: int) -> Iterator[None]:
        """See `Recording.record_pass`."""
        about = (0, batch, first_microbatch, batch)

        def begin_backward(*_: Any) -> None:
            self._recorder.end()
            self._recorder.begin(Kind.BACKWARD, *about)

        handle = self._model.register_forward_hook(begin_backward)
        self._recorder.begin(Kind.FORWARD, *about)
        try:
            yield
        finally:
            self._recorder.end()
            handle.remove()


def _kind_of_backward(args: tuple, kwargs: dict) -> Kind:
    full = args[2] if len(args) > 2 else kwargs.get("full_backward", True)
    return Kind.BACKWARD if full else Kind.BACKWARD_INPUT


def _chunk_of(kwargs: dict[str, Any]) -> int:
    return int(kwargs["fwd_chunk_id"] if "fwd_chunk_id" in kwargs else kwargs["bwd_chunk_id"])
