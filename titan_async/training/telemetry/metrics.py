"""torchtitan's metrics, with the last stage's loss on every rank, and one W&B run for all starts of a run."""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from titan_async.file_io import atomic_write
from titan_async.training.callbacks import Callback
from titan_async.training.checkpoint.folders import complete_steps
from titan_async.training.pipeline.schedule import has_last_stage
from titan_async.training.telemetry.recording import Recorded
from titan_async.training.telemetry.reporter import StepReport

__all__ = ["AsyncMetrics", "keep_run_id", "run_id_file", "share_loss", "wandb_continues"]


def share_loss(loss: torch.Tensor, parallel_dims: ParallelDims, has_last_stage: bool) -> torch.Tensor:
    """The last stage's `loss`, a scalar, on the ranks of all stages. A collective over the pipeline."""
    if not parallel_dims.pp_enabled:
        return loss
    shared = (loss.detach() if has_last_stage else torch.zeros_like(loss)).clone()
    dist.all_reduce(shared, group=parallel_dims.get_mesh("pp").get_group())
    return shared


class AsyncMetrics(MetricsProcessor, Recorded, Callback):
    """Logs to TensorBoard and W&B as torchtitan does, and prints and records each step's metrics."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    has_last_stage: bool = True
    validation_loss: float | None = None
    """The latest validation loss in nats per token, on every rank."""

    def __init__(
        self,
        config: Config,
        *,
        dump_folder: str = "./outputs",
        config_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        options |= {"dump_folder": dump_folder, "config_dict": config_dict}
        if not config.enable_wandb:
            super().__init__(config, **options)
            return
        checkpoint = (config_dict or {}).get("checkpoint", {"enable": False})
        file = run_id_file(dump_folder, dist.get_rank() if config.save_for_all_ranks else None)
        resumes = checkpoint["enable"] and bool(complete_steps(Path(dump_folder, checkpoint["folder"])))
        with wandb_continues(file, resumes=resumes) as run_id:
            super().__init__(config, **options)
        if run_id and type(self.logger) is not BaseLogger:  # this rank logs
            keep_run_id(file, run_id)

    def before_first_step(self, trainer: Trainer) -> None:
        """Note whether this rank computes losses."""
        self.has_last_stage = has_last_stage(trainer)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float | None,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """As torchtitan's; `grad_norm` is None before the first update."""
        seconds = time.perf_counter() - self.time_last_log
        dims = self.parallel_dims
        tokens = self.ntokens_since_last_log * (dims.world_size // dims.non_data_parallel_size)
        extra = extra_metrics or {}
        rate = next((value for key, value in extra.items() if key.startswith("lr/")), float("nan"))
        norm = float("nan") if grad_norm is None else grad_norm
        super().log(step, global_avg_loss, global_max_loss, norm, extra_metrics)
        if self.reporter is not None:
            self.reporter.step(StepReport(step, global_avg_loss, grad_norm, tokens / seconds, rate))
        self.recording.write(
            "step",
            step=step,
            loss=global_avg_loss,
            grad_norm=grad_norm,
            tokens_per_second=tokens / seconds,
            learning_rate=rate,
            skipped=extra.get("skipped_updates", 0),
            mfu=self._mfu(tokens / seconds),
            utilization=[v for k, v in extra.items() if k.startswith("pipeline/utilization/")] or None,
        )

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """As torchtitan's, with the loss of the last stage on all stages."""
        device = self.device_memory_monitor.device
        mine = torch.tensor([loss], device=device, dtype=torch.float32)
        loss = float(share_loss(mine, self.parallel_dims, self.has_last_stage).item())
        super().log_validation(loss, step, extra_metrics)
        self.validation_loss = loss
        self.report(f"validation at step {step}: loss {loss:.4f}")
        self.recording.write("validation", step=step, loss=loss)

    def _mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPS utilization, from 0 to 1; None on a CPU, whose peak is unknown."""
        if self.device_memory_monitor.device.type == "cpu" or self.has_quantization:
            return None
        operations = self.num_flops_per_token * tokens_per_second / self.parallel_dims.world_size
        return operations / self.gpu_peak_flops


_CHOICES = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")
"""Environment variables with which a user chooses the run."""


def run_id_file(dump_folder: str | os.PathLike[str], rank: int | None = None) -> Path:
    """The file with the W&B run id in a run's folder, or that of one rank, if each rank has its own run."""
    return Path(dump_folder) / ("wandb_run_id" if rank is None else f"wandb_run_id.rank{rank}")


@contextlib.contextmanager
def wandb_continues(file: Path, *, resumes: bool) -> Iterator[str]:
    """A context in which `wandb.init` resumes the run of `file`, or starts one that can be resumed.

    Has no effect if environment variables of the user choose the run.

    Args:
        file: of `run_id_file`.
        resumes: whether training resumes from a checkpoint; if not, a new run is started.

    Yields:
        The id of the run, empty if unknown.
    """
    if any(os.environ.get(name) for name in _CHOICES):
        yield os.environ.get("WANDB_RUN_ID", "")
        return
    kept = ""
    if resumes:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # then a new run is started
            kept = file.read_text(encoding="utf-8").strip()
    chosen = {"WANDB_RUN_ID": kept or secrets.token_hex(4), "WANDB_RESUME": "allow"}
    os.environ.update(chosen)
    try:
        yield chosen["WANDB_RUN_ID"]
    finally:
        for name in chosen:
            del os.environ[name]


def keep_run_id(file: Path, run_id: str) -> None:
    """Write the id for the next start, unless the folder is not writable."""
    with contextlib.suppress(OSError), atomic_write(file) as partial:
        partial.write_text(f"{run_id}\n", encoding="utf-8")
