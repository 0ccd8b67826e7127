"""Starts runs of the debug recipes in a folder, and reads their checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from _faults.injected import FAULT
from tests.support import training
from tests.support.training import RECIPE, ROOT, Run
from titan_async.checkpoint.dcp import SavedTensors

MOE_RECIPE = ROOT / "toml_configs" / "debug_moe_cpu.toml"

SMALL = ("--training.local_batch_size", "8", "--training.seq_len", "64", "--training.max_norm", "1.0",
         "--metrics.log_freq", "1", "--validator.no-enable", "--dump_folder", "run")  # fmt: skip
"""The debug recipe with smaller batches, so that a step takes a tenth of a second."""


def command(*flags: object, recipe: Path = RECIPE) -> list[str]:
    """`titan-async train` with a debug recipe and `SMALL`."""
    module = ("--module", "_faults.injected")
    return [sys.executable, "-m", "titan_async.cli", "train", str(recipe), *module, *SMALL, *map(str, flags)]


def environment(fault: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Environment variables of a run with an injected `fault` (`_faults.injected`)."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tools" / "bench")))
    variables = training.environment() | {"PYTHONPATH": path}
    return variables if fault is None else variables | {FAULT: json.dumps(fault)}


def start(
    folder: Path,
    *flags: object,
    recipe: Path = RECIPE,
    fault: Mapping[str, Any] | None = None,
    out: IO[str] | int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Starts a run in a new session, with the folder `folder`/run, and stdout to `out`."""
    return subprocess.Popen(
        command(*flags, recipe=recipe), cwd=folder, env=environment(fault), text=True,
        stdout=out, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def train(
    folder: Path,
    *flags: object,
    recipe: Path = RECIPE,
    fault: Mapping[str, Any] | None = None,
    timeout: float = 300,
) -> Run:
    """Runs until the end.

    Raises:
        subprocess.TimeoutExpired: the run took longer than `timeout`.
    """
    process = start(folder, *flags, recipe=recipe, fault=fault)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate(timeout=90)
        raise
    return Run(process.returncode, out, err)


def train_undisturbed(
    folder: Path, steps: int, *flags: object, fault: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Creates the folder, trains in it without faults, and returns the state saved at the end.

    Args:
        folder: of the run.
        steps: number of steps, as in the flags.
        flags: of the run.
        fault: a change by `_faults.injected` that is not a fault, such as a local hub.
    """
    folder.mkdir()
    done = train(folder, *flags, fault=fault, timeout=900)
    assert done.status == 0, done.err
    return saved_state(folder, steps)


def saved_state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of `folder`/run: weights, optimizers' state, the next batch's weights."""
    saved = SavedTensors(folder / "run" / "checkpoint" / f"step-{step}")
    return {key: saved.read(key) for key in saved.tensors}


def is_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two states are bitwise equal."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
