"""Times the forwards and backwards of a run's stages in a few of its steps, and leaves them in its folder.

`titan-async plan --measured FOLDER` reads them. Only `STEPS` steps after the first `SKIPPED` are timed;
then the stages are as they were, so that the rest of the run pays nothing.
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
from titan_async.training.pipeline import accumulation_of

__all__ = ["MEASURED_FILE", "SKIPPED", "STEPS", "StageTimer", "write_measured"]

MEASURED_FILE = "measured.json"
SKIPPED = 5
"""Steps that are not timed: shapes are inferred in the first, and kernels compiled and chosen."""
STEPS = 5
"""Steps that are."""

_KINDS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
}


class StageTimer:
    """Counts steps, and times the stages in some of them.

    Args:
        stages: of this rank.
        device: on which they compute.
    """

    def __init__(self, stages: Sequence[Any], device: torch.device) -> None:
        self._stages, self._device = stages, device
        self._steps = 0
        self._asked = False
        self._spans: dict[tuple[int, str], list[Callable[[], float]]] = {}
        self._before: dict[tuple[int, str], Callable[..., Any]] = {}  # what others have put on a stage

    @property
    def timed(self) -> bool:
        """Whether all steps that are timed are over."""
        return self._steps == SKIPPED + STEPS

    def end_step(self) -> None:
        """Count a step."""
        if self.timed:
            return
        self._steps += 1
        if self._steps == SKIPPED:
            for stage in self._stages:
                self._watch(stage)
        if self.timed:
            for stage in self._stages:
                self._restore(stage)

    def is_due(self) -> bool:
        """Whether there are times that were not asked for yet. Reading them waits for the device."""
        due, self._asked = self.timed and not self._asked, self.timed
        return due

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
                # A backward may come whole or in two halves, and their numbers differ by those in flight.
                entry[kind] = sum(spans) / max(len(forwards), 1)
            found.append(entry)
        return found

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


def write_measured(
    timer: StageTimer, config: Trainer.Config, dims: ParallelDims, warn: Callable[[str], None]
) -> None:
    """Gather the times of all stages and write them. A collective of each pipeline; rank 0 writes its own.

    What cannot be written is warned of, and missing.
    """
    group = dims.get_mesh("pp").get_group()
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, timer.seconds(), group=group)
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
        warn(f"cannot write the stages' times to {file}: {error.strerror}; training goes on")


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
