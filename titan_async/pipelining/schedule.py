"""`ScheduleAsync2BW`: the pipeline schedule of PipeDream-2BW (arXiv 2006.09503), delay one at any depth.

The recurrence it runs, with b the batch and W the weights (arXiv 2606.30634):

    W[b+1] = W[b] - update(g_b),    g_b = gradient of batch b at W[max(b-1, 0)]

While `delay_updates` is false, g_b is the gradient at W[b], as in synchronous training. If it turns true
before batch s, the delay begins as it does at batch 0: g_s and g_{s+1} are gradients at W[s].
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async.local_tensors import local_part
from titan_async.pipelining._torch_internals import (
    check_microbatches,
    initialize_stage,
    is_initialized,
    reset_shape_inference,
    reshard,
    split_microbatches,
    tree_leaves,
    undone,
    unsupported_wrapper,
)
from titan_async.pipelining.actions import (
    Early,
    Instruction,
    drain_program,
    in_flight,
    least_microbatches,
    step_program,
)
from titan_async.pipelining.clipping import Clipper
from titan_async.pipelining.execution import Batch, Execution, Forward
from titan_async.pipelining.first_step import infer_eagerly, needs_trial, run_trial
from titan_async.pipelining.recording import Kind, Recorder
from titan_async.pipelining.shape_inference import Shapes, signatures_of
from titan_async.pipelining.side_stream import SideStream
from titan_async.pipelining.tied_parameters import TiedParameters
from titan_async.pipelining.versions import Gradient, Versions

__all__ = ["ScheduleAsync2BW"]


class ScheduleAsync2BW(PipelineScheduleSingle):
    """A drop-in for `Schedule1F1B` that never empties the pipeline between batches.

    `step` of batch b reads the weights as they are when it is called, runs the m forwards of batch b, and
    m backwards: the rest of batch b-1, then the first of batch b. When it returns, `.grad` of the stage's
    parameters holds the gradient of batch b-1 (nothing after the very first call). Clip, optimizer step,
    learning rate and `zero_grad` follow outside, as with any schedule:

        losses = []
        schedule.step(x, target=y, losses=losses)   # losses of this batch, gradient of the one before
        if schedule.gradient_ready:
            schedule.clip_grad_norm_(1.0)           # over all stages, without waiting for them
            optimizer.step()
            optimizer.zero_grad()

    `drain` finishes what is in flight. Call it before saving, validating, or leaving. `delay_updates` set to
    false trains synchronously, for a start without delay.

    Args:
        stage: the stage of this rank. Its module is plain, or under FSDP2 (`fully_shard` with
            `reshard_after_forward=False`, or `replicate`), also over tensor or expert parallelism.
        n_microbatches: microbatches in a batch, m; at least the number of stages, d.
        loss_fn: takes the last stage's output, a target and `loss_kwargs`; returns a scalar.
        args_chunk_spec: how inputs are split, as in `Schedule1F1B`.
        kwargs_chunk_spec: likewise.
        output_merge_spec: how outputs are merged, likewise.
        scale_grads: divide each batch's gradient by m, for a loss that averages over a microbatch.
        lookahead: microbatches that the first stage holds in flight beyond the d - 1 that it must, from 0
            to m - d; their number falls evenly to none at the last stage. They hide the latency of messages
            and uneven stages, d - 1 of them one message each way at every stage, and each costs the
            activations of a microbatch. With none a stage holds what it does under `Schedule1F1B`.
        target_chunk_spec: how the target is split, as `args_chunk_spec` has it for one input: along dimension
            0 by default. Inputs that are split along another dimension need it.
        tied_parameters: parameters of this stage's module that the other end of the pipeline has a copy of,
            such as an embedding and the head tied to it. Pass them on the first and the last stage in the
            same order, and none in between. The last stage's copies take the first one's values before the
            first batch; `.grad` of both then holds the sum of both stages' gradients, which counts once in
            the norm. Equal optimizers keep the copies equal bit by bit.
        early_receives: whether the receive of a message is posted while the stage computes what comes before,
            which hides its transfer, or after that. On a GPU a posted receive occupies multiprocessors until
            its message comes, and while it waits for a neighbour nothing that waits for the whole device
            returns: with early receives at both ends of an edge, two such waits at once hang. By default all
            are early on the CPU; on accelerators none, which without `lookahead` never hang, and with it
            those of activations from another host. Ranks may choose differently.
        overlap: run a forward and a backward together wherever both are due, each while the other waits for
            tokens that travel between experts. It takes layers that exchange tokens by
            `titan_async.pipelining.all_to_all_single`, or call `titan_async.pipelining.hand_over`. Stage r
            then holds 2 (d - 1 - r) + 1 microbatches in flight instead of d - 1 - r, and during a pair one
            more, and m has to be at least 2 d - 1. The same on every rank.

    Raises:
        ValueError: if there are fewer microbatches than stages, too few for `lookahead`, or
            `tied_parameters` that the stage cannot have; every rank raises it, before any communication.
        NotImplementedError: for several stages a rank, for `DistributedDataParallel`, and for DTensor
            parameters outside of FSDP2.

    Examples:
        One stage on one process, to see when gradients come; a pipeline has a process for each stage:

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
                "Async2BW runs one stage a rank: its pipeline never empties, so interleaved stages have no "
                "bubble to shorten; pass the stage itself"
            )
        stages = stage.num_stages
        if n_microbatches < stages:
            raise ValueError(
                f"Async2BW needs at least as many microbatches ({n_microbatches}) as stages "
                f"({stages}); use more microbatches or fewer stages"
            )
        least = least_microbatches(stages, overlap=overlap)
        if n_microbatches < least:
            raise ValueError(
                f"overlapped pairs over {stages} stages need at least {least} microbatches, not "
                f"{n_microbatches}; use more, or overlap=False"
            )
        most = n_microbatches - least
        if not 0 <= lookahead <= most:
            raise ValueError(
                f"lookahead is {lookahead}, but {n_microbatches} microbatches over {stages} stages leave "
                f"room for 0 to {most}; use that or more microbatches"
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
        self._lookahead = lookahead
        self._target_chunk_spec = target_chunk_spec
        self._overlap = overlap
        # Only the last stage, and without overlap, finishes a batch's backwards within the batch's own step.
        self._tail = in_flight(stage.stage_index, stages, lookahead, overlap)
        self._execution = Execution(stage, lookahead, early_receives, overlap)
        self._versions: Versions | None = None
        self._number = 0  # batches since the pipeline was last empty
        self._before = 0  # batches until then
        self._delivered = 0  # gradients
        self._behind = 0  # how many of these the weights of the next batch lack: 1 after a drain
        self._delay = 0
        self._shapes = Shapes(stage)
        self._tried: set[bool] = set()  # with backward or without, for these shapes
        self._batches: dict[int, Batch] = {}
        self._complete: dict[int, Gradient] = {}  # batch -> its gradient, not yet delivered
        self._beside = SideStream(stage.device)  # of reductions, and all that follows until the delivery
        self._gradient_ready = False
        self._delay_updates = True
        self._tied = TiedParameters(stage, tied_parameters)
        self._clipper = Clipper(stage, self._tied.counted)
        self._broken = False
        self._refuse_wrapped()
        specs = tree_leaves((args_chunk_spec, kwargs_chunk_spec))
        elsewhere = {spec.split_dim for spec in specs if isinstance(spec, TensorChunkSpec)} - {0}
        if loss_fn is not None and elsewhere and target_chunk_spec is None:
            raise ValueError(
                f"inputs are split along dimension {min(elsewhere)}, and nothing says how the target is: "
                "pass target_chunk_spec, TensorChunkSpec(0) if its dimension 0 is the batch"
            )

    @property
    def gradient_ready(self) -> bool:
        """Whether the last `step` or `drain` left a batch's gradient in `.grad`, so that an update is due."""
        return self._gradient_ready

    @property
    def recorder(self) -> Recorder:
        """Is told what the stage does while it trains; nobody by default."""
        return self._execution.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._execution.recorder = recorder

    @property
    def delay(self) -> int:
        """Updates between the weights that the gradient in `.grad` was computed at and those it is for.

        0 for the very first batch, for those that were not to be delayed, and for the first one after these,
        1 for all others. Of the gradient that was delivered last.
        """
        return self._delay

    @property
    def delay_updates(self) -> bool:
        """Whether gradients come one batch late; true unless it is set to false. The same on every rank.

        While it is false, `step` reads the weights as they are and drains the pipeline, at a bubble of d - 1
        microbatches: when it returns, `.grad` holds the gradient of its own batch. Once it is true again, the
        next `step` delivers no gradient, as the very first one does. For a synchronous start:

            for batch in range(1000):
                schedule.delay_updates = batch >= 100
                optimizer.feedback_paused = batch < 100  # nothing to correct, for those that have feedback
                schedule.step(x, target=y)

        Raises:
            RuntimeError: when it is set to false while a batch is in flight, whose gradient may not be lost:
                call `drain` and apply it first. The next batch then reads the updated weights.
        """
        return self._delay_updates

    @delay_updates.setter
    def delay_updates(self, value: bool) -> None:
        if not value and self._number:
            raise RuntimeError(
                "batches are in flight; call drain() and apply its gradient before delay_updates = False"
            )
        self._delay_updates = bool(value)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient that `step` or `drain` has left in `.grad` by its norm over the whole model.

        What `torch.nn.utils.clip_grad_norm_` would do to all stages and shards together, also where `.grad`
        held something before. From the second call on, the norm's all-reduce starts within `step`, as soon as
        the stage's gradient is complete, so that this waits for no stage. Call it right after `step` or
        `drain`, on every rank.

        Args:
            max_norm: the most that the norm (2) may be; `math.inf` only measures.

        Returns:
            The norm before, a float64 scalar: not finite if any stage's gradient is not.

        Raises:
            RuntimeError: if there is no gradient, or `.grad` is no longer what was delivered.
        """
        self._refuse_broken()
        if not self._gradient_ready:
            raise RuntimeError("there is no gradient to clip; check gradient_ready first")
        assert self._versions is not None
        return self._clipper.clip(self._versions.gradients(), max_norm)

    def gradient_is_finite(self) -> bool:
        """Whether the clipped gradient is free of infinities and NaNs, on every stage and shard.

        The same answer on all ranks, for the norm tells it. Waits for the norm and for no other work of an
        accelerator.

        Raises:
            RuntimeError: before `clip_grad_norm_`.
        """
        return self._clipper.is_finite()

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
            *args: whole-batch inputs of the first stage, split along dimension 0 into m microbatches, all of
                the same shape. It may be another one than before if the pipeline is empty: after `drain`.
            target: of the whole batch, likewise, on the last stage.
            losses: cleared and filled with one scalar a microbatch of this batch, on the last stage.
            return_outputs: whether the last stage merges and returns its outputs.
            loss_kwargs: further arguments of `loss_fn`.
            arg_mbs: inputs that are already split, instead of whole-batch ones.
            kwarg_mbs: likewise; their tensors may be of any sizes (cumulative sequence lengths, say).
            target_mbs: likewise.
            **kwargs: whole-batch inputs of every stage, split likewise.

        Returns:
            The merged output of this batch on the last stage if `return_outputs`, else None.

        Raises:
            RuntimeError: under `torch.no_grad()`, if the set of trainable parameters has changed, or if an
                earlier `step` or `drain` has failed.
            NotImplementedError: if a trainable parameter has hooks or is of a class of its own.
            TypeError, ValueError: for inputs that do not fit, as `Schedule1F1B.step`, or that have other
                shapes, dtypes or structure than those that the pipeline was made for. Nothing has been sent
                then, and the next `step` may go on.

        A `GradScaler` must keep its scale constant: a gradient is unscaled one batch after it was scaled.
        """
        self._refuse_broken()
        if self._has_backward and not torch.is_grad_enabled():
            raise RuntimeError("step() trains and needs gradients; call eval() under torch.no_grad()")
        whole = kwarg_mbs is None
        arg_mbs, kwarg_mbs, target_mbs = split_microbatches(
            self, args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, self._target_chunk_spec
        )
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list but is a {type(losses).__name__}")
        if self._has_backward and self._stage.is_last and target_mbs is None:
            raise ValueError("the last stage needs a target to train; pass target= or target_mbs=")
        if not self._has_backward and self._number:
            raise RuntimeError("batches are in flight; call drain() and apply its gradient before eval()")

        self._run_batch(
            arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs, free_sizes=not whole
        )
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

        Inputs that come split may be of any number of microbatches, the same on every rank.
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
        if self._number:
            versions = self._checked_versions()
            with self._breaks_on_error():
                self._finish_in_flight(versions.hold)
            self._behind = 1
        return self._gradient_ready

    def state_dict(self) -> dict[str, Tensor]:
        """What a run needs, beside module and optimizer, to go on exactly: the weights of the next batch.

        After `drain` and its update these are one update older than the module's. Keys are the names of
        the module's trainable parameters and of the buffers in its `state_dict`; tensors are sharded like
        the parameters, and valid until the next `step`.

        Raises:
            RuntimeError: if batches are in flight; drain first.
        """
        return self._idle_versions().next_values()

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Let the next `step` read the weights of `state_dict`; the module keeps its own.

        Raises:
            RuntimeError: if batches are in flight; drain first.
            KeyError, ValueError: if a trainable parameter is missing or has another shape, without any
                change.
        """
        self._idle_versions().set_next_values(state_dict)
        self._behind = 1

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self._stage.stage_index, self._stage.num_stages, self._n_microbatches

    @property
    def _order(self) -> tuple[int, Early, bool]:
        return self._lookahead, self._execution.early, self._overlap

    def _idle_versions(self) -> Versions:
        self._refuse_broken()
        if self._number:
            raise RuntimeError("batches are in flight; call drain() and apply its gradient first")
        return self._checked_versions()

    def _checked_versions(self) -> Versions:
        if self._versions is None:
            self._refuse_wrapped()
            self._versions = Versions(self._stage.submod)
            self._tied.locate(self._versions.parameters)
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

    def _refuse_wrapped(self) -> None:
        wrapper = unsupported_wrapper(self._stage.submod)
        if wrapper is not None:
            raise NotImplementedError(
                f"Async2BW does not support a module with {wrapper}; use a plain module or fully_shard, "
                "which also replicates (HSDP)"
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
        self._run_batch(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs, free_sizes=True)

    def _run_batch(
        self,
        args: list,
        kwargs: list,
        targets: list | None,
        losses: list | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        *,
        free_sizes: bool,
    ) -> None:
        stage = self._stage
        if self._has_backward:
            self._checked_versions()
        signatures = signatures_of(args, kwargs, targets, free_sizes)
        self._shapes.check(signatures, in_flight=self._number > 0)
        stage.has_backward = self._has_backward
        stage.output_chunks.clear()
        batch_losses: list[Tensor] = []
        forward_of = partial(self._forward_of, args, kwargs, targets, loss_kwargs=loss_kwargs or {})
        forward = forward_of(batch_losses, return_outputs)
        trial: Callable[[], None] | None = None
        with self._breaks_on_error():
            if not self._number:
                self._tied.connect()
                if self._shapes.note(signatures, is_initialized(self)):
                    reset_shape_inference(self)
                    self._tried.clear()
                if self._has_backward not in self._tried and needs_trial(stage):
                    scrap: list[Tensor] = []
                    trial = partial(run_trial, stage, forward_of(scrap, False), scrap)
                target = targets[0] if targets else None
                with nullcontext() if trial is None else infer_eagerly():
                    initialize_stage(self, args[0], kwargs[0], target, loss_kwargs)
                self._execution.open(self._n_microbatches)
                self._tried.add(self._has_backward)
            if self._has_backward:
                self._train(forward, batch_losses, trial)
            else:
                if trial is not None:
                    with undone(stage.submod):
                        trial()
                self._execution.evaluate(forward)
                reshard(stage.submod)
        if losses is not None and stage.is_last:
            losses[:] = [loss.detach() for loss in batch_losses]  # one may be in flight, with its graph

    def _finish_in_flight(self, prepare_next: Callable[[], None]) -> None:
        """Run what is left of the newest batch and deliver its gradient, after `prepare_next`."""
        batch = self._number - 1
        self._run(drain_program(*self._shape, batch, *self._order))
        self._execution.close()
        prepare_next()
        self._deliver(batch)
        self._before += self._number
        self._number = 0
        self._batches.clear()

    def _forward_of(
        self,
        args: list,
        kwargs: list,
        targets: list | None,
        losses: list[Tensor],
        return_outputs: bool,
        loss_kwargs: dict[str, Any],
    ) -> Forward:
        stage = self._stage

        def forward(microbatch: int, slot: int) -> Callable[[], None]:
            output = stage.forward_one_chunk(slot, args[microbatch], kwargs[microbatch], return_outputs)
            if stage.has_backward and self._versions is not None:
                self._versions.finish_reading()

            def compute_loss() -> None:
                if stage.is_last and self._loss_fn is not None and targets is not None:
                    losses.append(self._loss_fn(output, targets[microbatch], **loss_kwargs))

            return compute_loss

        return forward

    def _train(self, forward: Forward, losses: list[Tensor], trial: Callable[[], None] | None) -> None:
        assert self._versions is not None
        versions, number, stage = self._versions, self._number, self._stage.stage_index
        if not self._delay_updates:  # a drain, or a load, may have left older weights for this batch
            versions.drop()
            self._behind = 0
        updates, self._behind = self._delivered - self._behind, 0
        self.recorder.begin(Kind.GATHER, stage, self._before + number, version=updates)
        batch = Batch(self._before + number, versions.read(), updates, losses)
        self._batches[number] = batch
        if not self._tail:
            versions.release_other(batch.version)
        self.recorder.end()
        if trial is not None:
            with versions.on_trial(batch.version):
                trial()
        self._run(step_program(*self._shape, number, *self._order), forward)
        if self._tail and self._delay_updates:
            self.recorder.begin(Kind.SWAP, stage, batch.number, version=updates)
            versions.preserve(batch.version)
            self.recorder.end()
        self._number += 1
        self._gradient_ready = False
        if not self._delay_updates:
            self._finish_in_flight(versions.drop)
            return
        if number:
            self._deliver(number - 1)
            del self._batches[number - 1]

    def _run(self, program: list[Instruction], forward: Forward | None = None) -> None:
        assert self._versions is not None
        program = self._execution.begin(program)
        due = self._number - 1
        if due in self._complete:  # the last stage was done with it before the user's update
            self._accumulate(due)
        self._execution.train(program, self._batches, self._versions, self._finish, forward)

    def _finish(self, number: int) -> None:
        assert self._versions is not None
        gradient = self._versions.take(self._batches[number].version, self._beside)
        with self._beside.running():
            present = [part for part in map(local_part, gradient.of_parameters) if part is not None]
            if self.scale_grads and present:
                torch._foreach_div_(present, self._n_microbatches)
        self._complete[number] = gradient
        if number < self._number:
            self._accumulate(number)

    def _accumulate(self, number: int) -> None:
        assert self._versions is not None
        gradient = self._complete[number]
        with self._beside.running():
            self._tied.start(number, gradient.of_parameters)
            self._versions.accumulate(gradient)
            if self._stage.is_first:  # the last stage, which is done a batch earlier, would wait for it here
                self._tied.finish(number, gradient.of_parameters)
            self._clipper.start(number, self._versions.sums(gradient))
        self._beside.mark(number)

    def _deliver(self, number: int) -> None:
        assert self._versions is not None
        gradient = self._complete.pop(number)
        self._beside.join(number)
        if not self._stage.is_first:
            self._tied.finish(number, gradient.of_parameters)
        self._versions.deliver(gradient)
        self._clipper.deliver(number, self._versions.gradients())
        self._delay = self._delivered - self._batches[number].updates
        self._delivered += 1
        self._gradient_ready = True
