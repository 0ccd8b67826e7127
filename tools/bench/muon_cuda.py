"""Compares titan_async.optim.Muon with other implementations on one GPU, in a minute or two.

    python tools/bench/muon_cuda.py [--only 8B,360M,MoE] [--repeats 10] [--json results.json]

Needs torch (2.11 or newer) and this checkout, which need not be installed; packages that are missing are left
out. All update the same float32 parameters with the same gradients, alternately; medians of the repetitions.
torch's fused AdamW is a lower bound: it multiplies no matrices. The error is that of the first update of one
matrix, relative to the same iterations in float64.
"""

import contextlib
import importlib.util
import io
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from _harness import Bench, Measured, median
from _muon_accuracy import STANDARD, Exact, relative_error

MODELS = ["8B", "360M", "MoE"]
LR = 1.0
BENCH = Bench(__doc__, repeats=10, quick="tiny matrices, to test the script", quick_repeats=10)
BENCH.add_argument("--device", default="cuda", help="cuda, or cpu to test the script")
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def shapes(model: str, quick: bool) -> list[tuple[int, ...]]:
    """The matrices of one layer of an 8B model, or of two of a 360M model, or 32 experts of one MoE layer."""
    if model == "MoE":
        found: list[tuple[int, ...]] = [(32, 768, 2048), (32, 2048, 768), (32, 768, 2048)]
    else:
        dim, kv, hidden, layers = {"8B": (4096, 1024, 14336, 1), "360M": (960, 320, 2560, 2)}[model]
        found = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (hidden, dim), (hidden, dim), (dim, hidden)]
        found = found * layers
    return [tuple(max(size // 32, 8) for size in shape) for shape in found] if quick else found


def _ours(**options: Any) -> Build:
    from titan_async.optim import Muon

    return lambda params: Muon(params, lr=LR, **options)


def _gram_newton_schulz(kernels: bool) -> Build:
    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        from gram_newton_schulz import Muon

        with contextlib.redirect_stdout(io.StringIO()):  # it prints how it chooses where to restart
            return Muon(params, lr=LR, adjust_lr=None, ns_coefficients=list(STANDARD), ns_use_kernels=kernels)

    return build


def _muonium(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from muonium import Muon

    return Muon(params, lr=LR, use_cautious_wd=False, orthogonalization_strategy="newton_schulz")


def competitors(cuda: bool) -> dict[str, tuple[Build, bool]]:
    """Build functions, and whether our kernels are disabled."""
    kernels = importlib.util.find_spec("quack") is not None
    found: dict[str, tuple[Build, bool]] = {
        "AdamW, fused": (lambda params: torch.optim.AdamW(params, lr=LR, fused=cuda), False),
        "torch.optim.Muon": (lambda params: torch.optim.Muon(params, lr=LR), False),
        "gram-newton-schulz": (_gram_newton_schulz(kernels=True), False),
        "gram-newton-schulz, no kernels": (_gram_newton_schulz(kernels=False), False),
        "muonium": (_muonium, False),
    }
    for dtype in ("bfloat16", "float16"):
        found[f"ours, {dtype}"] = _ours(compute_dtype=dtype), False
        if kernels:  # the extra of that name
            found[f"ours, {dtype}, no kernels"] = _ours(compute_dtype=dtype), True
    found["ours, bfloat16, error feedback"] = _ours(error_feedback=1.0), False
    found["ours, bfloat16, standard form"] = _ours(ns_form="standard"), False
    return found


class Tensors:
    """Parameters and gradients on the device, restored before each step."""

    def __init__(self, sizes: list[tuple[int, ...]], device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(shape: tuple[int, ...], std: float) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator) * std

        self.device = device
        self.params = [nn.Parameter(normal(shape, 0.02)) for shape in sizes]
        self.grads = [normal(shape, 1e-3) for shape in sizes]
        # The smallest matrix: its float64 reference is quick.
        self.probe = min(range(len(sizes)), key=lambda index: self.grads[index].numel())

    def restore(self) -> None:
        for param, grad in zip(self.params, self.grads, strict=True):
            param.data.zero_()  # the weights are then the update, without weight decay
            param.grad = grad.clone()  # some implementations write into it

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def memory(self, function: Callable[[], Any]) -> int:
        """Peak bytes that ``function`` allocates in addition to existing ones."""
        if self.device != "cuda":
            function()
            return 0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before

    def error(self, scaled: bool) -> float:
        update, grad = self.params[self.probe].data / -LR, self.grads[self.probe]
        rows, cols = update.shape[-2:]
        update = update / max(1.0, rows / cols) ** 0.5 if scaled else update
        first = (update[0], grad[0]) if update.ndim == 3 else (update, grad)
        return relative_error(first[0], Exact(first[1]).iterated(STANDARD))


def without_kernels(off: bool) -> contextlib.AbstractContextManager:
    if not off:
        return contextlib.nullcontext()
    from titan_async.optim import symmetric_matmul

    return mock.patch.object(symmetric_matmul, "_uses_kernels", return_value=False)


def measure(
    model: str, device: str, quick: bool, repeats: int, only: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Measures all competitors, or those named in `only`, alternately; returns a row for each."""
    tensors = Tensors(shapes(model, quick), device)
    rows: list[dict[str, Any]] = []
    running = []
    for name, (build, off) in competitors(device == "cuda").items():
        if only is not None and name not in only:
            continue
        row: dict[str, Any] = {"model": model, "name": name, "seconds": []}
        rows.append(row)
        try:
            with without_kernels(off):
                tensors.restore()
                start = time.perf_counter()
                optimizer = build(tensors.params)
                optimizer.step()
                tensors.wait()
                row["first_seconds"] = time.perf_counter() - start  # compilation included
                if "AdamW" not in name:
                    row["error"] = tensors.error(scaled="gram-newton-schulz" not in name)
                for _ in range(2):
                    tensors.restore()
                    row["extra"] = tensors.memory(optimizer.step)
        except Exception as error:  # reported as a refusal
            row["refusal"] = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:90]}"
            continue
        running.append((row, optimizer, off))
    for _ in range(repeats):
        for row, optimizer, off in running:
            with without_kernels(off):
                tensors.restore()
                tensors.wait()
                start = time.perf_counter()
                optimizer.step()
                tensors.wait()
                row["seconds"].append(time.perf_counter() - start)
    return rows


def text_of(rows: list[dict[str, Any]]) -> str:
    """A table in plain text, without rich."""
    medians = {row["name"]: median(row["seconds"]) for row in rows}
    torchs = medians.get("torch.optim.Muon") or float("nan")
    lines = [
        f"{rows[0]['model']}",
        f"{'':32}{'ms':>9}{'/ torch':>10}{'extra MB':>10}{'error':>9}{'first s':>9}",
    ]
    for row in rows:
        if "refusal" in row:
            lines.append(f"{row['name']:32}  refuses: {row['refusal']}")
            continue
        seconds = medians[row["name"]]
        lines.append(
            f"{row['name']:32}{1e3 * seconds:9.2f}{seconds / torchs:10.2f}{row['extra'] / 1e6:10.1f}"
            f"{row.get('error', float('nan')):9.4f}{row['first_seconds']:9.1f}"
        )
    return "\n".join(lines)


def _measured(bench: Bench, model: str) -> Measured:
    device = bench.arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        bench.parser.error("torch finds no GPU; tools/bench/muon.py runs on CPU")
    if device == "cpu":
        torch.compiler.set_stance("force_eager")  # compiling takes longer than everything else
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    kernels = "with" if importlib.util.find_spec("quack") else "without"
    rows = measure(model, device, bench.quick, bench.repeats)
    return Measured(
        {"device": card, "results": rows}, [f"{text_of(rows)}\n{card}, {kernels} quack-kernels\n"]
    )


for _model in MODELS:
    BENCH.part(_model)(partial(_measured, model=_model))


if __name__ == "__main__":
    BENCH.main()
