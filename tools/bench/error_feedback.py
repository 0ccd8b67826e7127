"""What error feedback adds to a step of AdamW. Run by hand:

    python tools/bench/error_feedback.py [--millions 50] [--compile] [--json results.json]

AdamW in its fused form, alone and inside `ErrorFeedback`, by turns in one process of one thread; medians of
processor time.
AdamW itself passes seven times over the size of the weights: it reads weights, gradients and two moments,
and writes all but the gradients. The last column counts what is added in such passes, by the time that AdamW
takes for its seven.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from titan_async.optim import ErrorFeedback

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


def measure(variants: dict[str, dict | None], millions: float, repetitions: int) -> dict[str, float]:
    """Median milliseconds of a step of each variant."""
    optimizers = {name: build(options, millions) for name, options in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for repetition in range(repetitions + 2):
        for name, optimizer in optimizers.items():
            start = time.process_time()
            optimizer.step()
            if repetition >= 2:  # state and histories exist, and are in use
                times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--millions", type=float, default=50, help="parameters, in millions (default: 50)")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="in one compiled pass, too")
    parser.add_argument("--json", type=Path, help="file for the medians")
    arguments = parser.parse_args()
    compiled = {"error feedback, update, compiled": {"compile": True}} if arguments.compile else {}
    medians = measure(VARIANTS | compiled, arguments.millions, arguments.repetitions)
    alone = medians["AdamW"]
    table = Table("", "ms a step", "of AdamW", "passes added", box=SIMPLE_HEAD)
    for name, median in medians.items():
        added = PASSES_OF_ADAMW * (median / alone - 1)
        table.add_row(name, f"{median:.1f}", f"{median / alone:.2f}", f"{added:.1f}")
    Console(width=100).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(medians, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
