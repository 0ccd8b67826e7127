"""`ScheduleAsync2BW`: the pipeline schedule of PipeDream-2BW (arXiv 2006.09503), delay one at any depth.

The recurrence it runs, with b the batch and W the weights (arXiv 2606.30634):

    W[b+1] = W[b] - update(g_b),    g_b = gradient of batch b at W[max(b-1, 0)]
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async.pipelining._torch_internals import (
    forget_input_gradients,
    initialize_stage,
    post_p2p,
    split_microbatches,
    wrapper_of,
)
from titan_async.pipelining.actions import Action, drain_actions, in_flight, step_actions
from titan_async.pipelining.weight_versions import WeightVersions

__all__ = ["ScheduleAsync2BW"]

_abandoned: list[tuple[dist.Work, list[dist.P2POp]]] = []


class ScheduleAsync2BW(PipelineScheduleSingle):
    """A drop-in for `Schedule1F1B` that never empties the pipeline between batches.

    `step` of batch b reads the weights as they are when it is called, runs the m forwards of batch b, and
    m backwards: the rest of batch b-1, then the first of batch b. When it returns, `.grad` of the stage's
    parameters holds the gradient of batch b-1 (nothing after the very first call). Clip, optimizer step,
    learning rate and `zero_grad` follow outside, as with any schedule::

        losses = []
        schedule.step(x, target=y, losses=losses)   # losses of this batch, gradient of the one before
        if schedule.gradient_ready:
            optimizer.step()
            optimizer.zero_grad()

    `drain` finishes what is in flight. Call it before saving, validating, or leaving.

    Args:
        stage: the stage of this rank. Its module holds plain parameters: `fully_shard`,
            `DistributedDataParallel` and DTensor parameters are refused.
        n_microbatches: microbatches in a batch, m; at least the number of stages.
        loss_fn: takes the last stage's output, a target and `loss_kwargs`; returns a scalar.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: as in `Schedule1F1B`.
        scale_grads: divide each batch's gradient by m, for a loss that averages over a microbatch.

    Raises:
        ValueError: if there are fewer microbatches than stages; every rank raises it, before any
            communication.
        NotImplementedError: if the module is wrapped as above.
    """

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: tuple | None = None,
        kwargs_chunk_spec: dict | None = None,
        output_merge_spec: dict[str, Any] | tuple | None = None,
        scale_grads: bool = True,
    ) -> None:
        if n_microbatches < stage.num_stages:
            raise ValueError(
                f"Async2BW needs at least as many microbatches ({n_microbatches}) as stages "
                f"({stage.num_stages}); use more microbatches or fewer stages"
            )
        super().__init__(
            stage=stage,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )
        # Only the last stage finishes a batch's backwards within the batch's own step.
        self._tail = in_flight(stage.stage_index, stage.num_stages)
        self._versions: WeightVersions | None = None
        self._batch = 0  # batches since the pipeline was last empty
        self._version_of: dict[int, int] = {}  # batch -> the version of the weights it uses
        self._complete: dict[int, list[Tensor | None]] = {}  # batch -> its gradient, not yet delivered
        self._gradient_ready = False
        # The last gradient a step computes travels together with the next step's first activation: a pair
        # of neighbours then agrees on every fused batch, which NCCL insists on.
        self._unsent: list[dist.P2POp] = []
        self._sending: deque[tuple[dist.Work, list[dist.P2POp]]] = deque()
        # gloo cancels a send whose handle is gone: those of a schedule that is dropped must outlive it.
        weakref.finalize(self, _abandoned.extend, self._sending).atexit = False
        self._broken = False
        self._refuse_wrapped()

    @property
    def gradient_ready(self) -> bool:
        """Whether the last `step` or `drain` left a batch's gradient in `.grad`, so that an update is due."""
        return self._gradient_ready

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple] | None = None,
        kwarg_mbs: list[dict] | None = None,
        target_mbs: list | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch, as `Schedule1F1B.step` does but without emptying the pipeline.

        Args:
            *args, **kwargs, target: whole-batch inputs, split along dimension 0 into m microbatches.
            losses: cleared and filled with one scalar a microbatch of this batch, on the last stage.
            return_outputs: whether the last stage merges and returns its outputs.
            loss_kwargs: further arguments of `loss_fn`.
            arg_mbs, kwarg_mbs, target_mbs: inputs that are already split, instead of whole-batch ones.

        Returns:
            The merged output of this batch on the last stage if `return_outputs`, else None.

        Raises:
            RuntimeError: under `torch.no_grad()`, if the set of trainable parameters has changed, or if an
                earlier `step` or `drain` has failed.
            NotImplementedError: if a trainable parameter has hooks or is of a class of its own.
            TypeError, ValueError: for inputs that do not fit, as `Schedule1F1B.step`.

        A `GradScaler` must keep its scale constant: a gradient is unscaled one batch after it was scaled.
        """
        self._refuse_broken()
        if self._has_backward and not torch.is_grad_enabled():
            raise RuntimeError("step() trains and needs gradients; call eval() under torch.no_grad()")
        split_args, split_kwargs, targets = split_microbatches(
            self, args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs
        )
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list but is a {type(losses).__name__}")
        if self._has_backward and self._stage.is_last and targets is None:
            raise ValueError("the last stage needs a target to train; pass target= or target_mbs=")
        if not self._has_backward and self._batch:
            raise RuntimeError("batches are in flight; call drain() and apply its gradient before eval()")

        stage = self._stage
        if self._has_backward:
            self._checked_versions()
        stage.has_backward = self._has_backward
        stage.output_chunks.clear()
        with self._breaks_on_error():
            self._step_microbatches(split_args, split_kwargs, targets, losses, return_outputs, loss_kwargs)
        return self._merge_outputs(stage.output_chunks) if stage.is_last and return_outputs else None

    def drain(self) -> bool:
        """Finish what is in flight, and leave the last batch's gradient in `.grad`.

        Draining is scheduling only: the trajectory is that of a run without it. So if training goes on,
        the next `step` still reads the weights as they are now, before the update from this gradient, and
        delivers no gradient. With nothing in flight it does nothing. Every rank must call it.

        To put other weights into the module here, load them into the schedule too (`load_state_dict`), or
        build a new schedule: the next batch would read the old ones otherwise.

        Returns:
            `gradient_ready`: whether a gradient was delivered, so that an update is due.

        Raises:
            RuntimeError, NotImplementedError: as `step`.
        """
        self._refuse_broken()
        self._gradient_ready = False
        if self._batch:
            versions = self._checked_versions()
            batch = self._batch - 1
            stage = self._stage
            actions = drain_actions(stage.stage_index, stage.num_stages, self._n_microbatches, batch)
            with self._breaks_on_error():
                self._exchange([])
                self._run(actions, None, [])
                self._exchange([])
                self._wait_for_sends(0)
            versions.hold()
            self._deliver(batch)
            self._batch = 0
            self._version_of.clear()
        return self._gradient_ready

    def state_dict(self) -> dict[str, Tensor]:
        """What a run needs, beside module and optimizer, to go on exactly: the weights of the next batch.

        After `drain` and its update these are one update older than the module's. Keys are the names of
        the module's trainable parameters; the tensors are valid until the next `step`.

        Raises:
            RuntimeError: if batches are in flight; drain first.
        """
        return self._idle_versions().next_weights()

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Let the next `step` read the weights of `state_dict`; the module keeps its own.

        Raises:
            RuntimeError: if batches are in flight; drain first.
            KeyError, ValueError: if a trainable parameter is missing or has another shape, without any
                change.
        """
        self._idle_versions().set_next_weights(state_dict)

    def _idle_versions(self) -> WeightVersions:
        self._refuse_broken()
        if self._batch:
            raise RuntimeError("batches are in flight; call drain() and apply its gradient first")
        return self._checked_versions()

    def _checked_versions(self) -> WeightVersions:
        if self._versions is None:
            self._refuse_wrapped()
            self._versions = WeightVersions(self._stage.submod)
        self._versions.check_unchanged()
        return self._versions

    @contextmanager
    def _breaks_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Neighbours may hold messages that nobody will take, and gradients are half summed up.
            self._broken = True
            raise

    def _refuse_broken(self) -> None:
        if self._broken:
            raise RuntimeError(
                "an earlier step failed and what was in flight is lost; build a new schedule on every rank"
            )

    def _step_microbatches(
        self,
        arg_mbs: list | None = None,
        kwarg_mbs: list | None = None,
        target_mbs: list | None = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert arg_mbs is not None and kwarg_mbs is not None
        stage = self._stage
        initialize_stage(self, arg_mbs[0], kwarg_mbs[0], target_mbs[0] if target_mbs else None, loss_kwargs)
        batch_losses: list[Tensor] = []

        def forward(microbatch: int) -> None:
            output = stage.forward_one_chunk(
                microbatch, arg_mbs[microbatch], kwarg_mbs[microbatch], save_forward_output=return_outputs
            )
            if stage.is_last and self._loss_fn is not None and target_mbs is not None:
                batch_losses.append(self._loss_fn(output, target_mbs[microbatch], **(loss_kwargs or {})))

        if self._has_backward:
            self._train(forward, batch_losses)
        else:
            self._evaluate(forward)
        if losses is not None and stage.is_last:
            losses[:] = batch_losses

    def _train(self, forward: Callable[[int], None], losses: list[Tensor]) -> None:
        assert self._versions is not None
        batch, stage = self._batch, self._stage
        self._version_of[batch] = version = self._versions.read()
        if not self._tail:
            self._versions.release_other(version)
        actions = step_actions(stage.stage_index, stage.num_stages, self._n_microbatches, batch)
        self._run(actions, forward, losses)
        if self._tail:
            self._versions.preserve(version)
        self._batch += 1
        self._gradient_ready = False
        if batch:
            self._deliver(batch - 1)
            del self._version_of[batch - 1]

    def _run(
        self, actions: list[Action], forward: Callable[[int], None] | None, losses: list[Tensor]
    ) -> None:
        assert self._versions is not None
        marks = self._versions.gradient_marks()
        try:
            self._execute(actions, forward, losses)
        finally:
            self._versions.show(None)
        self._versions.check_bypassed(marks)

    def _execute(
        self, actions: list[Action], forward: Callable[[int], None] | None, losses: list[Tensor]
    ) -> None:
        assert self._versions is not None
        stage, shown = self._stage, None
        for action, following in zip_longest(actions, actions[1:]):
            batch, microbatch = action.batch, action.microbatch
            version = self._version_of[batch]
            if action.kind == "F":
                forget_input_gradients(stage, microbatch)
                self._exchange(stage.get_fwd_recv_ops(microbatch))
            else:
                self._exchange(stage.get_bwd_recv_ops(microbatch))
            if version != shown:
                # Before backwards too: activation checkpointing computes the forward once more.
                self._versions.show(version)
                shown = version
            if action.kind == "F":
                assert forward is not None
                forward(microbatch)
                self._unsent = stage.get_fwd_send_ops(microbatch)
            else:
                stage.backward_one_chunk(microbatch, loss=losses[microbatch] if stage.is_last else None)
                self._unsent = stage.get_bwd_send_ops(microbatch)
                if microbatch == self._n_microbatches - 1:
                    self._complete[batch] = self._gradient_of(version)
            if following is not None and following.kind == action.kind:
                self._exchange([])  # the neighbour has nothing to pair it with

    def _evaluate(self, forward: Callable[[int], None]) -> None:
        stage = self._stage
        for microbatch in range(self._n_microbatches):
            self._exchange(stage.get_fwd_recv_ops(microbatch))
            forward(microbatch)
            self._unsent = stage.get_fwd_send_ops(microbatch)
            self._exchange([])
            del stage.fwd_cache[microbatch]
        self._wait_for_sends(0)

    def _gradient_of(self, version: int) -> list[Tensor | None]:
        assert self._versions is not None
        gradients = self._versions.take_gradients(version)
        present = [gradient for gradient in gradients if gradient is not None]
        if self.scale_grads and present:
            torch._foreach_div_(present, self._n_microbatches)
        return gradients

    def _deliver(self, batch: int) -> None:
        assert self._versions is not None
        self._versions.deliver(self._complete.pop(batch))
        self._gradient_ready = True

    def _exchange(self, receives: list[dist.P2POp]) -> None:
        """Start what is to be sent and received as one fused batch, and wait for what it receives."""
        sends, self._unsent = self._unsent, []
        ops = sends + receives
        if not ops:
            return
        works = post_p2p(ops)
        # gloo gives one handle an op, NCCL one for a mixed batch. With a group for each direction they
        # come in another order than the ops.
        separate = len(works) == len(ops) and len({op.group for op in ops}) == 1
        for index, work in enumerate(works):
            if receives and (not separate or index >= len(sends)):
                work.wait()
            else:
                self._sending.append((work, sends))
        # A neighbour has taken everything but the latest few messages, so this does not block.
        self._wait_for_sends(2 * (self._tail + 2))

    def _wait_for_sends(self, most_pending: int) -> None:
        while len(self._sending) > most_pending:
            work, _ = self._sending.popleft()
            work.wait()

    def _refuse_wrapped(self) -> None:
        wrapper = wrapper_of(self._stage.submod)
        if wrapper is not None:
            raise NotImplementedError(
                f"Async2BW does not support a module with {wrapper} yet; use a plain module, one copy a stage"
            )
