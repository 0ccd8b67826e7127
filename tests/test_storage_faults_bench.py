"""The damaged checkpoints of tools/bench/faults.py cause the expected errors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _faults.baseline import error_line
from _faults.checkpoints import damages
from _faults.runs import Run
from torch.distributed.checkpoint.api import CheckpointException

from titan_async.checkpoint._dcp_internals import (
    ChecksumReader,
    ChecksumWriter,
    CorruptCheckpointError,
    WeightsOnlyLoadPlanner,
)


def load(folder: Path) -> str | None:
    """Loads a checkpoint; returns the error, if any."""
    state = {"tensor": torch.zeros(100_000)}
    try:
        dcp.load(state, storage_reader=ChecksumReader(folder), planner=WeightsOnlyLoadPlanner())
    except CorruptCheckpointError as error:
        return str(error)
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        return str(cause)
    return None


def test_every_damage_causes_the_expected_error(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    dcp.save({"tensor": torch.arange(100_000.0)}, storage_writer=ChecksumWriter(whole))
    assert load(whole) is None
    found = list(damages(quick=False))
    assert [len(tries) for _, tries, _ in found] == [2, 3, 2, 3]
    for number, (_, tries, said) in enumerate(found):
        for again, damage in enumerate(tries):
            folder = tmp_path / f"{number}-{again}"
            shutil.copytree(whole, folder)
            damage(folder)
            why = load(folder)
            assert why is not None
            line = f"the checkpoint run/checkpoint/step-8 is damaged: {why}; remove that folder to resume "
            line += "from step 4"
            assert re.search(said, line), line
            assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("status", "err", "good"),
    [
        (2, "cannot save x\n", True),
        (1, "cannot save x\n", False),
        (2, "Traceback\ncannot save x\n", False),
        (2, "another sentence\n", False),
        (2, "", False),
    ],
)
def test_error_line_requires_one_line_and_status_2(status: int, err: str, good: bool) -> None:
    assert error_line(Run(status, "", err), "cannot save") == ("cannot save x" if good else None)
