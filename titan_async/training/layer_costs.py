"""Training layer: what each part of a decoder costs on a pipeline stage, timed with one layer in memory.

A part is what torchtitan makes of a stage: the whole model without the modules that other stages hold.
"""

import copy
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder

from titan_async.training._titan_internals import keep_modules, leave_head_to

__all__ = ["Costs", "PartTimer", "measure_costs"]

_WARM_UPS = 3
_REPETITIONS = 7
_STEPS = 3
"""Steps timed together: a GPU then starts one while it computes the one before, as in training."""


@dataclass(frozen=True)
class Costs:
    """Nanoseconds that forward and backward of one microbatch take, for each part of a decoder."""

    embedding: int
    layers: tuple[int, ...]
    head: int
    """The last norm, the output projection and the loss."""


@dataclass(frozen=True, kw_only=True)
class PartTimer:
    """Times parts of a model on this process alone, as they compute in training.

    That is with activation checkpointing, compilation and the parameters' dtype of the run, but
    without the other parallelisms, which divide the work of every part.
    """

    model: nn.Module
    """A decoder on the meta device; not changed."""
    model_config: Decoder.Config
    device: torch.device
    training: TrainingConfig
    parallelism: ParallelismConfig
    parallel_dims: ParallelDims
    compile_config: CompileConfig
    ac_config: ActivationCheckpointingConfig
    dump_folder: str
    loss_fn: BaseLoss

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
        part = keep_modules(self.model, modules)
        if self.ac_config is not None:
            self.ac_config.build(dump_folder=self.dump_folder).apply(part)
        if self.compile_config.enable and "model" in self.compile_config.components:
            apply_compile(part, compile_config=self.compile_config, parallel_dims=self.parallel_dims)
        part.to_empty(device=self.device)
        with torch.no_grad():
            # Not for the values: what the memory happens to hold may be slow to compute with.
            part.init_weights()
        for parameter in part.parameters():
            parameter.data = parameter.data.to(self._dtype)
        return part.train()

    @property
    def _dtype(self) -> torch.dtype:
        return TORCH_DTYPE_MAP[self.training.mixed_precision_param]

    def _step_of(self, part: nn.Module) -> Callable[[], None]:
        shape = (self.parallelism.pipeline_parallel_microbatch_size, self.training.seq_len)
        tokens = torch.randint(self.model_config.vocab_size, shape, device=self.device)
        hidden = torch.randn(*shape, self.model_config.dim, dtype=self._dtype, device=self.device)
        grad = torch.randn_like(hidden)
        kwargs = self._attention_inputs(part, shape)
        loss_fn = self._loss_of(part) if part.lm_head is not None else None
        valid_tokens = torch.tensor(tokens.numel(), device=self.device)

        def step() -> None:
            inputs = hidden.detach().requires_grad_() if part.tok_embeddings is None else tokens
            output = part(inputs, **kwargs)
            if loss_fn is None:
                output.backward(grad)
            else:
                loss, _ = loss_fn(output, tokens, valid_tokens)
                loss.backward()

        return step

    def _attention_inputs(self, part: nn.Module, shape: tuple[int, int]) -> dict[str, Any]:
        positions = torch.arange(shape[1], device=self.device).repeat(shape[0], 1)
        inputs: dict[str, Any] = {"positions": positions}
        attention = getattr(self.model_config.first_attention, "inner_attention", None)
        if isinstance(attention, FlexAttention.Config | VarlenAttention.Config):
            inputs["attention_masks"] = part.get_attention_masks(positions=positions)
        return inputs

    def _loss_of(self, part: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
        if not isinstance(self.loss_fn, ChunkedLossWrapper):
            return self.loss_fn
        chunked = copy.copy(self.loss_fn)  # the run's own must not keep this head alive
        leave_head_to(chunked, part)
        return chunked


def measure_costs(timer: PartTimer) -> Costs:
    """Time the embedding, one layer of each kind, and the head; takes some seconds.

    The random state is left as it was, so that training starts from the same weights as without.
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
        torch.compiler.reset()  # the run's own layers shall not count as recompilations
    return costs


def _layer_times(timer: PartTimer) -> tuple[int, ...]:
    kinds: list[tuple[Any, int]] = []  # of layers that differ in more than their initial weights
    times = []
    for index, layer in enumerate(timer.model_config.layers):
        work = _work_of(layer)
        known = next((time for kind, time in kinds if kind == work), None)
        if known is None:
            known = timer.time(f"layers.{index}")
            kinds.append((work, known))
        times.append(known)
    return tuple(times)


def _work_of(config: Any) -> Any:
    """A module's configuration without its initial weights, which often depend on the depth, for `==`."""
    if dataclasses.is_dataclass(config):
        fields = [field.name for field in dataclasses.fields(config) if field.name != "param_init"]
        return type(config), [(name, _work_of(getattr(config, name))) for name in fields]
    if isinstance(config, list | tuple):
        return [_work_of(item) for item in config]
    return config


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
