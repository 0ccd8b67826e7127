"""`AsyncTrainer` against a plain loop on one process over the same batches.

It checks that the trainer clips by the whole model's norm, moves the learning rate, normalizes the loss,
drains for validation and checkpoints without changing the trajectory, and applies the last gradient.
"""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.support.processes import Pools, WorkerPool
from tests.support.trainer_loop import Trained, arguments, distance, loop, merged, train


@pytest.fixture(scope="module")
def pool(trainer_pools: Pools) -> WorkerPool:
    return trainer_pools(2)


def note_wrapping(trainer: Any, trained: Trained) -> None:
    modules = [module for part in trainer.model_parts for module in part.modules()]
    trained.extra["wrapped"] = any(isinstance(module, FSDPModule) for module in modules)


@pytest.mark.parametrize(
    ("schedule", "delay", "strength"), [("Async2BW", 1, 0.0), ("Async2BW", 1, 1.0), ("1F1B", 0, 0.0)]
)
def test_the_trainer_follows_the_recurrence(
    pool: WorkerPool, tmp_path: Path, schedule: str, delay: int, strength: float
) -> None:
    # Under 1F1B error feedback is configured and must have no effect.
    configured = strength if delay else 1.0
    argv = arguments(
        tmp_path, "tiny_llama",
        "--parallelism.pipeline_parallel_schedule", schedule,
        "--optimizer.error_feedback.strength", configured, "--checkpoint.interval", 2,
    )  # fmt: skip
    results = pool.run(2, train, argv, note_wrapping, timeout=240)
    assert not any(result.extra["wrapped"] for result in results)
    before, after = merged([r.before for r in results]), merged([r.after for r in results])
    wanted = loop(argv, before, delay=delay, strength=strength)
    other = loop(argv, before, delay=1 - delay, strength=strength)

    assert distance(after, wanted.after) < 2e-6
    assert distance(after, other.after) > 1e-3
    for result in results:
        assert result.losses == pytest.approx(wanted.losses, abs=1e-5)
    # The norm reported with a step is that of the latest update: one batch back unless just drained
    # (checkpoints after steps 2, 4 and 6, a validation after step 3).
    norms = wanted.norms
    latest = [None, norms[1], norms[2], norms[3], norms[3], norms[5]] if delay else norms
    for found, norm in zip(results[0].norms, latest, strict=True):
        assert found == (None if norm is None else pytest.approx(norm, rel=1e-4))
