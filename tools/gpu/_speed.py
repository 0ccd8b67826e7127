"""Utilization and peak memory of stages of a transformer on several ranks; Muon against torch.optim.Muon."""

import importlib.util
import os
import statistics
from collections.abc import Iterator
from typing import Any

import compute
import memory
import muon_cuda
import torch
from _checks import DIFFERS, NOTED, OK, WRONG, Place, Row, joined, not_checked
from _pipelines import forget
from _transformer import Model

__all__ = ["judge_muon", "judge_peak", "judge_speed", "muon", "peak", "speed"]


def model_of(place: Place) -> Model:
    """Two blocks per rank, of the width of an 8B model if each rank has a GPU with enough memory."""
    if not place.gpus:
        return Model(1, 32, 16)
    free = torch.cuda.get_device_properties(place.device).total_memory / -(-place.ranks // place.gpus)
    if place.shared or free < 30e9:  # messages of ranks that share a GPU go through sockets
        return Model(2, 1024, 1024, place.device, torch.bfloat16)
    return Model(2, 4096, 4096, place.device, torch.bfloat16)


def speed(place: Place, blocks: int) -> Iterator[tuple[str, Any]]:
    """Step times of 1F1B and of Async2BW, with at most `blocks` blocks per NCCL operation."""
    os.environ["NCCL_MAX_CTAS"] = str(blocks)
    microbatches, steps = 2 * place.ranks, 10 if place.gpus else 1
    with joined(place) as group:
        model = model_of(place)
        alone = compute.pair(place.rank, group, model, 8) * microbatches
        baseline = None
        for schedule, options in [
            ("1F1B", {}),
            ("Async2BW", {"early_receives": False}),
            ("Async2BW", {"early_receives": True}),
        ]:
            compute.prepare(place.rank, group, schedule, microbatches, model, **options)
            seconds = compute.repeat(place.rank, group, schedule, microbatches, model, steps)
            forget(place.rank, group)
            baseline = baseline or seconds
            kind = {True: ", receives early", False: ", receives late", None: ""}[
                options.get("early_receives")
            ]
            name = f"utilization, {schedule}{kind}" + f", {blocks} blocks" * bool(place.gpus)
            yield name, [alone, seconds, baseline, blocks]


def judge_speed(name: str, values: list[Any], place: Place) -> Row:
    """Utilization is relative to forwards and backwards while all ranks compute and none waits."""
    alone, seconds, baseline = (max(value[index] for value in values) for index in range(3))
    found = f"{alone / seconds:.2f}"
    if "1F1B" in name:
        return Row(name, "-", f"{found}, {1e3 * seconds:.1f} ms per step", NOTED)
    found += f", {baseline / seconds:.2f} x 1F1B"
    if place.shared:
        return Row(name, "-", f"{found} (ranks share a device)", NOTED)
    slower = DIFFERS if values[0][3] > 4 else WRONG
    return Row(name, "faster than 1F1B", found, OK if seconds < baseline else slower)


def peak(place: Place) -> Iterator[tuple[str, Any]]:
    """Peak bytes of a stage under both schedules, and the prediction of docs/memory.md."""
    microbatches = place.ranks + 2
    with joined(place) as group:
        model = model_of(place)
        compute.pair(place.rank, group, model, 1)  # allocates the workspace of cuBLAS
        sizes = memory.sizes_of(place.rank, group, model)
        for schedule, lookahead in (("1F1B", None), ("Async2BW", 0)):
            predicted = memory.predict_peak(sizes, place.rank, place.ranks, microbatches, lookahead)
            found, _ = memory.peak_of_steps(place.rank, group, model, schedule, microbatches, lookahead, 2)
            yield f"peak memory, {schedule}", [predicted, found]


def judge_peak(name: str, values: list[Any], place: Place) -> Row:
    errors = [found / predicted - 1 for predicted, found in values]
    most = 0.1 if place.gpus else 0.05
    found = ", ".join(f"{error:+.1%}" for error in errors) + " by stage"
    verdict = WRONG if max(errors) > most else DIFFERS if min(errors) < -most else OK
    return Row(name, f"within {most:.0%} of the formula", found, verdict)


_TORCH = "torch.optim.Muon"
_OURS = ("ours, bfloat16", "ours, bfloat16, no kernels")


def muon(place: Place) -> Iterator[tuple[str, Any]]:
    """Seconds of an update relative to torch's, and the error of the first one."""
    if not place.gpus:
        torch.compiler.set_stance("force_eager")  # compiling takes longer than everything else
    large = not place.gpus or torch.cuda.get_device_properties(place.device).total_memory > 20e9
    model, repeats = "8B" if large else "360M", 10 if place.gpus else 1
    found = muon_cuda.measure(model, place.kind, not place.gpus, repeats, (_TORCH, *_OURS))
    rows = {row["name"]: row for row in found}
    reference = statistics.median(rows[_TORCH]["seconds"])
    kernels = importlib.util.find_spec("quack") is not None
    for name in _OURS:
        row = rows.get(name, {"refusal": "quack-kernels is not installed"})
        kind = "plain" if ("no kernels" in name) == kernels else "quack-kernels"
        seconds = statistics.median(row["seconds"]) if row.get("seconds") else None
        yield f"Muon, {kind}", [seconds and seconds / reference, row.get("error"), row.get("refusal")]


def judge_muon(name: str, values: list[Any], place: Place) -> Row:
    ratio, error, refusal = values[0]
    if refusal:
        absent = "not installed" in refusal
        return not_checked(name, refusal) if absent else Row(name, "runs", refusal, WRONG)
    found = f"{ratio:.2f} x its time, error {error:.3f}"
    if error > 0.1:
        verdict = WRONG
    elif not place.gpus:
        verdict = NOTED
    else:
        verdict = OK if ratio < 1 else DIFFERS
    return Row(name, "faster than torch.optim.Muon, error below 0.1", found, verdict)
