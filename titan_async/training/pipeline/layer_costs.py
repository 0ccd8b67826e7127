"""Measures the cost of each part of a decoder on a pipeline stage, with one layer in memory at a time."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile

from titan_async.training.pipeline.model_parts import PartMaker, alike_layers

__all__ = ["Costs", "PartTimer", "measure_costs"]

_WARM_UPS = 3
_REPETITIONS = 7
_STEPS = 3
"""Steps timed together, so that the host launches one while the GPU computes the previous, as in training."""


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of forward and backward of a microbatch, for each part of a decoder."""

    embedding: int
    layers: tuple[int, ...]
    head: int
    """The last norm, the output projection and the loss."""


@dataclass(frozen=True, kw_only=True)
class PartTimer(PartMaker):
    """Times parts of a model in this process alone, compiled as in the run."""

    parallel_dims: ParallelDims
    compile_config: CompileConfig

    def time(self, *modules: str) -> int:
        """Nanoseconds of forward and backward of a microbatch [microbatch size, sequence].

        Args:
            *modules: the modules' names: "tok_embeddings", "layers.0", ..., "norm", "lm_head".
        """
        part = self._build(list(modules))
        try:
            return _median_time(self._step_of(part), self.device)
        finally:
            del part
            gc.collect()  # torchtitan has turned the automatic collection off
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()

    def _build(self, modules: list[str]) -> nn.Module:
        part = self.make(modules)
        if self.compile_config.enable and "model" in self.compile_config.components:
            apply_compile(part, compile_config=self.compile_config, parallel_dims=self.parallel_dims)
        self.materialize(part)
        with torch.no_grad():
            # Uninitialized memory may hold values that are slow to compute with.
            part.init_weights()
        self.cast(part)
        return part.train()

    def _step_of(self, part: nn.Module) -> Callable[[], None]:
        inputs = self.inputs(part)
        gradient = inputs.output_gradient

        def step() -> None:
            _, end = inputs.forward(part, inputs.start(part))
            end.backward(gradient)

        return step


def measure_costs(timer: PartTimer) -> Costs:
    """Time the embedding, one layer of each kind, and the head; takes some seconds.

    Preserves the random state, so that training starts from the same weights as without it.
    """
    with torch.random.fork_rng(
        devices=[] if timer.device.type == "cpu" else [timer.device], device_type=timer.device.type
    ):
        costs = Costs(
            embedding=timer.time("tok_embeddings"),
            layers=_layer_times(timer),
            head=timer.time("norm", "lm_head"),
        )
    if timer.compile_config.enable:
        torch.compiler.reset()  # else the run's own layers would count as recompilations
    return costs


def _layer_times(timer: PartTimer) -> tuple[int, ...]:
    alike = alike_layers(timer.model_config.layers)
    times = {index: timer.time(f"layers.{index}") for index in dict.fromkeys(alike)}
    return tuple(times[index] for index in alike)


def _median_time(step: Callable[[], None], device: torch.device) -> int:
    for _ in range(_WARM_UPS):
        step()
    times = []
    for _ in range(_REPETITIONS):
        _synchronize(device)
        start = time.perf_counter_ns()
        for _ in range(_STEPS):
            step()
        _synchronize(device)
        times.append((time.perf_counter_ns() - start) // _STEPS)
    return statistics.median_low(times)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
