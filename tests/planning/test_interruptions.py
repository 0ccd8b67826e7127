"""Days of a run with saves and failures: by hand, and against simulated failures."""

import dataclasses
import math
import random

import pytest

from tests.support.planning import make_layout
from titan_async.errors import UserError
from titan_async.planning.interruptions import Interruptions, interruptions_of
from titan_async.planning.step_time import StepTime
from titan_async.recipes.debug import debug

STEPS, STEP, INTERVAL, HOUR = 100_000, 10.0, 360, 3600.0
SAVE, RESTART, MTBF = 120.0, 600.0, 10 * HOUR


def found(async_mode: str, hours: float = 10) -> Interruptions:
    """One replica of 16 ranks on two nodes saves 480 GB; the other replica saves nothing."""
    config = debug()
    checkpoint = dataclasses.replace(config.checkpoint, enable=True, interval=INTERVAL, async_mode=async_mode)
    values = {field.name: 0.0 for field in dataclasses.fields(StepTime)}
    time = StepTime(**(values | {"schedule": "1F1B", "step_seconds": STEP, "world_size": 32}))
    layout = make_layout(4, dp_shard=4, dp_replicate=2, steps=STEPS)
    return interruptions_of(dataclasses.replace(config, checkpoint=checkpoint), layout, time, 480e9, 8, hours)


def test_synchronous_saves_by_hand() -> None:
    run = found("disabled")
    assert (run.save_seconds, run.interval_seconds, run.saves) == (SAVE, HOUR, 278)
    assert run.lost_seconds == 600 + 3720 / 2
    seconds = (1_000_000 + 278 * 120) / (1 - 2460 / 36_000)
    assert run.days == pytest.approx(seconds / 86_400)
    assert run.failures == pytest.approx(seconds / 36_000)


def test_asynchronous_saves_by_hand() -> None:
    run = found("async")
    assert run.lost_seconds == 600 + 1800 + 120
    assert run.days == pytest.approx(1_000_000 / 0.93 / 86_400)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_days_match_simulated_failures(async_mode: str) -> None:
    """After each failure, at a random time, the run resumes from the last complete save."""
    draw = random.Random(0)
    clock = trained = 0.0
    runs = 100
    while trained < runs * STEPS * STEP:
        working = draw.expovariate(1 / MTBF)
        if async_mode == "disabled":
            trained += math.floor(working / (HOUR + SAVE)) * HOUR
        else:
            trained += max(math.floor((working - SAVE) / HOUR), 0) * HOUR
        clock += working + RESTART
    assert found(async_mode).days == pytest.approx(clock / runs / 86_400, rel=0.01)


def test_rare_failures_add_only_saves() -> None:
    assert found("disabled", hours=1e12).days == pytest.approx((1_000_000 + 278 * 120) / 86_400)
    assert found("async", hours=1e12).days == pytest.approx(1_000_000 / 86_400)


def test_impossible_numbers_are_rejected() -> None:
    with pytest.raises(UserError, match=r"--mtbf 0.5 a failure costs 0.68 hours.*lower checkpoint.interval"):
        found("disabled", hours=0.5)
    config = debug()
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, enable=False))
    with pytest.raises(UserError, match="set checkpoint.enable"):
        interruptions_of(config, make_layout(1), None, 1.0, 8, 1.0)  # type: ignore[arg-type]
