"""The host does not synchronize with the device within a step: tested with a simulated device."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.support.selection import slow
from tests.support.stand_in_device import StandInDevice
from tests.support.trainer_loop import Trained, Trainers, arguments

WATCHED = (3, 4, 5)
"""Not the first two steps, in which shapes are inferred and feedback starts, nor the last, which saves."""


def watch(trainer: Any, trained: Trained) -> None:
    step, seen = trainer.train_step, trained.extra.setdefault("seen", {})
    device = StandInDevice(
        [t for part in trainer.model_parts for t in chain(part.parameters(), part.buffers())]
    )

    def watched(batches: Any) -> None:
        device.begin_step()
        with device:
            step(batches)
        seen[trainer.step] = device.waits, device.reads

    trainer.train_step = watched


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [("Async2BW", "muon"), ("1F1B", "adamw"), slow("Async2BW", "adamw"), slow("1F1B", "muon")],
)
def test_no_step_of_a_dense_model_synchronizes(
    runs: Trainers, tmp_path: Path, schedule: str, optimizer: str
) -> None:
    flags = (
        "--parallelism.pipeline_parallel_schedule", schedule, "--optimizer.name", optimizer,
        "--checkpoint.interval", 100, "--validator.no-enable", "--ema.decay", "0.9",
    )  # fmt: skip
    for result in runs(2, arguments(tmp_path, "tiny_llama", *flags), watch):
        for step in WATCHED:
            waits, reads = result.extra["seen"][step]
            assert waits == []
            assert reads == 2, "the norm, and the figures, of the step before"
        assert len(result.losses) == 6, "every step was reported"
