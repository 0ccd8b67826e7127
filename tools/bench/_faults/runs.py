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
"""The default recipe with less in a batch, so that a step takes a tenth of a second."""


def command(*flags: object, recipe: Path = RECIPE) -> list[str]:
    """`titan-async train` with the small form of a debug recipe."""
    module = ("--module", "_faults.injected")
    return [sys.executable, "-m", "titan_async.cli", "train", str(recipe), *module, *SMALL, *map(str, flags)]


def environment(fault: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The variables of a run that injects `fault` into itself (`_faults.injected`)."""
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
    """Start a run, in a session of its own, that writes to `folder`/run, with stdout to `out`."""
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
    """Run until it ends.

    Raises:
        subprocess.TimeoutExpired: it did not.
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
    """Create the folder, train in it without faults, and return the state saved at the end.

    Args:
        folder: of the run.
        steps: how many the flags say.
        flags: of the run.
        fault: a change by `_faults.injected` that is no fault, such as a local hub.
    """
    folder.mkdir()
    done = train(folder, *flags, fault=fault, timeout=900)
    assert done.status == 0, done.err
    return saved_state(folder, steps)


def saved_state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint of `folder`/run: weights, optimizers' state, the next batch's weights."""
    saved = SavedTensors(folder / "run" / "checkpoint" / f"step-{step}")
    return {key: saved.read(key) for key in saved.tensors}


def is_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two states are the same, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
