"""Measures the rates of a device for plans: matrix products, attention and memory traffic.

Uses torch only, on one device, for about a minute: medians of repeats, after warm-ups. On CUDA, times are
between two events. On a CPU, they are the CPU time of one thread, because each rank has one thread there
(`titan_async.cli.launch`), and other processes should not count.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from titan_async.errors import UserError
from titan_async.planning.device_profile import (
    AttentionTiming,
    Device,
    DeviceProfile,
    Elementwise,
    FitError,
    OfDtype,
    ProductTiming,
)
from titan_async.planning.hardware import Rates
from titan_async.planning.message_timing import time_messages
from titan_async.planning.rate_fit import fit_attention, fit_products
from titan_async.planning.storage_tracker import StorageTracker

__all__ = ["Sizes", "profile_device"]

_REPEATS = 5
_SAMPLE = 0.02
"""Minimal seconds of a repeat, which has several calls."""
_MAX_CALLS = 2000
_LONGEST = 0.25
"""Seconds of a call above which a shape is skipped, on devices that are slow in a dtype."""
_WARM = 3.0
"""Seconds of warm-up on a GPU, whose clock drops under load."""
_MIN_TIMINGS = 3
_LAYERS = 8
"""Layers whose elementwise operations are timed together: first use of memory takes time on a CPU."""

# Shapes: T tokens, D width


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes to measure on a kind of device."""

    products: Sequence[tuple[int, int, int]]
    """m, n, k; by increasing number of operations."""
    grouped: Sequence[tuple[int, int, int, int]]
    """Number of products of a grouped product, and m, n, k of each: experts with few rows."""
    heads: int
    head_size: int
    tokens: int
    """Tokens of all sequences of one attention call, unless a single sequence is longer."""
    seq_lens: Sequence[int]
    elementwise: int
    """Elements of each of the tensors that are added."""
    touched: int
    """Bytes of the matrices that products cycle through, so that caches are as cold as in training."""


SIZES = {
    "cpu": Sizes(
        products=(
            *((m, 1024, 1024) for m in (8, 16, 64)),
            *((512, n, k) for n, k in ((192, 192), (512, 192), (192, 512), (2048, 192))),
            (256, 1024, 1024), (2048, 2048, 64), (1024, 1024, 1024), (2048, 2048, 256), (4096, 1024, 1024),
        ),
        grouped=((8, 16, 256, 256), (8, 64, 256, 256), (8, 256, 512, 256)),
        heads=4,
        head_size=64,
        tokens=1024,
        seq_lens=(256, 512, 1024, 2048),
        elementwise=2**22,
        touched=2**26,
    ),
    "cuda": Sizes(
        products=(
            *((m, 4096, 4096) for m in (64, 128, 256, 512)),
            (8192, 4096, 64), (8192, 4096, 256), (1024, 4096, 4096), (2048, 2048, 2048), (8192, 2048, 2048),
            (2048, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 4096), (8192, 14336, 4096),
            (8192, 8192, 8192),
        ),
        grouped=((64, 16, 1408, 2048), (64, 64, 1408, 2048), (64, 256, 1408, 2048), (64, 1024, 1408, 2048)),
        heads=16,
        head_size=128,
        tokens=16384,
        seq_lens=(512, 1024, 2048, 4096, 8192),
        elementwise=2**27,
        touched=2**28,
    ),
}  # fmt: skip


def profile_device(kind: str, log: Callable[[str], None] = lambda line: None) -> DeviceProfile:
    """Measure the current GPU, or one CPU core and messages between two processes.

    Args:
        kind: "cuda" or "cpu".
        log: called with a line before each measurement.

    Raises:
        UserError: if the device has too little free memory, or messages between processes fail.
    """
    device, sizes = torch.device(kind), SIZES[kind]
    with _one_thread():
        try:
            if kind == "cuda":
                log("warming up")
                _warm_up(device)
            dtypes = {}
            for dtype in (torch.float32, torch.bfloat16):
                name = str(dtype).removeprefix("torch.")
                log(f"products and attention in {name}")
                dtypes[name] = _profile_dtype(device, dtype, sizes)
            log("elementwise operations")
            elementwise = _profile_elementwise(device, sizes)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{_describe(device).name} has too little free memory to calibrate: end other processes on it"
            ) from error
    link = None
    if kind == "cpu":
        log("messages between two processes")
        link = time_messages()
    return DeviceProfile(
        torch=torch.__version__, device=_describe(device), elementwise=elementwise, link=link, **dtypes
    )


def _profile_dtype(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> OfDtype:
    products = list(_time_products(device, dtype, sizes))
    attention = list(_time_attention(device, dtype, sizes))
    shapes = [(timing.m, timing.n, timing.k) for timing in products]
    of_products = fit_products(shapes, dtype.itemsize, [timing.seconds for timing in products])
    of_attention = fit_attention(
        [timing.seq_len for timing in attention],
        [timing.operations for timing in attention],
        [timing.seconds for timing in attention],
    )
    operation, moved = of_products.costs
    attended, first = of_attention.costs
    return OfDtype(
        rates=Rates(
            products=1 / operation,
            operands=1 / moved,
            attention=1 / attended,
            attention_ramp=first / attended,
        ),
        fastest_product=max(2 * t.m * t.n * t.k / t.seconds for t in products),
        product_error=FitError(mean=of_products.mean_error, worst=of_products.worst_error),
        attention_error=FitError(mean=of_attention.mean_error, worst=of_attention.worst_error),
        products=[replace(t, fitted_seconds=s) for t, s in zip(products, of_products.seconds, strict=True)],
        attention=[
            replace(t, fitted_seconds=s) for t, s in zip(attention, of_attention.seconds, strict=True)
        ],
    )


def _time_products(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[ProductTiming]:
    slowest = 0.0  # seconds per operation, of the previous shape
    for index, (m, n, k) in enumerate(sizes.products):
        operations = 2 * m * n * k
        if index >= _MIN_TIMINGS and operations * slowest > _LONGEST:
            break
        x = torch.randn(m, k, device=device, dtype=dtype)
        count = max(min(sizes.touched // (n * k * dtype.itemsize), 64), 1)
        weights = torch.randn(count, n, k, device=device, dtype=dtype)
        seconds = _median(
            device, lambda call, x=x, weights=weights: F.linear(x, weights[call % len(weights)])
        )
        slowest = seconds / operations
        yield ProductTiming(m=m, n=n, k=k, groups=1, seconds=seconds, fitted_seconds=seconds)
    for groups, m, n, k in sizes.grouped:
        if groups * 2 * m * n * k * slowest > _LONGEST:
            return
        x = torch.randn(groups * m, k, device=device, dtype=dtype)
        weights = torch.randn(groups, n, k, device=device, dtype=dtype)
        together = _grouped(device, dtype, x, weights)
        if together is None:
            return
        seconds = _median(device, together) / groups
        yield ProductTiming(m=m, n=n, k=k, groups=groups, seconds=seconds, fitted_seconds=seconds)


def _grouped(
    device: torch.device, dtype: torch.dtype, x: torch.Tensor, weights: torch.Tensor
) -> Callable[[int], object] | None:
    """Grouped products as experts use them on the device; None if torch has no kernel for them there."""
    groups = len(weights)
    if device.type == "cpu":
        rows = x.view(groups, -1, x.shape[-1])
        return lambda call: [F.linear(own, weight) for own, weight in zip(rows, weights, strict=True)]
    if dtype != torch.bfloat16:
        return None
    ends = torch.arange(1, groups + 1, device=x.device, dtype=torch.int32) * (len(x) // groups)
    matrices = weights.transpose(-2, -1)
    try:
        F.grouped_mm(x, matrices, offs=ends)
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None
    return lambda call: F.grouped_mm(x, matrices, offs=ends)


def _time_attention(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[AttentionTiming]:
    slowest = 0.0
    for count, length in enumerate(sizes.seq_lens):
        batch = max(sizes.tokens // length, 1)
        # A forward has two products of the scores' size, a backward five. Accelerators skip half of the
        # scores, which is not counted; on a CPU the mask is dense, as for packed documents.
        operations = 14.0 * batch * sizes.heads * length**2 * sizes.head_size
        operations /= 1 if device.type == "cpu" else 2
        if count >= 2 and operations * slowest > _LONGEST:
            return
        shape = (batch, sizes.heads, length, sizes.head_size)
        q, k, v, gradient = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
        mask = None
        if device.type == "cpu":
            mask = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, -1, -1)

        def attend(call: int, inputs: list = inputs, mask=mask, gradient=gradient) -> object:  # type: ignore[no-untyped-def]
            out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None)
            return torch.autograd.grad(out, inputs, gradient)

        seconds = _median(device, attend)
        slowest = seconds / operations
        yield AttentionTiming(
            batch=batch,
            heads=sizes.heads,
            head_size=sizes.head_size,
            seq_len=length,
            operations=operations,
            seconds=seconds,
            fitted_seconds=seconds,
        )


def _profile_elementwise(device: torch.device, sizes: Sizes) -> Elementwise:
    a, b, out = (torch.rand(sizes.elementwise, device=device) for _ in range(3))
    seconds = _median(device, lambda call: torch.add(a, b, out=out))
    bandwidth = 3 * a.nbytes / seconds
    if device.type != "cpu":
        return Elementwise(bandwidth=bandwidth, forward_passes=None, backward_passes=None)
    forward, backward, saved = _time_layer()
    return Elementwise(
        bandwidth=bandwidth,
        forward_passes=forward * bandwidth / saved,
        backward_passes=backward * bandwidth / saved,
    )


def _time_layer(tokens: int = 512, width: int = 256) -> tuple[float, float, int]:
    """Seconds of the forward and the backward of a Llama layer's elementwise operations, unfused as on a CPU,
    and their saved bytes, including the inputs that matrix products have computed."""
    x, attended, fed, q, k = (torch.randn(tokens, width, requires_grad=True) for _ in range(5))
    gate, up = (torch.randn(tokens, 8 * width // 3, requires_grad=True) for _ in range(2))
    scale = torch.ones(width, requires_grad=True)
    angles = torch.randn(tokens, width // 2, dtype=torch.complex64)
    read = [attended, fed, q, k, gate, up]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (width,), scale)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.view(tokens, -1, 2)) * angles)

    def forward() -> list[torch.Tensor]:
        hidden = x + attended
        return [norm(x), rotate(q), rotate(k), norm(hidden), F.silu(gate) * up, hidden + fed]

    with StorageTracker() as tracker:
        outputs = forward()
    saved = tracker.live + sum(tensor.nbytes for tensor in read)
    inputs, gradients = [x, *read, scale], [torch.randn_like(output) for output in outputs]
    device = torch.device("cpu")

    def forwards(call: int) -> list[list[torch.Tensor]]:  # holds all outputs, as until their backwards
        return [forward() for _ in range(_LAYERS)]

    def both(call: int) -> None:
        for own in forwards(call):
            torch.autograd.grad(own, inputs, gradients)

    alone, together = (_median(device, function) / _LAYERS for function in (forwards, both))
    return alone, max(together - alone, 0.1 * together), saved


def _median(device: torch.device, function: Callable[[int], object]) -> float:
    """Seconds per call, the median of repeats. `function` receives the index of the call."""
    for call in range(2):
        function(call)
    once = _elapsed(device, function, 1)
    calls = max(min(math.ceil(_SAMPLE / max(once, 1e-9)), _MAX_CALLS), 1)
    return statistics.median(_elapsed(device, function, calls) / calls for _ in range(_REPEATS))


def _elapsed(device: torch.device, function: Callable[[int], object], calls: int) -> float:
    if device.type == "cpu":
        begin = time.thread_time()
        for call in range(calls):
            function(call)
        return max(time.thread_time() - begin, 1e-9)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in range(calls):
        function(call)
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end) / 1e3, 1e-9)


def _warm_up(device: torch.device) -> None:
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    end = time.monotonic() + _WARM
    while time.monotonic() < end:
        for _ in range(100):
            a @ a
        torch.cuda.synchronize(device)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _describe(device: torch.device) -> Device:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return Device(
            kind="cuda", name=found.name, memory=found.total_memory, processors=found.multi_processor_count
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(kind="cpu", name=_cpu_name(), memory=memory, processors=cores)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "CPU"
