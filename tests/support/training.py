"""Training as a user starts it: the command `titan-async train` in separate processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import titan_async
from tests.support import forks
from titan_async.monitor.processes import is_alive

__all__ = ["RECIPE", "ROOT", "SMALL", "Run", "command", "environment", "processes_of", "start", "train"]

ROOT = Path(titan_async.__file__).parents[1]
RECIPE = ROOT / "toml_configs" / "debug_cpu.toml"

SMALL = Path(__file__).with_name("small.toml")
"""RECIPE with a smaller model."""

SHORT_STEPS = ("--training.seq_len", "64", "--validator.steps", "2")
"""They precede a test's own flags, which override them."""


@dataclass(frozen=True)
class Run:
    """Status and output of a finished run."""

    status: int
    out: str
    err: str

    @property
    def steps(self) -> list[int]:
        """The numbers of the logged steps, in the order of their lines."""
        return [int(number) for number in re.findall(r"^step +(\d+)/", self.out, re.MULTILINE)]

    @property
    def losses(self) -> list[float]:
        """The losses of the logged steps."""
        return [float(loss) for loss in re.findall(r"^step .*? loss +(\S+) ", self.out, re.MULTILINE)]

    @property
    def validation_losses(self) -> list[float]:
        return [float(x) for x in re.findall(r"^validation at step \d+: loss (\S+)$", self.out, re.MULTILINE)]


def environment() -> dict[str, str]:
    """This process's environment, without variables of workers and of runs on several nodes."""
    unwanted = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "NGPU",
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    return {key: value for key, value in os.environ.items() if key not in unwanted} | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }


def command(*flags: object, recipe: object = SMALL) -> list[str]:
    words = [sys.executable, "-m", "titan_async.cli", "train", str(recipe), *SHORT_STEPS]
    if recipe == SMALL:
        words += ["--module", "tests.support.recipes"]
    return [*words, *map(str, flags)]


def train(
    folder: Path, *flags: object, recipe: object = SMALL, timeout: float = 400, anew: bool = False
) -> Run:
    """Runs the command in `folder` until it ends, by default with the run folder `folder`/run.

    Its processes are forks (`tests.support.forks`), or new interpreters if `anew`.
    """
    words = command("--dump_folder", "run", *flags, recipe=recipe)
    if anew:
        done = subprocess.run(
            words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
        )
    else:
        done = forks.run(words, cwd=folder, env=environment(), timeout=timeout)
    return Run(done.returncode, done.stdout, done.stderr)


def start(folder: Path, *flags: object, recipe: object = SMALL, **options: Any) -> forks.Forked:
    """Starts the command in `folder`; the options are those of `Forked`."""
    words = command("--dump_folder", "run", *flags, recipe=recipe)
    return forks.Forked(words, cwd=folder, env=environment(), **options)


def processes_of(launcher: int) -> dict[int, int]:
    """The process ids of a launcher's running ranks, by rank."""
    ranks = {}
    for pid in _children(launcher):
        try:
            name = Path(f"/proc/{pid}/comm").read_text()
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it ends just now
            continue
        forked = re.fullmatch(r"rank (\d+)\n", name)  # its environment is that of the process forked
        rank = forked[1] if forked else next((v[5:] for v in variables if v.startswith(b"RANK=")), None)
        if rank is not None and is_alive(pid):
            ranks[int(rank)] = pid
    return ranks


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
