"""torchtitan's trainer, for a pipeline that delivers each gradient one batch late and is never flushed.

With a synchronous schedule, or one stage, it trains as torchtitan does: a gradient is complete after each
batch. Everything around a step that does not change its result is a `Callback`.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.validate import Validator
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.utils import GarbageCollection
from torchtitan.trainer import Trainer

from titan_async.pipelining.recording import Kind
from titan_async.training._titan_internals import stages_of, unmanaged
from titan_async.training.callbacks import Callback, EndReason, StepResult, Update
from titan_async.training.checkpoint.checkpointer import AsyncCheckpointer, save_for_resuming
from titan_async.training.checkpoint.ema import EmaConfig, WeightAverage
from titan_async.training.checkpoint.train_state import TrainState
from titan_async.training.dataloader import TextDataLoader, plain_worker_errors
from titan_async.training.models.hf_architecture import export_warning
from titan_async.training.optimizer.config import AsyncLRSchedulers
from titan_async.training.optimizer.container import AsyncOptimizers, drop_token_counts, skip_on_device
from titan_async.training.pipeline.overlap import enter_in_backward
from titan_async.training.pipeline.schedule import (
    PipelineConfig,
    check_supported,
    delays_gradients,
    overlaps,
    synchronous_steps,
)
from titan_async.training.prepare import prepare_config
from titan_async.training.process.preemption import PreemptedError, Preemption
from titan_async.training.process.timeouts import WaitLimits, pauses_after, set_all_timeouts
from titan_async.training.telemetry.metrics import AsyncMetrics
from titan_async.training.telemetry.not_finite import GradientCheck, NonFiniteSearch, SkippedUpdates
from titan_async.training.telemetry.recording import MonitorConfig, Recorded, Recording
from titan_async.training.telemetry.reporter import Reporter
from titan_async.training.telemetry.run_report import RunReport
from titan_async.training.telemetry.stage_times import StageTimer
from titan_async.training.telemetry.step_metrics import StepMetrics
from titan_async.training.transfer import Deferred, HostCopy, Microbatch, Upload
from titan_async.training.validator import AsyncValidator

__all__ = ["AsyncTrainer"]


class AsyncTrainer(Trainer):
    """A `Trainer` for `pipeline_parallel_schedule = "Async2BW"` and for torch's own schedules."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        optimizer: OptimizersContainer.Config = field(default_factory=AsyncOptimizers.Config)
        lr_scheduler: LRSchedulersContainer.Config = field(default_factory=AsyncLRSchedulers.Config)
        dataloader: BaseDataLoader.Config = field(default_factory=TextDataLoader.Config)
        metrics: MetricsProcessor.Config = field(default_factory=AsyncMetrics.Config)
        validator: Validator.Config = field(default_factory=AsyncValidator.Config)
        checkpoint: BaseCheckpointManager.Config = field(default_factory=AsyncCheckpointer.Config)
        pipeline: PipelineConfig = field(default_factory=PipelineConfig)
        monitor: MonitorConfig = field(default_factory=MonitorConfig)
        ema: EmaConfig = field(default_factory=EmaConfig)

        max_skipped_updates: int = 10
        """A gradient that holds an infinity or a NaN anywhere makes no update on any rank. The run stops
        after this many skipped updates in a row."""

        adopted: Annotated[bool, tyro.conf.Suppress] = False
        """Whether this was torchtitan's `Trainer.Config`; see `adopt`."""

        def __post_init__(self) -> None:
            # Not super(): `slots=True` replaces the class that super() refers to.
            Trainer.Config.__post_init__(self)
            if delays_gradients(self.parallelism):
                check_supported(self)

    def __init__(self, config: Config) -> None:
        warning = export_warning(config)
        config = prepare_config(config)
        super().__init__(config)
        self.delayed = delays_gradients(config.parallelism)
        self.synchronous_steps = synchronous_steps(config)
        if self.delayed and self.pp_has_last_stage and isinstance(self.loss_fn, ChunkedLossWrapper):
            self.loss_fn.set_lm_head(unmanaged(self.model_parts[-1].lm_head))
        stages = stages_of(self.pp_schedule) if self.parallel_dims.pp_enabled else []
        if overlaps(config):
            enter_in_backward(stages[0], self.train_context)

        self._deferred, self._upload = Deferred(), Upload(self.device)
        self.preemption = Preemption()
        set_timeouts = partial(set_all_timeouts, dims=self.parallel_dims, preemption=self.preemption)
        self.wait_limits = WaitLimits(config.comm, set_timeouts)
        self.reporter = Reporter(is_logging_rank=dist.get_rank() == 0, steps=config.training.steps)
        self.recording = Recording(self.reporter)
        self.gc_handler.collect = self._collect_garbage

        self.average = WeightAverage(self.model_parts, config.ema.decay) if config.ema.decay else None
        self.train_state = TrainState(
            self.model_parts[0],
            self.pp_schedule if self.delayed else None,
            self.average,
            self.parallel_dims,
            self.device,
        )
        self.skipped = SkippedUpdates(config.max_skipped_updates)
        search = NonFiniteSearch(
            [(stage.stage_index, stage.submod) for stage in stages] or enumerate(self.model_parts)
        )
        gradients = GradientCheck(self.skipped, search, self._deferred, self.reporter)
        # The two halves of an overlapped pair have no separate times.
        timed = stages if not overlaps(config) else []
        self.stage_timer = StageTimer(timed, self.device, self.reporter.warn) if timed else None
        validator = self.validator if config.validator.enable else None
        components = (self.optimizers, self.metrics_processor, self.checkpointer, validator)
        for component in components:
            if isinstance(component, Recorded):
                component.reporter, component.recording = self.reporter, self.recording
        callbacks = (
            *components,
            self.recording,
            RunReport(self.reporter, warning),
            self.average,
            gradients,
            StepMetrics(self.recording, gradients, self._deferred, self.preemption.group),
            self.stage_timer,
        )
        self.callbacks = [callback for callback in callbacks if isinstance(callback, Callback)]

    def train(self) -> None:
        """Train up to `training.steps`, resuming from the latest checkpoint, and print a summary.

        After SIGTERM or Ctrl-C all ranks stop after the same step and save.

        Raises:
            PreemptedError: after such a request, if the settings allow no save.
        """
        self._first_step: int | None = None
        self._data_ended = False
        reason: EndReason = "failed"
        for callback in self.callbacks:
            callback.before_training(self)
        try:
            with plain_worker_errors():
                super().train()
            if self._data_ended:
                self._save_at_the_end_of_data()
            reason = "finished"
        except PreemptedError as stopped:
            reason = "stopped"
            self._save_after(stopped.request)
        finally:
            for callback in reversed(self.callbacks):
                callback.after_training(self, reason)

    def train_step(self, data_iterator: Iterator[Microbatch]) -> None:
        """Train on one batch, and update with the gradient that is complete then, if any."""
        if self._first_step is None:
            self._first_step = self.step - 1
            self._start()
            self.preemption.listen()
        self.wait_limits.begin(pauses_after(self))
        with self.recording.span(Kind.STEP, self.step):
            result = self._train_on_batch(data_iterator)
        self.reporter.advance(self.step)
        self._deferred.run(before=self.step)
        for callback in self.callbacks:
            callback.after_step(self, result)
        last_step = self.step == self.config.training.steps
        if pauses_after(self) or last_step:
            self._settle()
        if self.step == self._first_step + 1:
            self.preemption.listen_to_interrupts()
        request = self.preemption.end_step()
        if request and not last_step:
            raise PreemptedError(request)

    def _start(self) -> None:
        for callback in self.callbacks:
            callback.before_first_step(self)

    def _train_on_batch(self, data_iterator: Iterator[Microbatch]) -> StepResult:
        config, dims = self.config, self.parallel_dims
        self.optimizers.zero_grad(set_to_none=config.training.disable_cuda_graphs)
        try:
            with self.recording.span(Kind.DATA, self.step):
                groups, local_valid_tokens = self._next_batch(data_iterator)
        except DataloaderExhaustedError:
            self._data_ended = True
            raise  # torchtitan then leaves its loop
        self.preemption.begin_step()
        valid_tokens = int(local_valid_tokens)
        groups, global_valid_tokens = self._upload(groups, local_valid_tokens)
        if dims.dp_enabled:
            global_valid_tokens = dist_utils.dist_sum_tensor(global_valid_tokens, dims.get_mesh("batch"))
        # The loss of a batch without a valid label is 0, and not 0 / 0.
        global_valid_tokens = global_valid_tokens.clamp(min=1)

        if self.delayed:
            # A checkpoint that is being staged holds the weights of the next batch, valid until `step`.
            self.checkpointer.maybe_wait_for_staging()
            self._set_delay(self.step > self.synchronous_steps)
        for callback in self.callbacks:
            callback.before_batch(self)
        loss = torch.zeros(1, device=self.device)
        for number, microbatches in enumerate(groups):
            with self.recording.record_pass(self.step - 1 - self._first_step, number * len(microbatches)):
                loss += self._run(microbatches, global_valid_tokens).detach()
        if not self.delayed or self.pp_schedule.gradient_ready:
            self._update()
        for callback in self.callbacks:
            callback.after_batch(self)
        if pauses_after(self):  # for which the pipeline must be empty
            self._drain_and_update()
        return StepResult(loss, valid_tokens, global_valid_tokens)

    def _set_delay(self, delayed: bool) -> None:
        """Let the next batch's update be delayed, or not."""
        if delayed and self.step == self.synchronous_steps + 1 > 1:
            line = f"step {self.step}: the synchronous start is over, updates are delayed from here on"
            self._deferred.add(self.step, partial(self.reporter.log, line))
        self.pp_schedule.delay_updates = delayed

    def _next_batch(self, data_iterator: Iterator[Microbatch]) -> tuple[list[list[Microbatch]], torch.Tensor]:
        """The microbatches of each pass, and how many labels are valid."""
        valid_tokens = torch.zeros((), dtype=torch.int64)
        groups = []
        for _ in range(self.gradient_accumulation_steps):
            groups.append([next(data_iterator) for _ in range(self.num_pipeline_parallel_microbatches)])
            valid_tokens += sum((labels != IGNORE_INDEX).sum() for _, labels in groups[-1])
        if self.delayed:
            # A pipeline that is never flushed accumulates over more microbatches, not over more passes.
            groups = [[microbatch for group in groups for microbatch in group]]
        return groups, valid_tokens

    def _run(self, microbatches: list[Microbatch], global_valid_tokens: torch.Tensor) -> torch.Tensor:
        inputs, labels = [fields for fields, _ in microbatches], [label for _, label in microbatches]
        pipelined = self.parallel_dims.pp_enabled
        return self.forward_backward_step(
            input_dict=inputs if pipelined else inputs[0],
            labels=labels if pipelined else labels[0],
            global_valid_tokens=global_valid_tokens,
        )

    def pp_forward_backward_step(
        self,
        *,
        input_dict_mbs: list[dict[str, torch.Tensor]],
        label_mbs: list[torch.Tensor],
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Like torchtitan's, but without its copy of a loss of -1 on other stages, which synchronizes."""
        ready = [self.post_dataloading_process(*each) for each in zip(input_dict_mbs, label_mbs, strict=True)]
        losses: list[torch.Tensor] | None = [] if self.pp_has_last_stage else None
        with self.train_context():
            self.pp_schedule.step(
                arg_mbs=[(inputs,) for inputs, _, _ in ready] if self.pp_has_first_stage else None,
                kwarg_mbs=[others for _, _, others in ready],
                target_mbs=None if losses is None else [labels for _, labels, _ in ready],
                losses=losses,
                loss_kwargs={"global_valid_tokens": global_valid_tokens},
                return_outputs=False,
            )
        if losses is None:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).sum().to(self.device)

    def _update(self) -> None:
        """Update unless the gradient is not finite; decided on the device if all optimizers support it."""
        with self.recording.span(Kind.CLIP, self.step):
            for callback in self.callbacks:
                callback.before_clip(self)
            norm = self._clip()
        copy, skip = HostCopy(norm), ~norm.isfinite()
        on_device = skip_on_device(self.optimizers, skip)
        self.checkpointer.maybe_wait_for_staging()
        if on_device or not skip:
            with self.recording.span(Kind.OPTIMIZER, self.step):
                self.optimizers.step()
        else:
            drop_token_counts(module for part in self.model_parts for module in part.modules())
        found_finite = on_device or not getattr(self.optimizers, "step_was_skipped", False)
        for callback in self.callbacks:
            callback.after_update(self, Update(copy, skip, found_finite))
        self.lr_schedulers.step()

    def _clip(self) -> torch.Tensor:
        """Clip the gradient of the whole model. Returns its norm, which is finite if the gradient is."""
        max_norm = self.config.training.max_norm
        if self.delayed:
            return self.pp_schedule.clip_grad_norm_(max_norm)
        return dist_utils.clip_grad_norm_(
            [p for part in self.model_parts for p in part.parameters()],
            max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )

    def _drain_and_update(self) -> None:
        if self.delayed:
            self.optimizers.zero_grad()
            if self.pp_schedule.drain():
                self._update()
                self.optimizers.zero_grad()

    def _settle(self) -> None:
        """Run what may wait for the device, before a pause."""
        self._deferred.run()
        for callback in self.callbacks:
            callback.before_pause(self)

    def _save_at_the_end_of_data(self) -> None:
        self.step -= 1  # there was no batch for this step
        self.wait_limits.begin(["save"])
        self._drain_and_update()
        self._settle()
        self.checkpointer.save(self.step, last_step=True)
        self.reporter.log(
            f"the data ended after step {self.step} of {self.config.training.steps}; add more text, or set "
            "dataloader.infinite"
        )

    def _save_after(self, request: signal.Signals) -> None:
        self.wait_limits.begin(["save"])
        self._drain_and_update()
        self._settle()
        name = "Ctrl-C" if request == signal.SIGINT else request.name
        steps, checkpoint = self.config.training.steps, self.config.checkpoint
        if not save_for_resuming(self.checkpointer, self.step):
            self.reporter.log(
                f"{name}: stopped after step {self.step} of {steps} without saving, because of "
                f"checkpoint.{'load_only' if checkpoint.enable else 'no-enable'}"
            )
            raise PreemptedError(request)
        folder = Path(self.config.dump_folder) / checkpoint.folder
        self.reporter.log(
            f"{name}: saved step {self.step} of {steps} in {folder}; resume with the same command"
        )

    def _collect_garbage(self, reason: str, generation: int = 1) -> None:
        """Replaces torchtitan's function with the same arguments, which it calls between steps."""
        with self.recording.span(Kind.GARBAGE_COLLECTION, self.step):
            GarbageCollection.collect(reason, generation)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.train_state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.train_state.load_state_dict(state_dict)
