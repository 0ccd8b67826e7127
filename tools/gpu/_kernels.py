"""One GPU, one process: the cost of waiting kernels, calls that wait for them, and `StreamClock`.

`ncclRecv` is a kernel that spins until its message arrives. The kernel below does the same, with a timeout,
because the host may be blocked in a call that waits for it.
"""

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from _checks import DIFFERS, NOTED, OK, WRONG, Place, Row, not_checked

__all__ = [
    "CALLS", "calibrate", "clock", "device", "gemm", "judge_calibrate", "judge_call", "judge_clock",
    "judge_device", "judge_gemm", "waiting_call",
]  # fmt: skip

_SOURCE = r"""
__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
extern "C" __global__ void __launch_bounds__(640, 1) wait_for(volatile int* flag, int milliseconds) {
  if (threadIdx.x == 0) {
    unsigned long long end = nanoseconds() + milliseconds * 1000000ull;
    while (*flag == 0 && nanoseconds() < end) __nanosleep(100);
  }
  __syncthreads();
}
"""
_SHARED_BYTES = 96 * 1024
"""Shared memory of a waiting block, which leaves no room for a block of a large matrix product."""


class Waiting:
    """Blocks that wait like those of an `ncclRecv`, on a separate stream, one per multiprocessor."""

    def __init__(self) -> None:
        # torch looks for CUDA's headers, which the source does not need, and fails if there are none.
        os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
        self._kernel: Any = torch.cuda._compile_kernel(_SOURCE, "wait_for")
        self._kernel.set_shared_memory_config(_SHARED_BYTES)
        self._flag = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._stream = torch.cuda.Stream()
        self.hold(1, 1000)
        self.release()

    def hold(self, blocks: int, milliseconds: int) -> None:
        """Starts `blocks` waiting blocks, which end after `milliseconds` at the latest."""
        self._flag.zero_()
        arguments = [self._flag, milliseconds]
        self._kernel((blocks, 1, 1), (640, 1, 1), arguments, _SHARED_BYTES, self._stream)
        time.sleep(0.05)

    def still_wait(self) -> bool:
        return not self._stream.query()

    def release(self) -> None:
        self._flag.fill_(1)
        self._stream.synchronize()


def device(place: Place) -> Iterator[tuple[str, str]]:
    """The devices and versions."""
    if place.gpus:
        properties = torch.cuda.get_device_properties(0)
        found = f"{place.gpus} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
        found += f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    else:
        found = f"CPU, {os.cpu_count()} cores"
    yield "device", f"{found}, torch {torch.__version__}"


def judge_device(name: str, values: list[Any], place: Place) -> Row:
    return Row(name, "-", values[0], NOTED)


def calibrate(place: Place) -> Iterator[tuple[str, Any]]:
    """Results of `titan-async calibrate` in bfloat16, and the errors of its fit."""
    try:
        from titan_async.planning.device_timing import profile_device
    except ImportError as error:  # it needs other packages than torch
        yield "calibration", f"{type(error).__name__}: {error}"
        return
    profile = profile_device("cuda")
    found, moved = profile.bfloat16, profile.elementwise.bandwidth
    rates = found.rates
    yield "calibration", [
        found.product_error.worst, found.attention_error.worst,
        *(rate / 1e12 for rate in (rates.products, rates.attention, rates.operands, moved)),
    ]  # fmt: skip


def judge_calibrate(name: str, values: list[Any], place: Place) -> Row:
    if isinstance(values[0], str):
        return not_checked(name, values[0])
    of_products, of_attention, products, attention, operands, moved = values[0]
    found = (
        f"{of_products:.2f} and {of_attention:.2f}; products {products:.0f} TFLOP/s and {operands:.2f} TB/s, "
    )
    found += f"attention {attention:.0f} TFLOP/s, memory {moved:.2f} TB/s"
    verdict = OK if of_products <= 1.5 and of_attention <= 1.3 else DIFFERS
    return Row(
        name, "fitted seconds within a factor of 1.5 for products and 1.3 for attention", found, verdict
    )


def gemm(place: Place) -> Iterator[tuple[str, Any]]:
    """Slowdown of a matrix product while other blocks wait."""
    try:
        waiting = Waiting()
    except Exception as error:
        yield "GEMM beside waiting blocks", f"{type(error).__name__}: {error}"[:200]
        return
    for m, k, n in [(8192, 2048, 8192), (8192, 2048, 2048)]:
        a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))

        def seconds(a: torch.Tensor = a, b: torch.Tensor = b) -> float:
            for _ in range(5):
                a @ b
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(50):
                a @ b
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 50e3

        losses = {}
        for blocks in (2, 4, 8, 16, 32, 48):
            alone = seconds()
            waiting.hold(blocks, 10_000)
            losses[blocks] = 1 - alone / seconds()
            waiting.release()
        processors = torch.cuda.get_device_properties("cuda").multi_processor_count
        rate = 2 * m * k * n / alone / 1e12
        yield f"GEMM {m}x{k}x{n} beside waiting blocks", [processors, rate, losses]


def judge_gemm(name: str, values: list[Any], place: Place) -> Row:
    if isinstance(values[0], str):
        return not_checked(name, values[0])
    processors, rate, losses = values[0]
    found = ", ".join(f"{blocks}: {loss:.1%}" for blocks, loss in losses.items())
    found = f"of {rate:.0f} TFLOP/s, {found} ({processors} multiprocessors)"
    as_estimated = max(losses["2"], losses["4"]) < 0.05 and 0.12 <= losses["16"] <= 0.25
    # The estimate is that of an H100 or H200.
    verdict = NOTED if processors < 114 or processors > 144 else OK if as_estimated else DIFFERS
    return Row(name, "2 and 4 cost under 5 %, 16 cost 12 to 25 %", found, verdict)


def _first_use() -> None:
    torch.tril(torch.ones(8, 8, device="cuda"))


def _first_matmul() -> None:
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")


def _compile() -> None:
    torch.compile(lambda x: (x.sin() * x.cos()).sum())(torch.ones(4096, 512, device="cuda"))


CALLS: list[tuple[str, str, bool | None, Any]] = [
    ("cuda.synchronize", "LAZY", True, torch.cuda.synchronize),
    ("first use of a kernel", "LAZY", True, _first_use),
    ("first use of a kernel", "EAGER", False, _first_use),
    ("first matmul", "LAZY", None, _first_matmul),
    ("first matmul", "EAGER", None, _first_matmul),
    ("cudaMalloc", "LAZY", None, lambda: torch.empty(2**28, dtype=torch.uint8, device="cuda")),
    ("empty_cache", "LAZY", None, torch.cuda.empty_cache),
    ("pinned memory", "LAZY", None, lambda: torch.empty(2**26, dtype=torch.uint8, pin_memory=True)),
    ("a new stream", "LAZY", False, torch.cuda.Stream),
    ("a tensor to the device", "LAZY", False, lambda: torch.tensor([1.0], device="cuda")),
    ("torch.compile", "LAZY", None, _compile),
]
"""Name, CUDA_MODULE_LOADING, whether the call should wait for a waiting kernel (None: unknown), function."""


def waiting_call(place: Place) -> Iterator[tuple[str, Any]]:
    """Whether a call, one per process, returns while blocks wait."""
    name, mode, expected, call = CALLS[place.rank]
    os.environ["CUDA_MODULE_LOADING"] = mode
    torch.cuda.set_device(place.device)
    cached = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    del cached  # empty_cache then has something to free
    name = f"{name} ({mode.lower()} loading)"
    try:
        waiting = Waiting()
        torch.cuda.synchronize()
        waiting.hold(16, 60_000 if call is _compile else 4000)  # longer than compilation
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
    except Exception as error:  # such as a missing compiler
        yield name, f"{type(error).__name__}: {error}"[:200]
        return
    yield name, [expected, not waiting.still_wait(), seconds]
    waiting.release()


def judge_call(name: str, values: list[Any], place: Place) -> Row:
    if isinstance(values[0], str):
        return not_checked(name, values[0])
    expected, waits, seconds = values[0]
    shown = {True: "waits", False: "does not wait", None: "-"}
    # If even `synchronize` does not wait for the kernel, the other calls show nothing.
    worst = WRONG if name.startswith("cuda.synchronize") else DIFFERS
    verdict = NOTED if expected is None else OK if waits == expected else worst
    return Row(name, shown[expected], f"{shown[waits]} ({seconds:.2f} s)", verdict)


def clock(place: Place) -> Iterator[tuple[str, Any]]:
    """`StreamClock` against CUDA's own events, across a change of its origin."""
    from titan_async.monitor.recorder import StreamClock

    device = torch.device(place.device)
    torch.cuda.set_device(device)
    clock = StreamClock(device)
    marks, events, host = [], [], []
    for _ in range(12):
        torch.cuda._sleep(600_000_000)  # about 0.3 s, in total more than 2 s
        start = time.perf_counter()
        marks.append(clock.mark())
        host.append(time.perf_counter() - start)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    unknown = clock.nanoseconds(marks[-1]) is None
    torch.cuda.synchronize()
    now = time.time_ns()
    resolved = [clock.nanoseconds(mark) for mark in marks]
    passed = [events[0].elapsed_time(event) * 1e6 for event in events]
    errors = [abs(t - resolved[0] - p) / 1e3 for t, p in zip(resolved, passed, strict=True)]
    yield (
        "StreamClock beside CUDA events",
        [max(errors), abs(resolved[-1] - now) / 1e3, statistics.median(host), unknown],
    )


def judge_clock(name: str, values: list[Any], place: Place) -> Row:
    error, offset, mark, unknown = values[0]
    right = error < 100 and offset < 20_000 and mark < 1e-3 and unknown
    found = f"{error:.0f} us apart; {offset:.0f} us from the host's clock; a mark takes {mark * 1e6:.0f} us"
    if not unknown:
        found += "; a mark in the future was resolved"
    expected = "within 100 us of events, 20 ms of the host's clock; does not wait"
    return Row(name, expected, found, OK if right else WRONG)
