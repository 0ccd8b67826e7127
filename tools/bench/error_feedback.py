"""Overhead of error feedback in a step of AdamW.

    python tools/bench/error_feedback.py [--millions 50] [--compile] [--json results.json]

Fused AdamW alone and inside `ErrorFeedback`, alternately in one process of one thread; medians of processor
time. AdamW itself has seven passes over the size of the weights: it reads weights, gradients and two moments,
and writes all except the gradients. The last column is the overhead in such passes.
"""

import time

import torch
from _harness import Bench, Measured, median, table

from titan_async.optim import ErrorFeedback

BENCH = Bench(__doc__, repeats=7, width=100)
BENCH.add_argument("--millions", type=float, default=50, help="parameters, in millions (default: 50)")
BENCH.add_argument("--compile", action="store_true", help="also compiled, in one pass")

PASSES_OF_ADAMW = 7
VARIANTS = {
    "AdamW": None,
    "error feedback, update": {"level": "update"},
    "error feedback, gradient": {"level": "gradient"},
    "error feedback, update, bfloat16": {"level": "update", "dtype": torch.bfloat16},
}


def build(options: dict | None, millions: float) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.randn(1000, 1000)) for _ in range(round(millions))]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.AdamW(params, fused=True)
    return optimizer if options is None else ErrorFeedback(optimizer, **options)


def measure(variants: dict[str, dict | None], millions: float, repeats: int) -> dict[str, float]:
    """Median milliseconds of a step of each variant."""
    optimizers = {name: build(options, millions) for name, options in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for repetition in range(repeats + 2):
        for name, optimizer in optimizers.items():
            start = time.process_time()
            optimizer.step()
            if repetition >= 2:  # state and histories exist, and are in use
                times[name].append(1e3 * (time.process_time() - start))
    return {name: median(each) or 0.0 for name, each in times.items()}


@BENCH.part("update")
def _update(bench: Bench) -> Measured:
    compiled = {"error feedback, update, compiled": {"compile": True}} if bench.arguments.compile else {}
    medians = measure(VARIANTS | compiled, bench.arguments.millions, bench.repeats)
    alone = medians["AdamW"]
    columns = {
        "": str,
        "ms per step": lambda name: f"{medians[name]:.1f}",
        "relative": lambda name: f"{medians[name] / alone:.2f}",
        "passes added": lambda name: f"{PASSES_OF_ADAMW * (medians[name] / alone - 1):.1f}",
    }
    title = f"Processor time of an update of {bench.arguments.millions:g} million parameters"
    return Measured(medians, [table(title, columns, medians)])


if __name__ == "__main__":
    BENCH.main()
