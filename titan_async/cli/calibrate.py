"""`titan-async calibrate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_async.cli.command_line import VerbParser
from titan_async.errors import UserError

if TYPE_CHECKING:
    from titan_async.planning.device_profile import DeviceProfile

__all__ = ["run"]

_PARSER = VerbParser(
    "calibrate",
    "",
    """\
Measure the performance of one device of this machine, in about a minute, for plans that do not rely on data
sheets: matrix products of many shapes in float32 and bfloat16, attention, and memory. On a CPU, one core is
measured, with one thread, and messages between two processes. Do not use the device for anything else.""",
    examples=("calibrate --out h100.json", "plan moe_10b_200b.toml --calibration h100.json"),
)
_PARSER.option(
    "--device",
    "default: cuda if there is a GPU, which CUDA_VISIBLE_DEVICES selects",
    choices=("cuda", "cpu"),
)
_PARSER.option(
    "--out",
    "output file (default: calibration.json)",
    metavar="FILE",
    type=Path,
    default=Path("calibration.json"),
)


def run(argv: Sequence[str]) -> int:
    """Writes a calibration; returns the exit status.

    Raises:
        UserError: an option is wrong, there is no such device, or the file cannot be written.
    """
    line = _PARSER.parse(argv)
    kind, out = line.device, line.out
    if out.is_dir():
        raise UserError(f"--out is {out}, which is a folder: name a file")

    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but torch finds no GPU: omit the flag, or set it to cpu")

    from titan_async.planning.device_profile import write_profile
    from titan_async.planning.device_timing import profile_device

    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    profile = profile_device(kind, lambda what: print(f"{what} ...", file=sys.stderr))
    write_profile(out, profile)
    for words in _lines(profile):
        print(words)
    print(f"{out}: use it with titan-async plan RECIPE.toml --calibration {out}")
    return 0


def _lines(profile: DeviceProfile) -> list[str]:
    device = profile.device
    if device.kind == "cpu":
        lines = [f"one core of {device.name} ({device.processors} cores), one thread"]
    else:
        lines = [f"{device.name}, {device.processors} SMs"]
    lines[0] += f", {device.memory / 1e9:.0f} GB, torch {profile.torch}"
    for name, found in (("float32", profile.float32), ("bfloat16", profile.bfloat16)):
        rates, error, attends = found.rates, found.product_error, found.attention_error
        lines += [
            f"  {name}: products {_rate(rates.products)}FLOP/s and {_rate(rates.operands)}B/s, which fits "
            f"{len(found.products)} shapes within a factor of {error.worst:.2f}, {error.mean:.2f} on average",
            f"  {name}: attention {_rate(rates.attention)}FLOP/s, half of it at {rates.attention_ramp:.0f} "
            f"tokens, which fits {len(found.attention)} lengths within {attends.worst:.2f}",
        ]
    moved = profile.elementwise
    passes = ""
    if moved.forward_passes is not None:
        passes = (
            "; elementwise operations of a layer move the size of their outputs "
            f"{moved.forward_passes:.1f} times, {moved.backward_passes:.1f} times in the backward"
        )
    lines.append(f"  memory: {_rate(moved.bandwidth)}B/s{passes}")
    if profile.link is not None:
        latency, bandwidth = profile.link.latency, profile.link.bandwidth
        lines.append(f"  messages: {1e6 * latency:.0f} us and {_rate(bandwidth)}B/s between two processes")
    else:
        lines.append("  networks are not measured: plans use that of --gpu")
    return lines


def _rate(number: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e6:.3g} M"
