"""`ScheduleAsync2BW`: the pipeline schedule of PipeDream-2BW (arXiv 2006.09503), delay one at any depth.

The recurrence it runs, with b the batch and W the weights (arXiv 2606.30634):

    W[b+1] = W[b] - update(g_b),    g_b = gradient of batch b at W[max(b-1, 0)]

While `delay_updates` is false, g_b is the gradient at W[b], as in synchronous training. If it turns true
before batch s, the delay begins as it does at batch 0: g_s and g_{s+1} are gradients at W[s].
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async.pipelining._torch_internals import (
    check_microbatches,
    check_target_spec,
    check_wrapper,
    reshard,
    split_microbatches,
    undone,
)
from titan_async.pipelining.actions import check_shape
from titan_async.pipelining.execution import Executor
from titan_async.pipelining.recording import Recorder
from titan_async.pipelining.shape_inference import ShapeInference, run_warmup, signatures_of
from titan_async.pipelining.tied_parameters import TiedParameters
from titan_async.pipelining.versions import Versions

__all__ = ["ScheduleAsync2BW"]


class ScheduleAsync2BW(PipelineScheduleSingle):
    """Replaces `Schedule1F1B`, without a pipeline flush between batches.

    `step` of batch b reads the weights as they are when it is called, and runs m forwards of batch b and m
    backwards: the rest of batch b-1, then the first of batch b. When it returns, `.grad` of the parameters
    holds the gradient of batch b-1 (nothing after the first call). Clipping and optimizer step follow
    outside:

        losses = []
        schedule.step(x, target=y, losses=losses)   # losses of this batch, gradient of the previous one
        if schedule.gradient_ready:
            schedule.clip_grad_norm_(1.0)           # over all stages, without waiting for them
            optimizer.step()
            optimizer.zero_grad()

    `drain` finishes the microbatches in flight. Call it before saving, validating, or exiting. With
    `delay_updates` set to false, training is synchronous.

    Args:
        stage: the stage of this rank. Its module is plain, or under FSDP2 (`fully_shard` with
            `reshard_after_forward=False`, or `replicate`), also over tensor or expert parallelism.
        n_microbatches: microbatches in a batch, m; at least the number of stages, d.
        loss_fn: takes the last stage's output, a target and `loss_kwargs`; returns a scalar.
        args_chunk_spec: how inputs are split, as in `Schedule1F1B`.
        kwargs_chunk_spec: likewise.
        output_merge_spec: how outputs are merged, likewise.
        scale_grads: divide each batch's gradient by m, for a loss that averages over a microbatch.
        lookahead: microbatches that the first stage holds in flight beyond the d - 1 of `Schedule1F1B`, from
            0 to m - d; their number decreases evenly to none at the last stage. They hide the latency of
            messages and uneven stages (d - 1 of them hide one message each way at every stage), and each
            costs the activations of a microbatch.
        target_chunk_spec: how the target is split, like `args_chunk_spec` for one input: along dimension 0 by
            default. Required if inputs are split along another dimension.
        tied_parameters: parameters of this stage's module of which the first and the last stage have a copy
            each, such as an embedding and the head tied to it. Pass them on these two stages in the same
            order, and none in between. The last stage's copies get the first one's values before the first
            batch; `.grad` of both then holds the sum of both stages' gradients, which counts once in the
            norm. Equal optimizers keep the copies bitwise equal.
        early_receives: whether the receive of a message is posted while the stage still computes the previous
            action, which hides the transfer, or after it. On a GPU a posted receive occupies multiprocessors
            until its message arrives, and until then nothing that waits for the whole device returns: two
            such waits at both ends of an edge deadlock. By default all are early on the CPU; on accelerators
            none, which without `lookahead` never deadlocks, and with it those of activations from another
            host. Ranks may choose differently.
        overlap: run a forward and a backward together wherever both are due, each during the other's
            all-to-alls between experts. Requires layers that exchange tokens by
            `titan_async.pipelining.all_to_all_single`, or call `titan_async.pipelining.hand_over`. Stage r
            then holds 2 (d - 1 - r) + 1 microbatches in flight instead of d - 1 - r, and during a pair one
            more, and m has to be at least 2 d - 1. The same on every rank.

    Raises:
        ValueError: if there are fewer microbatches than stages, too few for `lookahead`, or
            `tied_parameters` that the stage cannot have; every rank raises it, before any communication.
        NotImplementedError: for several stages per rank, for `DistributedDataParallel`, and for DTensor
            parameters outside of FSDP2.

    Examples:
        One stage in one process; a pipeline has a process for each stage:

        >>> import torch.distributed as dist
        >>> from torch.distributed.pipelining import PipelineStage
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> module = torch.nn.Linear(2, 1, bias=False)
        >>> stage = PipelineStage(module, 0, 1, torch.device("cpu"))
        >>> schedule = ScheduleAsync2BW(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> outputs = schedule.step(x, target=y)
        >>> outputs.shape, schedule.gradient_ready
        (torch.Size([2, 1]), False)
        >>> outputs = schedule.step(x, target=y)
        >>> schedule.gradient_ready, module.weight.grad.shape
        (True, torch.Size([1, 2]))
        >>> schedule.drain(), schedule.delay
        (True, 1)
        >>> dist.destroy_process_group()
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
        lookahead: int = 0,
        target_chunk_spec: Any = None,
        tied_parameters: Sequence[nn.Parameter] = (),
        early_receives: bool | None = None,
        overlap: bool = False,
    ) -> None:
        if isinstance(stage, list | tuple):
            raise NotImplementedError(
                "Async2BW runs one stage per rank: its pipeline never empties, so interleaved stages have no "
                "bubble to shorten; pass the stage itself"
            )
        check_shape(stage.num_stages, n_microbatches, lookahead, overlap)
        super().__init__(
            stage=stage,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )
        check_wrapper(stage.submod)
        if loss_fn is not None and target_chunk_spec is None:
            check_target_spec(args_chunk_spec, kwargs_chunk_spec)
        self._target_chunk_spec = target_chunk_spec
        tied = TiedParameters(stage, tied_parameters)
        self._executor = Executor(stage, lookahead, early_receives, overlap, tied, scale_grads)
        self._shapes = ShapeInference(stage)
        self._delay_updates = True
        self._broken = False

    @property
    def gradient_ready(self) -> bool:
        """Whether the last `step` or `drain` left a batch's gradient in `.grad`, so that an update is due."""
        return self._executor.gradient_ready

    @property
    def recorder(self) -> Recorder:
        """Records the actions of the stage during training; by default nothing is recorded."""
        return self._executor.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._executor.recorder = recorder

    @property
    def delay(self) -> int:
        """Delay in updates of the gradient in `.grad`: 1, or 0.

        0 for the first batch, for batches that were not to be delayed, and for the first one after these.
        """
        return self._executor.delay

    @property
    def delay_updates(self) -> bool:
        """Whether gradients are delayed by one batch; true by default. The same on every rank.

        While it is false, `step` reads the weights as they are and drains the pipeline, with a bubble of
        d - 1 microbatches: when it returns, `.grad` holds the gradient of its own batch. After it is set to
        true again, the next `step` delivers no gradient, like the first one. For a synchronous start:

            for batch in range(1000):
                schedule.delay_updates = batch >= 100
                optimizer.feedback_paused = batch < 100  # with error feedback: no delay to correct
                schedule.step(x, target=y)

        Raises:
            RuntimeError: when it is set to false while a batch is in flight: call `drain` and apply its
                gradient first. The next batch then reads the updated weights.
        """
        return self._delay_updates

    @delay_updates.setter
    def delay_updates(self, value: bool) -> None:
        if not value and self._executor.num_batches:
            raise RuntimeError(
                "batches are in flight; call drain() and apply its gradient before delay_updates = False"
            )
        self._delay_updates = bool(value)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient that `step` or `drain` has left in `.grad` by its norm over the whole model.

        Equivalent to `torch.nn.utils.clip_grad_norm_` over all stages and shards together, also if gradients
        were accumulated in `.grad` before. From the second call on, the norm's all-reduce starts within
        `step`, as soon as the stage's gradient is complete, so that this does not wait for other stages. Call
        it right after `step` or `drain`, on every rank.

        Args:
            max_norm: upper limit of the 2-norm; `math.inf` to only compute it.

        Returns:
            The norm before clipping, a float64 scalar: not finite if any stage's gradient is not.

        Raises:
            RuntimeError: if there is no gradient, or `.grad` is no longer what was delivered.
        """
        self._refuse_broken()
        if not self._executor.gradient_ready:
            raise RuntimeError("there is no gradient to clip; check gradient_ready first")
        versions = self._executor.versions
        assert versions is not None
        return self._executor.clipper.clip(versions.grads(), max_norm)

    def gradient_is_finite(self) -> bool:
        """Whether the clipped gradient is free of infinities and NaNs, on every stage and shard.

        The same on all ranks, because it follows from the norm. Waits for the norm, and for no other work of
        an accelerator.

        Raises:
            RuntimeError: before `clip_grad_norm_`.
        """
        return self._executor.clipper.is_finite()

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
        """Run one batch, as `Schedule1F1B.step` but without flushing the pipeline.

        Args:
            *args: whole-batch inputs of the first stage, split along dimension 0 into m microbatches of the
                same shape. The shape may differ from the previous batch's only after `drain`.
            target: of the whole batch, split like `args`, on the last stage.
            losses: cleared and filled with one scalar per microbatch of this batch, on the last stage.
            return_outputs: whether the last stage merges and returns its outputs.
            loss_kwargs: further arguments of `loss_fn`.
            arg_mbs: already split inputs, instead of whole-batch ones.
            kwarg_mbs: already split keyword inputs; their tensors may be of any size (cumulative sequence
                lengths, say).
            target_mbs: already split targets.
            **kwargs: whole-batch inputs of every stage, split like `args`.

        Returns:
            The merged output of this batch on the last stage if `return_outputs`, else None.

        Raises:
            RuntimeError: under `torch.no_grad()`, if the set of trainable parameters has changed, or if an
                earlier `step` or `drain` has failed.
            NotImplementedError: if a trainable parameter has hooks or is of a subclass of `nn.Parameter`.
            TypeError, ValueError: for invalid inputs, as `Schedule1F1B.step`, or for inputs whose shapes,
                dtypes or structure differ from those in flight. Nothing has been sent then, and training may
                continue with another `step`.

        A `GradScaler` must keep its scale constant: a gradient is unscaled one batch after it was scaled.
        """
        self._refuse_broken()
        if self._has_backward and not torch.is_grad_enabled():
            raise RuntimeError("step() trains and needs gradients; call eval() under torch.no_grad()")
        free_sizes = kwarg_mbs is not None
        arg_mbs, kwarg_mbs, target_mbs = split_microbatches(
            self, args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, self._target_chunk_spec
        )
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list but is a {type(losses).__name__}")
        if self._has_backward and self._stage.is_last and target_mbs is None:
            raise ValueError("the last stage needs a target to train; pass target= or target_mbs=")
        if not self._has_backward and self._executor.num_batches:
            raise RuntimeError("batches are in flight; call drain() and apply its gradient before eval()")

        self._run_batch(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs, free_sizes)
        stage = self._stage
        return self._merge_outputs(stage.output_chunks) if stage.is_last and return_outputs else None

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list | None = None,
        arg_mbs: list[tuple] | None = None,
        kwarg_mbs: list[dict] | None = None,
        target_mbs: list | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forwards of one batch, as `Schedule1F1B.eval`, on an empty pipeline.

        Already split inputs may be of any number of microbatches, the same on every rank.
        """
        has_backward, n_microbatches = self._has_backward, self._n_microbatches
        split = arg_mbs or kwarg_mbs or target_mbs
        try:
            self._has_backward = False
            if split:
                self._n_microbatches = len(split)
            return self.step(
                *args,
                target=target,
                losses=losses,
                arg_mbs=arg_mbs,
                kwarg_mbs=kwarg_mbs,
                target_mbs=target_mbs,
                **kwargs,
            )
        finally:
            self._has_backward, self._n_microbatches = has_backward, n_microbatches

    def drain(self) -> bool:
        """Finish the microbatches in flight, and leave the last batch's gradient in `.grad`.

        Draining does not change the trajectory: if training continues, the next `step` still reads the
        weights as they are now, before the update from this gradient, and delivers no gradient. With nothing
        in flight it does nothing. Every rank must call it.

        To load other weights into the module here, load them into the schedule too (`load_state_dict`), or
        build a new schedule: otherwise the next batch reads the old ones.

        Returns:
            `gradient_ready`: whether a gradient was delivered, so that an update is due.

        Raises:
            RuntimeError, NotImplementedError: as `step`.
        """
        self._refuse_broken()
        self._executor.gradient_ready = False
        if self._executor.num_batches:
            self._executor.checked_versions()
            with self._breaks_on_error():
                self._executor.drain()
        return self._executor.gradient_ready

    def state_dict(self) -> dict[str, Tensor]:
        """State for exact resumption, in addition to module and optimizer: the weights of the next batch.

        After `drain` and its update these are one update older than the module's. Keys are the names of
        the module's trainable parameters and of the buffers in its `state_dict`; tensors are sharded like
        the parameters, and valid until the next `step`.

        Raises:
            RuntimeError: if batches are in flight; drain first.
        """
        return self._idle_versions().state_dict()

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Let the next `step` read the weights of `state_dict`; the module keeps its own.

        Raises:
            RuntimeError: if batches are in flight; drain first.
            KeyError, ValueError: if a trainable parameter is missing or has another shape, without any
                change.
        """
        self._idle_versions().load_state_dict(state_dict)
        self._executor.missing_updates = 1

    def _idle_versions(self) -> Versions:
        self._refuse_broken()
        if self._executor.num_batches:
            raise RuntimeError("batches are in flight; call drain() and apply its gradient first")
        return self._executor.checked_versions()

    @contextmanager
    def _breaks_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Messages to and from neighbors may be unmatched, and gradients are partly accumulated.
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
        arg_mbs, kwarg_mbs = check_microbatches(self, arg_mbs, kwarg_mbs, target_mbs)
        self._run_batch(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs, True)

    def _run_batch(
        self,
        args: list,
        kwargs: list,
        targets: list | None,
        losses: list | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        free_sizes: bool,
    ) -> None:
        stage, executor = self._stage, self._executor
        if self._has_backward:
            executor.checked_versions()
        signatures = signatures_of(args, kwargs, targets, free_sizes)
        self._shapes.check(signatures, in_flight=executor.num_batches > 0)
        stage.has_backward = self._has_backward
        stage.output_chunks.clear()
        batch_losses: list[Tensor] = []
        forward_of = partial(
            executor.forward_of, args, kwargs, targets, loss_fn=self._loss_fn, loss_kwargs=loss_kwargs or {}
        )
        forward = forward_of(batch_losses, return_outputs)
        warmup: Callable[[], None] | None = None
        with self._breaks_on_error():
            if not executor.num_batches:
                executor.tied.connect()
                target = targets[0] if targets else None
                if self._shapes.infer(self, signatures, args[0], kwargs[0], target, loss_kwargs):
                    discarded: list[Tensor] = []
                    warmup = partial(run_warmup, stage, forward_of(discarded, False), discarded)
                executor.open(self._n_microbatches)
            if self._has_backward:
                executor.train_batch(forward, batch_losses, warmup, self._delay_updates)
            else:
                if warmup is not None:
                    with undone(stage.submod):
                        warmup()
                executor.evaluate(forward)
                reshard(stage.submod)
        if losses is not None and stage.is_last:
            losses[:] = [loss.detach() for loss in batch_losses]  # one may be in flight, with its graph
