"""Muon against torch.optim.Muon: tools/bench/muon_cuda.py on the matrices of one layer of an 8B model."""

import importlib.util
import statistics
from collections.abc import Iterator
from typing import Any

import muon_cuda
import torch
from _checks import DIFFERS, NOTED, OK, WRONG, Place, Row, not_checked

__all__ = ["judge_muon", "muon"]

_TORCH = "torch.optim.Muon"
_OURS = ("ours, bfloat16", "ours, bfloat16, no kernels")


def muon(place: Place) -> Iterator[tuple[str, Any]]:
    """Seconds of an update relative to torch's, and the error of the first one."""
    if not place.gpus:
        torch.compiler.set_stance("force_eager")  # compiling takes longer than all the rest
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
