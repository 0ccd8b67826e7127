"""FLOPs and bytes of a model's parts, traced on fake tensors.

A part is the embedding, one layer, or the head: the last norm, the output projection and the loss. Its
forward and backward run once on fake tensors, which have shapes and no memory, with the run's activation
checkpointing.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config.override import apply_overrides
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.trainer import Trainer

from titan_async.planning import trace_overrides
from titan_async.planning._torch_internals import FLOP_FORMULAS, FakeTensorMode, input_backward
from titan_async.planning.layout import microbatch_size_of
from titan_async.planning.storage_tracker import StorageTracker
from titan_async.training.models import cpu_overrides
from titan_async.training.models.tying import EMBEDDING, HEAD, is_tied, untied
from titan_async.training.pipeline.model_parts import PartInputs, PartMaker, alike_layers

__all__ = ["Part", "Weight", "deduplicated", "trace_parts"]

# Shapes: B microbatch size, L sequence, D model, K experts of a token


@dataclass(frozen=True)
class Weight:
    """A parameter of the model."""

    name: str
    """Fully qualified, as in a checkpoint."""
    shape: tuple[int, ...]
    expert: bool
    """Whether expert parallelism shards it, along the first dimension."""
    unit: str
    """The FSDP unit that it belongs to."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Cost of one part. FLOPs and bytes are those of one microbatch, without tensor parallelism.

    With a chunked loss (`ChunkedLossWrapper`), FLOPs and `passed_bytes` are those of all chunks together, and
    the other bytes those of one chunk. Tokens are assumed to be distributed evenly over experts. On
    accelerators causal attention counts half of its matrix, because kernels skip the other half.
    """

    name: str
    """"tok_embeddings", "layers.0", ..., "head"."""
    weights: tuple[Weight, ...]
    active: int
    """Active parameters per token: of the routed experts, the chosen ones. An embedding counts fully."""
    forward_flops: float
    attention_flops: float
    """Part of `forward_flops`: attention's scores and their product with the values."""
    input_flops: float
    """Of the gradient of the input: equal to `forward_flops` for matrix products, more for attention."""
    weight_flops: float
    """Of the gradients of the weights."""
    recompute_flops: float
    """Of the recomputation of activation checkpointing."""
    passed_bytes: int
    """Bytes that its forward would save without activation checkpointing: approximately those that its
    elementwise operations write, or read once."""
    saved_bytes: int
    """Bytes that the forward saves for the backward, including its output, excluding its input."""
    forward_peak: int
    """Peak bytes of the forward, relative to before it."""
    backward_peak: int
    """Peak bytes of a backward that accumulates into gradients, relative to before the forward."""
    first_backward_peak: int
    """The same for a backward that allocates the gradients, which are included."""
    input_peak: int
    """Peak bytes of the input half of a split backward."""
    between_bytes: int
    """Bytes held between the two halves of a split backward."""
    unused_bytes: int
    """Of the output, if the backward does not need it: schedules keep logits, a single stage does not."""
    gradient_bytes: int
    """Of its parameters' gradients in the compute dtype."""
    message_bytes: int
    """Of a microbatch's hidden state [B, L, D], the input of the next part."""
    mask_bytes: int
    """Of a microbatch's attention mask; a batch's masks are created at its start. 0 on accelerators, where it
    is small."""
    chunked: bool
    """Whether it is a head with a chunked loss, whose backward runs in its forward."""
    dispatched_bytes: int
    """Of the tokens dispatched to experts. Expert-parallel ranks exchange them twice in the forward (dispatch
    and combine) and twice in the backward, except for a rank's own share of 1/ep."""

    @property
    def dense(self) -> int:
        """Parameters that expert parallelism does not shard."""
        return sum(weight.size for weight in self.weights if not weight.expert)

    @property
    def experts(self) -> int:
        """Parameters that expert parallelism shards."""
        return sum(weight.size for weight in self.weights if weight.expert)


def trace_parts(config: Trainer.Config, *, on_cpu: bool = False) -> dict[str, Part]:
    """The parts of a configuration's model, by name, in the model's order.

    Args:
        config: resolved; not changed. Its degrees of parallelism are ignored.
        on_cpu: whether to trace the modules that run on a CPU, with other attention and experts.

    Raises:
        ValueError: if torchtitan refuses the model.
    """
    config = _without_parallelism(config)
    tied = is_tied(config.model_spec.model)
    if tied:
        config.model_spec = dataclasses.replace(config.model_spec, model=untied(config.model_spec.model))
    names = trace_overrides.overrides_of(config, on_cpu)
    if on_cpu:
        names += [name for name in cpu_overrides.override_imports(config) if "loop_experts" not in name]
    config.override = dataclasses.replace(config.override, imports=[*config.override.imports, *names])
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    with torch.device("meta"):
        model = spec.model.build()
    maker = PartMaker(
        model=model,
        model_config=spec.model,
        device=torch.device("cpu"),
        training=config.training,
        parallelism=config.parallelism,
        ac_config=config.activation_checkpoint,
        dump_folder="",
        loss_fn=config.loss.build(compile_config=config.compile),
    )
    units = _weights_of(model, tied)
    alike = alike_layers(spec.model.layers)
    parts: dict[str, Part] = {}
    for name in ["tok_embeddings", *(f"layers.{index}" for index in range(len(alike))), "head"]:
        kind, _, index = name.partition(".")
        first = f"layers.{alike[int(index)]}" if kind == "layers" else name
        traced = parts[first] if first in parts else _trace(maker, first, on_cpu)
        parts[name] = dataclasses.replace(traced, name=name, weights=units[name])
    return parts


def _without_parallelism(config: Trainer.Config) -> Any:
    """A copy without parallelism, with the microbatch size of a stage."""
    config = copy.deepcopy(config)
    parallelism = config.parallelism
    parallelism.pipeline_parallel_microbatch_size = microbatch_size_of(config)
    for degree in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "expert_parallel"):
        setattr(parallelism, f"{degree}_degree", 1)
    config.compile = dataclasses.replace(config.compile, enable=False, enable_async_tensor_parallel=False)
    return config


def deduplicated(parts: Iterable[Part]) -> list[Part]:
    """The parts of one stage, or of a whole model, with tied weights only in the first part that has them."""
    seen: set[str] = set()
    unique = []
    for part in parts:
        own = tuple(weight for weight in part.weights if weight.name not in seen)
        repeated = sum(weight.size for weight in part.weights) - sum(weight.size for weight in own)
        unique.append(dataclasses.replace(part, weights=own, active=part.active - repeated))
        seen |= {weight.name for weight in own}
    return unique


def _weights_of(model: nn.Module, tied: bool) -> dict[str, tuple[Weight, ...]]:
    """The weights of each part, which is one FSDP unit of torchtitan. A tied weight is in two parts."""
    experts = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, GroupedExperts)
        for parameter in module.parameters()
    }
    found: dict[str, list[Weight]] = {}
    for name, parameter in model.named_parameters():
        top, _, rest = name.partition(".")
        part = f"layers.{rest.partition('.')[0]}" if top == "layers" else top
        part = "head" if part in ("norm", "lm_head") else part
        name = EMBEDDING if tied and name == HEAD else name
        weight = Weight(name, tuple(parameter.shape), expert=id(parameter) in experts, unit=part)
        found.setdefault(part, []).append(weight)
    return {part: tuple(weights) for part, weights in found.items()}


def _trace(maker: PartMaker, name: str, on_cpu: bool) -> Part:
    modules = ["norm", "lm_head"] if name == "head" else [name]
    chunked = isinstance(maker.loss_fn, ChunkedLossWrapper)
    whole = dataclasses.replace(maker, loss_fn=maker.loss_fn.loss_fn) if chunked else maker
    plain = dataclasses.replace(whole, ac_config=None)
    flops = _flops_of(whole, modules, halve_attention=not on_cpu)
    without = _flops_of(plain, modules, halve_attention=not on_cpu) if maker.ac_config else flops
    part = maker.make(modules)
    tokens = maker.parallelism.pipeline_parallel_microbatch_size * maker.training.seq_len
    message = tokens * maker.model_config.dim * maker.dtype.itemsize
    moes = [module for module in part.modules() if isinstance(module, MoE)]
    active = sum(parameter.numel() for parameter in part.parameters())
    for moe in moes:
        idle = 1 - moe.router.top_k / moe.router.num_experts
        active -= round(idle * sum(p.numel() for p in moe.routed_experts.parameters()))
    return Part(
        name=name,
        weights=(),
        active=active,
        forward_flops=without.forward,
        attention_flops=without.attention,
        input_flops=without.backward - without.weights,
        weight_flops=without.weights,
        recompute_flops=flops.backward - without.backward,
        message_bytes=message,
        dispatched_bytes=sum(message * moe.router.top_k for moe in moes),
        passed_bytes=_passed_bytes(plain, modules),
        chunked=chunked and name == "head",
        **_bytes_of(maker, modules, masked=on_cpu),
    )


@contextmanager
def _fake() -> Iterator[None]:
    # Initial values do not matter, and the RNG state is restored.
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _filled(maker: PartMaker, part: nn.Module) -> tuple[nn.Module, PartInputs]:
    maker.materialize(part)
    maker.cast(part)
    return part.train(), maker.inputs(part)


@dataclass(frozen=True)
class _Flops:
    forward: float
    attention: float
    backward: float
    weights: float


def _flops_of(maker: PartMaker, modules: list[str], *, halve_attention: bool) -> _Flops:
    counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
    part = maker.make(modules)
    with _fake():
        part, inputs = _filled(maker, part)
        with counter:
            _, end = inputs.forward(part, inputs.start(part))
        forward, attention = _split(counter, halve_attention)
        with counter:
            end.backward(inputs.output_gradient)
        backward, _ = _split(counter, halve_attention)
    # The gradient of a weight is a matrix product of the same size as the weight's own.
    products = forward - attention if any(True for _ in part.parameters()) else 0.0
    return _Flops(forward, attention, backward, products)


def _split(counter: FlopCounterMode, halve_attention: bool) -> tuple[float, float]:
    total = attention = 0.0
    for operator, count in counter.get_flop_counts().get("Global", {}).items():
        if "attention" in str(operator):
            count = count / 2 if halve_attention else count
            attention += count
        total += count
    return total, attention


def _passed_bytes(plain: PartMaker, modules: list[str]) -> int:
    part = plain.make(modules)
    with _fake(), StorageTracker() as tracker:
        part, inputs = _filled(plain, part)
        start = inputs.start(part)
        before = tracker.live
        kept = inputs.forward(part, start)
        passed = tracker.live - before
        del kept
    return passed


def _bytes_of(maker: PartMaker, modules: list[str], *, masked: bool) -> dict[str, int]:
    part = maker.make(modules)
    with _fake(), StorageTracker() as tracker:
        part, inputs = _filled(maker, part)
        mask = inputs.keywords.get("attention_masks")
        mask_bytes = mask.untyped_storage().nbytes() if masked and isinstance(mask, torch.Tensor) else 0
        peaks = []
        for _ in range(2):  # gradients exist in the second backward
            start = inputs.start(part)
            before = tracker.live
            tracker.reset_peak()
            output, end = inputs.forward(part, start)  # a schedule holds both
            saved, forward_peak = tracker.live - before, tracker.peak - before
            tracker.reset_peak()
            end.backward(inputs.output_gradient)
            peaks.append(tracker.peak - before)
            del output, end, start
        output, end = inputs.forward(part, inputs.start(part))
        unused = tracker.live
        del output
        unused -= tracker.live
        del end
        gradients = tracker.bytes_of([p.grad for p in part.parameters() if p.grad is not None])
        input_peak = between = 0
        if part.tok_embeddings is None:  # otherwise the input has no gradient
            start = inputs.start(part)
            before = tracker.live
            output, end = inputs.forward(part, start)
            tracker.reset_peak()
            kept = input_backward(end, inputs.output_gradient, start, part)
            input_peak = tracker.peak - before
            start.grad = None  # sent to the previous part
            del output, end, start
            between = tracker.live - before
            del kept
    return {
        "saved_bytes": saved,
        "forward_peak": forward_peak,
        "backward_peak": peaks[1],
        "first_backward_peak": peaks[0],
        "input_peak": input_peak,
        "between_bytes": between,
        "unused_bytes": unused,
        "gradient_bytes": gradients,
        "mask_bytes": mask_bytes,
    }
