"""torchtitan's trainer, for a pipeline that delivers each gradient one batch late and never drains.

With a synchronous schedule, or one stage, the same trainer trains as torchtitan does: a gradient is then
ready after every batch.
"""

import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
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
from titan_async.training.checkpoint import random_state
from titan_async.training.checkpoint.checkpointer import (
    EMA_WEIGHTS,
    NEXT_WEIGHTS,
    RANDOM_STATE,
    AsyncCheckpointer,
    save_for_resuming,
)
from titan_async.training.checkpoint.ema import EmaConfig, WeightAverage
from titan_async.training.dataloader import TextDataLoader, plain_worker_errors
from titan_async.training.models import cpu
from titan_async.training.models.hf_architecture import export_warning
from titan_async.training.models.tying import as_held, as_stored
from titan_async.training.optimizer.config import AsyncLRSchedulers
from titan_async.training.optimizer.container import AsyncOptimizers, drop_token_counts
from titan_async.training.pipeline import overlap
from titan_async.training.pipeline.balance import balance_model_spec
from titan_async.training.pipeline.schedule import (
    PipelineConfig,
    adapt_model_spec,
    check_supported,
    delays_gradients,
    overlaps,
)
from titan_async.training.preflight.notes import start_notes
from titan_async.training.process.preemption import PreemptedError, Preemption
from titan_async.training.process.timeouts import WaitLimits, pauses_after, set_all_timeouts
from titan_async.training.record_run import record
from titan_async.training.summary import summarize
from titan_async.training.telemetry.metrics import AsyncMetrics
from titan_async.training.telemetry.not_finite import Search, SkippedUpdates
from titan_async.training.telemetry.recording import MonitorConfig, Recording
from titan_async.training.telemetry.reporter import Reporter
from titan_async.training.telemetry.stage_spans import Passing, no_spans
from titan_async.training.telemetry.stage_times import StageTimer, write_measured
from titan_async.training.telemetry.step_metrics import Trained, take_figures
from titan_async.training.transfer import HostCopy, Later, Microbatch, Upload
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
            # By name: a dataclass with slots is another class than the one super() would look for.
            Trainer.Config.__post_init__(self)
            if delays_gradients(self.parallelism):
                check_supported(self)

    def __init__(self, config: Config) -> None:
        self.delayed = delays_gradients(config.parallelism)
        self._export_warning = export_warning(config)
        config = overlap.adapt_config(cpu.adapt_config(config))
        model_spec = balance_model_spec(config.model_spec, config.pipeline)
        model_spec = adapt_model_spec(model_spec, config.parallelism, config.pipeline)
        config = dataclasses.replace(config, model_spec=model_spec)
        if isinstance(config.optimizer, AsyncOptimizers.Config) and not self.delayed:
            config.optimizer = config.optimizer.without_feedback()
        super().__init__(config)
        if self.delayed and self.pp_has_last_stage and isinstance(self.loss_fn, ChunkedLossWrapper):
            self.loss_fn.set_lm_head(unmanaged(self.model_parts[-1].lm_head))
        self.grad_norm: float | None = None
        """Of the latest update that the host knows of."""
        self._later, self._upload = Later(), Upload(self.device)
        self.skipped = SkippedUpdates(config.max_skipped_updates)
        self.resumes_delay = True
        """Whether the training state includes the weights of the next batch; see `AsyncCheckpointer`."""
        self.resumes_random_state = True
        """Whether it includes the generators' states; see `AsyncCheckpointer`."""
        self.resumes_average = True
        """Whether it includes the average of the weights; see `AsyncCheckpointer`."""
        self.was_delayed: bool | None = None
        """Whether the run of the checkpoint had a delay; None without one. See `AsyncCheckpointer`."""
        steps = config.training.steps
        self.synchronous_steps = config.pipeline.resolved_synchronous_steps(steps) if self.delayed else 0
        self.average = WeightAverage(self.model_parts, config.ema.decay) if config.ema.decay else None
        self.random_key = random_state.layout_key(self.parallel_dims, dist.get_rank(), self.device)
        pipelined = self.parallel_dims.pp_enabled
        stages = stages_of(self.pp_schedule) if pipelined else []
        paired = overlaps(config)
        if paired:
            overlap.enter_in_backward(stages[0], self.train_context)
        # The forward and the backward of a pair take their time together.
        self.stage_timer = StageTimer(stages, self.device) if pipelined and not paired else None
        self.search = Search(
            [(stage.stage_index, stage.submod) for stage in stages] or enumerate(self.model_parts)
        )
        self.preemption = Preemption()
        set_timeouts = partial(set_all_timeouts, dims=self.parallel_dims, preemption=self.preemption)
        self.wait_limits = WaitLimits(config.comm, set_timeouts)
        self.recording = Recording()
        self._passing: Passing = no_spans
        self.gc_handler.collect = self._collect_garbage
        self.reporter = Reporter(speaks=dist.get_rank() == 0, steps=config.training.steps)
        if isinstance(self.metrics_processor, AsyncMetrics):
            self.metrics_processor.reporter = self.reporter
            self.metrics_processor.has_last_stage = self.has_last_stage
        if isinstance(self.checkpointer, AsyncCheckpointer):
            self.checkpointer.reporter = self.reporter
        if config.validator.enable and isinstance(self.validator, AsyncValidator):
            self.validator.last_step = config.training.steps

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank knows losses."""
        return not self.parallel_dims.pp_enabled or self.pp_has_last_stage

    def train(self) -> None:
        """Train up to `training.steps`, resuming from the latest checkpoint, and say what came out.

        After SIGTERM or Ctrl-C all ranks stop after the same step and save.

        Raises:
            PreemptedError: after such a request, if the settings allow no save.
        """
        self._first_step: int | None = None
        self._data_ended = False
        start, reason = time.perf_counter(), "failed"
        try:
            with plain_worker_errors():
                super().train()
            if self._data_ended:
                self._save_at_the_end_of_data()
            self.reporter.stop()
            summarize(self, self._first_step, time.perf_counter() - start)
            reason = "finished"
        except PreemptedError as stopped:
            reason = "stopped"
            self._save_after(stopped.request)
        finally:
            self.reporter.stop()
            self.recording.close(reason)

    def train_step(self, data_iterator: Iterator[Microbatch]) -> None:
        """One batch, and the update from whichever batch's gradient it completes."""
        if self._first_step is None:
            self._first_step = self.step - 1
            self._start()
            self.preemption.listen()
        self.wait_limits.begin(pauses_after(self))
        with self.recording.span(Kind.STEP, self.step):
            trained = self._train_on_batch(data_iterator)
        self.reporter.advance(self.step)
        self._later.run(before=self.step)
        last_step = self.step == self.config.training.steps
        if self.metrics_processor.should_log(self.step) or last_step:
            self._later.add(self.step, take_figures(self, trained))
        if pauses_after(self) or last_step:
            self._settle()
        if self.step == self._first_step + 1:
            self.preemption.listen_to_interrupts()
        request = self.preemption.end_step()
        if request and not last_step:
            raise PreemptedError(request)

    def _train_on_batch(self, data_iterator: Iterator[Microbatch]) -> Trained:
        """One step without its report."""
        config, dims = self.config, self.parallel_dims
        self.optimizers.zero_grad(set_to_none=config.training.disable_cuda_graphs)
        rates = self._learning_rates()
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
        # The loss of a batch without any label that counts is 0, and not 0 / 0.
        global_valid_tokens = global_valid_tokens.clamp(min=1)

        if self.delayed:
            # The weights of the next batch, which a checkpoint holds too, are valid until now.
            self.checkpointer.maybe_wait_for_staging()
            self._delay_updates(self.step > self.synchronous_steps)
        self.search.begin_batch()
        loss = torch.zeros(1, device=self.device)
        for number, microbatches in enumerate(groups):
            with self._passing(self.step - 1 - self._first_step, number * len(microbatches)):
                loss += self._run(microbatches, global_valid_tokens).detach()
        if self.average is not None:
            self.average.begin()  # after the schedule's first batch, which makes copies of tied weights equal
        if self._gradient_ready:
            self._update()
        if self.stage_timer is not None:
            self.stage_timer.end_step()
        if pauses_after(self):  # for which the pipeline must be empty
            self._drain_and_update()
        return Trained(loss, valid_tokens, global_valid_tokens, rates)

    def _delay_updates(self, late: bool) -> None:
        """Delay the updates of the next batch or not, with error feedback or paused."""
        if late and self.step == self.synchronous_steps + 1 > 1:
            line = f"step {self.step}: the synchronous start is over, updates are delayed from here on"
            self._later.add(self.step, partial(self.reporter.say, line))
        self.pp_schedule.delay_updates = late
        if isinstance(self.optimizers, AsyncOptimizers):
            self.optimizers.pause_feedback(not late)

    @property
    def _gradient_ready(self) -> bool:
        return not self.delayed or self.pp_schedule.gradient_ready

    def _next_batch(self, data_iterator: Iterator[Microbatch]) -> tuple[list[list[Microbatch]], torch.Tensor]:
        valid_tokens = torch.zeros((), dtype=torch.int64)
        groups = []
        for _ in range(self.gradient_accumulation_steps):
            groups.append([next(data_iterator) for _ in range(self.num_pipeline_parallel_microbatches)])
            valid_tokens += sum((labels != IGNORE_INDEX).sum() for _, labels in groups[-1])
        if self.delayed:
            # A pipeline that never drains accumulates by more microbatches, not by more passes.
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
        """As torchtitan's, but for the loss of ranks that know none: -1, copied, waits for the device."""
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
        """Update, unless the gradient is not finite: decided on the device, if all optimizers can."""
        with self.recording.span(Kind.CLIP, self.step):
            self.search.look_at_gradients()
            norm = self._clip()
        copy, skip = HostCopy(norm), ~norm.isfinite()
        optimizers = self.optimizers
        on_device = isinstance(optimizers, AsyncOptimizers) and optimizers.set_found_inf(skip.float())
        self.checkpointer.maybe_wait_for_staging()
        if on_device or not skip:
            with self.recording.span(Kind.OPTIMIZER, self.step):
                optimizers.step()
        else:
            drop_token_counts(module for part in self.model_parts for module in part.modules())
        # Only what changes gradients in between, such as a hook, makes Muon find one that is not finite.
        made = on_device or not getattr(optimizers, "step_was_skipped", False)
        if self.average is not None and made:
            self.average.update(skip)
        self._later.add(self.step, partial(self._note_update, self.step, copy, made))
        self.lr_schedulers.step()

    def _note_update(self, step: int, norm: HostCopy, made: bool) -> None:
        """Count an update, now that the host knows whether its gradient was finite."""
        self.grad_norm = float(norm.read())
        finite = math.isfinite(self.grad_norm)
        self.skipped.note(finite and made, step, self.search.end_update(finite), self.reporter.warn)

    def _clip(self) -> torch.Tensor:
        """Clip the gradient of the whole model; its norm, which is finite if the gradient is."""
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
        """Do what waits for the device: before a pause, or the end."""
        self._later.run()
        if self.stage_timer is not None and self.stage_timer.is_due():
            write_measured(self.stage_timer, self.config, self.parallel_dims, self.reporter.warn)

    def _save_at_the_end_of_data(self) -> None:
        self.step -= 1  # the one for which there was no batch
        self.wait_limits.begin(["save"])
        self._drain_and_update()
        self._settle()
        self.checkpointer.save(self.step, last_step=True)
        self.reporter.say(
            f"the data ended after step {self.step} of {self.config.training.steps}; give more text, or set "
            "dataloader.infinite"
        )

    def _save_after(self, request: signal.Signals) -> None:
        self.wait_limits.begin(["save"])
        self._drain_and_update()
        self._settle()
        name = "Ctrl-C" if request == signal.SIGINT else request.name
        steps, checkpoint = self.config.training.steps, self.config.checkpoint
        if not save_for_resuming(self.checkpointer, self.step):
            self.reporter.say(
                f"{name}: stopped after step {self.step} of {steps} without saving, because of "
                f"checkpoint.{'load_only' if checkpoint.enable else 'no-enable'}"
            )
            raise PreemptedError(request)
        folder = Path(self.config.dump_folder) / checkpoint.folder
        self.reporter.say(
            f"{name}: saved step {self.step} of {steps} in {folder}; resume with the same command"
        )

    def _learning_rates(self) -> dict[str, float]:
        if isinstance(self.optimizers, AsyncOptimizers):
            return self.optimizers.learning_rates()
        return self.lr_schedulers.get_metrics()

    def _collect_garbage(self, reason: str, generation: int = 1) -> None:
        """In the place of torchtitan's function of the same arguments, which it calls between steps."""
        with self.recording.span(Kind.GARBAGE_COLLECTION, self.step):
            GarbageCollection.collect(reason, generation)

    def _start(self) -> None:
        self.recording, self._passing = record(self, first_step=self._first_step or 0)
        self.reporter.journal = self.recording.journal
        for part in (self.metrics_processor, self.checkpointer, getattr(self, "validator", None)):
            if isinstance(part, AsyncMetrics | AsyncCheckpointer | AsyncValidator):
                part.recording = self.recording
        resumed = f", resumed at step {self._first_step}" if self._first_step else ""
        stages = self.config.parallelism.pipeline_parallel_degree
        how = f"{stages} stages under {self.config.parallelism.pipeline_parallel_schedule}"
        if self.synchronous_steps > (self._first_step or 0):
            how += f", synchronous up to step {self.synchronous_steps},"
        spec = self.config.model_spec
        self.reporter.say(
            f"training {spec.name} {spec.flavor} on {how if stages > 1 else 'one stage'}"
            f" for {self.config.training.steps} steps{resumed}"
        )
        if self._export_warning:
            self.reporter.warn(self._export_warning)
        names = [canonical_fqn(name) for part in self.model_parts for name, _ in part.named_parameters()]
        notes = start_notes(self.config, names, was_delayed=self.was_delayed)
        if isinstance(self.optimizers, AsyncOptimizers):
            notes += self.optimizers.notes()
        for note in notes:
            self.reporter.warn(note)
        self.reporter.start(self._first_step or 0)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.delayed and self.resumes_delay:
            state[NEXT_WEIGHTS] = as_stored(self.model_parts[0], self.pp_schedule.state_dict())
        if self.average is not None and self.resumes_average:
            state[EMA_WEIGHTS] = self.average.state_dict()
        if self.resumes_random_state:
            state[RANDOM_STATE] = {self.random_key: random_state.capture(self.device)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.delayed and NEXT_WEIGHTS in state_dict:
            self.pp_schedule.load_state_dict(as_held(self.model_parts[0], dict(state_dict[NEXT_WEIGHTS])))
        if self.average is not None and EMA_WEIGHTS in state_dict:
            self.average.load_state_dict(state_dict[EMA_WEIGHTS])
        if RANDOM_STATE in state_dict:
            random_state.restore(state_dict[RANDOM_STATE][self.random_key], self.device)
        self.resumes_delay = self.resumes_random_state = self.resumes_average = True

    @property
    def sequences_per_step(self) -> int:
        """Of a batch, over all data-parallel ranks."""
        degree = self.parallel_dims.get_mesh("batch").size() if self.parallel_dims.dp_enabled else 1
        return self.config.training.local_batch_size * self.gradient_accumulation_steps * degree
