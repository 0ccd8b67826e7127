"""Lines at the start and the end of training."""

import time
from pathlib import Path

from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.trainer import Trainer

from titan_async.monitor.formatting import format_duration
from titan_async.training.callbacks import Callback, EndReason
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.pipeline.schedule import synchronous_steps, tokens_per_step
from titan_async.training.preflight.notes import start_notes
from titan_async.training.telemetry.reporter import Reporter
from titan_async.training.validator import AsyncValidator

__all__ = ["RunReport"]


class RunReport(Callback):
    """Prints a description of the run at the start, and a summary at the end.

    Args:
        reporter: prints the lines.
        warning: to be printed at the start.
    """

    def __init__(self, reporter: Reporter, warning: str | None) -> None:
        self._reporter, self._warning = reporter, warning
        self._first_step: int | None = None

    def before_training(self, trainer: Trainer) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def before_first_step(self, trainer: Trainer) -> None:
        """Print what is trained, and warnings; show the progress bar."""
        config, reporter = trainer.config, self._reporter
        self._first_step = first_step = trainer.step - 1
        resumed = f", resumed at step {first_step}" if first_step else ""
        stages = config.parallelism.pipeline_parallel_degree
        layout = f"{stages} stages under {config.parallelism.pipeline_parallel_schedule}"
        if synchronous_steps(config) > first_step:
            layout += f", synchronous up to step {synchronous_steps(config)},"
        reporter.log(
            f"training {config.model_spec.name} {config.model_spec.flavor} on "
            f"{layout if stages > 1 else 'one stage'} for {config.training.steps} steps{resumed}"
        )
        names = [canonical_fqn(name) for part in trainer.model_parts for name, _ in part.named_parameters()]
        warnings = [self._warning] if self._warning else []
        warnings += start_notes(config, names, was_delayed=getattr(trainer.checkpointer, "was_delayed", None))
        if isinstance(trainer.optimizers, AsyncOptimizers):
            warnings += trainer.optimizers.notes()
        for line in warnings:
            reporter.warn(line)
        reporter.start(first_step)

    def after_training(self, trainer: Trainer, reason: EndReason) -> None:
        """Remove the progress bar, and print a summary if training has finished."""
        self._reporter.stop()
        if reason == "finished":
            self._summarize(trainer)

    def _summarize(self, trainer: Trainer) -> None:
        config, log = trainer.config, self._reporter.log
        if self._first_step is None:
            log(
                f"nothing to do: the checkpoint is at step {trainer.step} of {config.training.steps};"
                " raise training.steps to continue"
            )
        else:
            steps, seconds = trainer.step - self._first_step, time.perf_counter() - self._start
            tokens = steps * tokens_per_step(trainer)
            log(
                f"trained {steps} steps in {format_duration(seconds)}: {tokens / seconds:,.0f} tokens/s, "
                f"{seconds / max(steps, 1):.2f} s/step"
            )
            self._compare_with_unigram(trainer)
        folder = Path(config.dump_folder)
        log(f"files of the run: {folder}")
        if config.checkpoint.enable:
            log(f"checkpoints: {folder / config.checkpoint.folder}")

    def _compare_with_unigram(self, trainer: Trainer) -> None:
        loss = getattr(trainer.metrics_processor, "validation_loss", None)
        if loss is None or not isinstance(trainer.validator, AsyncValidator):
            return
        entropy = trainer.validator.unigram_entropy()
        self._reporter.log(
            f"validation loss {loss:.3f} nats per token; a model without context reaches {entropy:.3f} "
            "(the unigram entropy of that text)"
        )
