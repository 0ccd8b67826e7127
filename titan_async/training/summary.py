"""What a run says at its end."""

from pathlib import Path
from typing import TYPE_CHECKING

from titan_async.monitor.formatting import format_duration
from titan_async.training.validator import AsyncValidator

if TYPE_CHECKING:
    from titan_async.training.trainer import AsyncTrainer

__all__ = ["summarize"]


def summarize(trainer: "AsyncTrainer", first_step: int | None, seconds: float) -> None:
    """Say what came out of a run that has reached its end.

    Args:
        trainer: of the run.
        first_step: steps that were done before it; None if it has trained none.
        seconds: that it took.
    """
    config, say = trainer.config, trainer.reporter.say
    if first_step is None:
        say(
            f"nothing to do: the checkpoint is at step {trainer.step} of {config.training.steps};"
            " raise training.steps to go on"
        )
    else:
        steps = trainer.step - first_step
        tokens = steps * config.training.seq_len * trainer.sequences_per_step
        say(
            f"trained {steps} steps in {format_duration(seconds)}: {tokens / seconds:,.0f} tokens/s, "
            f"{seconds / max(steps, 1):.2f} s/step"
        )
        _compare_with_unigram(trainer)
    folder = Path(config.dump_folder)
    say(f"files of the run: {folder}")
    if config.checkpoint.enable:
        say(f"checkpoints: {folder / config.checkpoint.folder}")


def _compare_with_unigram(trainer: "AsyncTrainer") -> None:
    loss = getattr(trainer.metrics_processor, "validation_loss", None)
    if loss is None or not isinstance(trainer.validator, AsyncValidator):
        return
    entropy = trainer.validator.unigram_entropy()
    trainer.reporter.say(
        f"validation loss {loss:.3f} nats a token; a model that sees no context reaches {entropy:.3f} "
        "(the unigram entropy of that text)"
    )
