"""Measures the forwards and backwards of a run's stages in a few steps, and writes the times to its folder.

`titan-async plan --measured FOLDER` reads them. Only `STEPS` steps after the first `SKIPPED` are timed; then
the stages are restored, so that the rest of the run has no overhead. Recorded spans would give other times
(the last stage's forward includes the loss), and there are none with `monitor.no-events`.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from titan_async.file_io import write_json
from titan_async.training.callbacks import Callback
from titan_async.training.pipeline.schedule import accumulation_of

__all__ = ["MEASURED_FILE", "SKIPPED", "STEPS", "StageTimer"]

MEASURED_FILE = "measured.json"
SKIPPED = 5
"""Steps that are not timed: shapes are inferred in the first, and kernels compiled and chosen."""
STEPS = 5
"""Steps that are timed."""

_KINDS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
}


class StageTimer(Callback):
    """Counts steps, and times the stages in some of them.

    Args:
        stages: of this rank.
        device: on which they compute.
        warn: prints a warning.
    """

    def __init__(self, stages: Sequence[Any], device: torch.device, warn: Callable[[str], None]) -> None:
        self._stages, self._device, self._warn = stages, device, warn
        self._steps = 0
        self._written = False
        self._spans: dict[tuple[int, str], list[Callable[[], float]]] = {}
        self._before: dict[tuple[int, str], Callable[..., Any]] = {}  # other wrappers

    def after_batch(self, trainer: Trainer) -> None:
        """Count a step; start or stop timing the stages."""
        self._steps += 1
        if self._steps == SKIPPED:
            for stage in self._stages:
                self._watch(stage)
        elif self._steps == SKIPPED + STEPS:
            for stage in self._stages:
                self._restore(stage)

    def before_pause(self, trainer: Trainer) -> None:
        """Write the times, once they are complete."""
        if self._steps >= SKIPPED + STEPS and not self._written:
            self._written = True
            self.write(trainer.config, trainer.parallel_dims)

    def seconds(self) -> list[dict[str, Any]]:
        """For each stage of this rank its index, its parts, and the mean times of a microbatch."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        found = []
        for stage in self._stages:
            entry: dict[str, Any] = {"stage": stage.stage_index, "parts": _parts_of(stage.submod)}
            forwards = self._spans.get((stage.stage_index, "forward_one_chunk"), [])
            for kind in ("forward", "backward"):
                spans = [
                    span()
                    for name, of in _KINDS.items()
                    if of == kind
                    for span in self._spans.get((stage.stage_index, name), [])
                ]
                # A backward is one call or two, and their numbers differ by the microbatches in flight.
                entry[kind] = sum(spans) / max(len(forwards), 1)
            found.append(entry)
        return found

    def write(self, config: Trainer.Config, dims: ParallelDims) -> None:
        """Gather the times of all stages and write them: a collective of each pipeline; rank 0 writes.

        If the file cannot be written, there is a warning and no file.
        """
        group = dims.get_mesh("pp").get_group()
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, self.seconds(), group=group)
        if dist.get_rank() != 0:
            return
        size = config.parallelism.pipeline_parallel_microbatch_size
        passes = accumulation_of(config.training, dims.dp_replicate * dims.dp_shard)
        record = {
            "schedule": config.parallelism.pipeline_parallel_schedule,
            "pp": dims.pp,
            "dp_replicate": dims.dp_replicate,
            "dp_shard": dims.dp_shard,
            "tp": dims.tp,
            "ep": dims.ep,
            "microbatch_size": size,
            "microbatches": config.training.local_batch_size // size * passes,
            "seq_len": config.training.seq_len,
            "stages": sorted((stage for own in everyone for stage in own), key=lambda stage: stage["stage"]),
        }
        file = Path(config.dump_folder) / MEASURED_FILE
        try:
            write_json(file, record)
        except OSError as error:
            self._warn(f"cannot write the stages' times to {file}: {error.strerror}; training continues")

    def _watch(self, stage: Any) -> None:
        for name in _KINDS:
            if name in vars(stage):
                self._before[stage.stage_index, name] = vars(stage)[name]
            spans = self._spans.setdefault((stage.stage_index, name), [])
            setattr(stage, name, _timed(getattr(stage, name), spans, self._device))

    def _restore(self, stage: Any) -> None:
        for name in _KINDS:
            vars(stage).pop(name, None)
            if (stage.stage_index, name) in self._before:
                setattr(stage, name, self._before[stage.stage_index, name])


def _timed(
    function: Callable[..., Any], spans: list[Callable[[], float]], device: torch.device
) -> Callable[..., Any]:
    if device.type == "cpu":

        def on_cpu(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds = time.perf_counter() - start
            spans.append(lambda: seconds)
            return result

        return on_cpu

    def on_accelerator(*args: Any, **kwargs: Any) -> Any:
        start, end = (torch.Event(device.type, enable_timing=True) for _ in range(2))
        start.record()
        result = function(*args, **kwargs)
        end.record()
        spans.append(lambda: start.elapsed_time(end) / 1e3)
        return result

    return on_accelerator


def _parts_of(module: torch.nn.Module) -> list[str]:
    """The parts of a decoder that a stage holds, as `titan_async.planning` names them."""
    parts = ["tok_embeddings"] if getattr(module, "tok_embeddings", None) is not None else []
    parts += [f"layers.{name}" for name, _ in getattr(module, "layers", torch.nn.Module()).named_children()]
    return parts + (["head"] if getattr(module, "lm_head", None) is not None else [])
