"""Checks the project on the available GPUs, in at most ten minutes.

    python tools/gpu/check.py [--only recurrence host] [--json results.json]
    python tools/gpu/check.py --cpu      # the checks that need no GPU

Needs torch (2.11 or newer) and this checkout, which need not be installed; docs/gpu.md explains the rows. The
exit status is 1 if a row is WRONG, 2 if there is no device to check, and 0 otherwise.
"""

import argparse
import importlib
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# This checkout precedes an installed package; the processes of the checks inherit the path.
sys.path[:0] = [str(ROOT / "tools" / "gpu"), str(ROOT / "tools" / "bench"), str(ROOT)]

from _checks import NOT_CHECKED, WRONG, Check, Row, not_checked, run  # noqa: E402

SECONDS = 600
_OLDEST = (2, 11)
_WIDTHS = (38, 36, 44, 11)


def all_checks() -> dict[str, Check]:
    """The checks by name, in order: correctness before speed."""
    kernels, ranks, speed, overlap = map(
        importlib.import_module, ("_kernels", "_ranks", "_speed", "_overlap")
    )

    def four(gpus: int) -> int:
        return 8 if gpus >= 8 else 4

    def two_on_cpu(gpus: int) -> int:
        return four(gpus) if gpus else 2

    found = {
        "device": Check("GPUs, and versions of torch and NCCL", kernels.device, kernels.judge_device, 60),
        "recurrence": Check(
            "weights after 40 batches compared with a loop, plain and FSDP2, while devices sleep at random",
            ranks.recurrence, ranks.judge_error, 120, four, joined=True,
        ),
        "recurrence-bound": Check(
            "the same with the default group bound to a device",
            ranks.bound_recurrence, ranks.judge_error, 60, four, on_cpu=False, joined=True,
        ),
        "overlap": Check(
            "the same for overlapped pairs with two expert-parallel ranks per stage, plain and FSDP2",
            overlap.recurrence, ranks.judge_error, 90, lambda gpus: 4, joined=True,
        ),
        "overlap-hidden": Check(
            "the fraction of messages that overlapped pairs hide, and whether the host waits",
            overlap.hidden, overlap.judge_hidden, 40,
        ),
        "host": Check(
            "whether the host waits for the device in step, clip_grad_norm_ or an optimizer",
            ranks.host, ranks.judge_host, 90, two_on_cpu, joined=True,
        ),
        "clock": Check(
            "StreamClock compared with CUDA events", kernels.clock, kernels.judge_clock, 40, on_cpu=False
        ),
        "gemm": Check(
            "slowdown of matrix products by waiting blocks",
            kernels.gemm, kernels.judge_gemm, 60, on_cpu=False,
        ),
        "calibrate": Check(
            "titan-async calibrate, and the errors of its fit",
            kernels.calibrate, kernels.judge_calibrate, 120, on_cpu=False,
        ),
        "waits": Check(
            "calls that wait for a waiting kernel",
            kernels.waiting_call, kernels.judge_call, 100, lambda gpus: len(kernels.CALLS), on_cpu=False,
        ),
        "muon": Check("Muon compared with torch.optim.Muon", speed.muon, speed.judge_muon, 120),
        "memory": Check(
            "peak memory of the stages compared with the formula of docs/memory.md",
            speed.peak, speed.judge_peak, 60, two_on_cpu, joined=True,
        ),
    }  # fmt: skip
    for blocks in (4, 2, 16):
        found[f"speed-{blocks}"] = Check(
            f"utilization of transformer stages compared with 1F1B, NCCL_MAX_CTAS={blocks}",
            partial(speed.speed, blocks=blocks), speed.judge_speed, 60, two_on_cpu,
            on_cpu=blocks == 4, joined=True,
        )  # fmt: skip
    return found


def show(cells: tuple[str, ...], log: list[str]) -> None:
    columns = [textwrap.wrap(cell, width) for cell, width in zip(cells, _WIDTHS, strict=True)]
    for line in zip_longest(*columns, fillvalue=""):
        print("  ".join(text.ljust(width) for text, width in zip(line, _WIDTHS, strict=True)).rstrip())
    for text in log:
        print(f"    | {text}")
    sys.stdout.flush()


def rows_of(checks: dict[str, Check], gpus: int) -> Iterator[Row]:
    end = time.monotonic() + SECONDS
    for name, check in checks.items():
        left = end - time.monotonic() - 40  # for the start and end of processes
        if not gpus and not check.on_cpu:
            yield not_checked(name, "needs a GPU")
        elif left < 20:
            yield not_checked(name, f"the time limit of {SECONDS} s is over; run it with --only {name}")
        else:
            # The cores of a CPU may be busy with other work.
            yield from run(name, check, gpus, min(check.seconds if gpus else 4 * check.seconds, left))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="run on CPU, even if there is a GPU")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the checks to run")
    parser.add_argument("--list", action="store_true", help="list the checks and exit")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        parser.error(f"this needs torch {'.'.join(map(str, _OLDEST))} or newer: {error}")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        parser.error(f"torch {torch.__version__} is too old: 2.11 or newer is needed")
    checks = all_checks()
    if arguments.list:
        for name, check in checks.items():
            print(f"{name:18}{check.about}{'' if check.on_cpu else ' (needs a GPU)'}")
        return
    if unknown := set(arguments.only or ()) - set(checks):
        parser.error(f"--only {' '.join(sorted(unknown))}: the checks are {', '.join(checks)}")
    if not arguments.cpu and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --cpu runs the checks that need none")
    gpus = 0 if arguments.cpu else torch.cuda.device_count()
    # As an exception, so that the processes of a check are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = {name: checks[name] for name in checks if name in (arguments.only or checks)}
    start = time.monotonic()
    rows: list[Row] = []
    show(("check", "expected", "found", "verdict"), [])
    for row in rows_of(chosen, gpus):
        rows.append(row)
        show((row.check, row.expected, row.found, row.verdict), row.log)
        if arguments.json:
            arguments.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
    wrong = sum(row.verdict == WRONG for row in rows)
    skipped = sum(row.verdict == NOT_CHECKED for row in rows)
    print(f"{len(rows)} rows, {wrong} wrong, {skipped} not checked; {time.monotonic() - start:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
