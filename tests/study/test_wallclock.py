"""wallclock.py: its pipelines train as one process does, and padding changes only times."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import _pipeline_run
import _training
import pytest
import torch
import torch.distributed as dist
import wallclock
from _model import MODELS, Decoder, language_loss
from _optimizers import build_optimizers
from _pipeline_run import SCHEDULES, Part, PipelineRun, train_rank
from _pool import Pool
from _text import Batches
from _training import learning_rate
from torch import Tensor, nn

from titan_async.optim import DelayedGradients, ErrorFeedback

STEPS = 8
MAX_NORM = 0.25
"""Clips all of the first gradients."""
RUN = PipelineRun(model="tiny", schedule="1F1B", steps=STEPS, seed=3, optimizer="muon", lr=0.02)


@pytest.fixture(autouse=True)
def _short_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_training, "_EVALUATED_BYTES", 4096)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([2]) as running:
        yield running


@contextlib.contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def train_in_float64(rank: int, group: dist.ProcessGroup, run: PipelineRun) -> dict[str, Any]:
    with float64(), mock.patch.object(_pipeline_run, "MAX_NORM", MAX_NORM):
        return train_rank(rank, group, run)


def train_alone(
    run: PipelineRun, delay: int, feedback: bool = False, max_norm: float = MAX_NORM
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of the recurrence on one process, without stages or microbatches."""
    torch.manual_seed(run.seed)
    model = Decoder(MODELS[run.model])
    optimizers = build_optimizers(model, run.optimizer, run.lr)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    if feedback:
        optimizers = [ErrorFeedback(optimizer) for optimizer in optimizers]
    delayed = DelayedGradients(model, delay)
    batches = Batches("training", run.sequences, MODELS[run.model].length, run.seed)
    losses = []
    for step in range(run.steps):
        with delayed.batch():
            loss, _ = language_loss(model, *batches(step))
            loss.backward()
        losses.append(float(loss.detach()))
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        assert max_norm > MAX_NORM or step or norm > 2 * max_norm, "the gradient was not clipped"
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate(step, run.steps)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), losses


def farthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_trains_as_one_process_does(pool: Pool, schedule: str, optimizer: str) -> None:
    run = replace(RUN, schedule=schedule, optimizer=optimizer)
    ranks = pool.run(2, train_in_float64, run)
    is_delayed = schedule.startswith("Async2BW")
    with float64():
        weights, losses = train_alone(run, delay=int(is_delayed), feedback=schedule == "Async2BW+EF")
        other, _ = train_alone(run, delay=int(not is_delayed))
    # Muon orthogonalizes in float32.
    tolerance = 1e-5 if optimizer == "muon" else 1e-9
    found = wallclock.joined_weights(ranks)
    assert farthest(found, weights) < tolerance
    assert farthest(other, weights) > 100 * tolerance
    # ZBVZeroBubble has the last stage on the first rank.
    last = 0 if schedule == "ZBVZeroBubble" else 1
    assert ranks[last]["losses"] == pytest.approx(losses, abs=tolerance)
    assert ranks[1 - last]["losses"] == []


def test_stages_compose_the_decoder() -> None:
    torch.manual_seed(0)
    model = Decoder(MODELS["tiny"])
    inputs, _ = Batches("training", 2, 32, seed=0)(0)
    for count in (1, 2, 3, 4, 5, 8):
        parts = [Part(model, index, count) for index in range(count)]
        x = inputs
        for part in parts:
            x = part(x)
        assert torch.equal(x, model(inputs)[0])
        names = [name for part in parts for name in part.state_dict()]
        assert sorted(names) == sorted(model.state_dict())


class Clock:
    """A clock that advances by `READING` per reading and by the requested time per sleep."""

    READING = 2.0**-12

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        self._now += self.READING
        return self._now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # ranks wait for each other
        self._now += seconds


def train_by_clock(rank: int, group: dist.ProcessGroup, run: PipelineRun) -> dict[str, Any]:
    with mock.patch.object(_pipeline_run, "time", Clock()):
        return train_rank(rank, group, run)


def test_padding_changes_only_times(pool: Pool) -> None:
    for schedule, kind in SCHEDULES.items():
        run = replace(RUN, schedule=schedule)
        passes = STEPS * RUN.microbatches * kind.stages_per_rank
        backwards = 2 * passes if schedule == "ZBVZeroBubble" else passes
        forward_s = 0.004 / kind.stages_per_rank
        plain = pool.run(2, train_by_clock, run)
        padded = pool.run(2, train_by_clock, replace(run, forward_s=0.004))
        for before, after in zip(plain, padded, strict=True):
            assert farthest(after["weights"], before["weights"]) == 0
            assert after["losses"] == before["losses"]
            assert before["passes"] == after["passes"] == passes + backwards
            # The last reading comes after the sleep.
            assert after["computing"]["forward"] == pytest.approx(passes * (forward_s + Clock.READING))
            slept = 2 * passes * forward_s
            assert after["computing"]["backward"] == pytest.approx(slept + backwards * Clock.READING)
            assert sum(after["computing"].values()) < after["seconds"]
            assert after["times"] == sorted(after["times"]) and after["times"][-1] <= after["seconds"]
            assert (before["late"], after["late"]) == (passes + backwards, 0)


@pytest.mark.parametrize("padded", [False, True])
def test_a_measurement_evaluates_the_trained_weights(
    pool: Pool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = wallclock.Measurement(
        setting="pp2-padded" if padded else "pp2", schedule="Async2BW", seed=3, optimizer="muon", lr=0.02,
        budget_s=1.0, model="tiny",
    )  # fmt: skip
    timing = wallclock.Timing(step_s=1.0 / STEPS, utilization=0.75, late_share=0.01)
    row = wallclock.measure(pool, measurement, timing)
    weights, losses = train_alone(replace(RUN, schedule="Async2BW"), delay=1, max_norm=1.0)
    model = Decoder(MODELS["tiny"])
    model.load_state_dict(weights)
    for split in ("validation", "test"):
        expected = wallclock.evaluate(model, split, MODELS["tiny"].length)
        assert row[f"{split}_loss"] == pytest.approx(expected, abs=1e-3)
        assert expected < losses[0] - 0.1
    assert [loss for _, loss in row["curve"]] == pytest.approx(losses, abs=1e-3)
    assert wallclock.measurement_of(row) == measurement
    assert row["steps"] == STEPS and row["step_s"] == pytest.approx(row["seconds"] / STEPS, abs=1e-4)
    if padded:
        assert (row["step_s"], row["seconds"]) == (0.125, 1.0)
        assert (row["utilization"], row["late_share"], row["forward_s"]) == (0.75, 0.01, 0.016)
        assert [seconds for seconds, _ in row["curve"]] == [0.125 * step for step in range(1, STEPS + 1)]
    else:
        assert 0 < row["utilization"] < 1 and row["late_share"] is None and row["forward_s"] is None


def test_a_run_has_the_microbatches_of_its_setting() -> None:
    made = wallclock.Measurement(
        setting="pp4-padded-m8", schedule="1F1B", seed=0, optimizer="muon", lr=0.02, budget_s=1.0
    ).training(7, padded=True)
    assert (made.steps, made.microbatches, made.sequences, made.forward_s) == (7, 8, 24, 0.008)


def test_the_step_time_is_a_median_without_the_first_steps() -> None:
    # Three first steps of a second each, then 0.2 s in most rounds.
    rounds = iter([pace for pace in (0.2, 0.9, 0.2, 0.1, 0.2) for _ in SCHEDULES])

    class Fake:
        def run(self, stages: int, function: Any, run: PipelineRun) -> list[dict[str, Any]]:
            pace = next(rounds)
            times = [1.0, 2.0, 3.0, *(3.0 + pace * count for count in range(1, run.steps - 2))]
            of_all = {"times": times, "computing": {"forward": 2.0, "backward": 4.0}, "seconds": 8.0}
            first, last = of_all | {"losses": [], "late": 1}, of_all | {"losses": [2.0], "late": 2}
            return [each | {"passes": 30} for each in (first, last)]

    measurements = [
        wallclock.Measurement(
            setting="pp2", schedule=schedule, seed=seed, optimizer="muon", lr=0.02, budget_s=10.0
        )
        for seed in (0, 1)
        for schedule in SCHEDULES
    ]
    found = wallclock.timings(Fake(), measurements)
    assert list(found) == list(SCHEDULES)
    for timing in found.values():
        assert (timing.step_s, timing.utilization, timing.late_share) == pytest.approx((0.2, 0.75, 0.05))
    with pytest.raises(StopIteration):
        next(rounds)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    """Uses the running pool, and times a few steps by `Clock`."""
    monkeypatch.setattr(wallclock, "Pool", lambda sizes: contextlib.nullcontext(pool))
    monkeypatch.setattr(wallclock, "train_rank", train_by_clock)
    monkeypatch.setattr(wallclock, "_ROUNDS", 1)
    monkeypatch.setattr(wallclock, "_TIMED_STEPS", 5)


@pytest.mark.usefixtures("quick")
def test_runs_in_the_results_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    command = ["--model", "tiny", "--setting", "pp2", "--results", str(results), "--budget", "0.2", "--seeds"]
    assert wallclock.main([*command, "0"]) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    assert all(row["kind"] == "wallclock" and row["budget_s"] == 0.2 and row["steps"] >= 10 for row in rows)
    shown = capsys.readouterr().out
    assert all(f"{1e3 * row['step_s']:.1f}" in shown and f"{row['test_loss']:.3f}" in shown for row in rows)

    # An interrupted run, and a new seed.
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]) + '{"kind": "wallcl')
    measured = []

    def fake(pool: Pool, measurement: Any, timing: Any) -> dict[str, Any]:
        measured.append((measurement.schedule, measurement.seed))
        return {**rows[0], "schedule": measurement.schedule, "seed": measurement.seed}

    monkeypatch.setattr(wallclock, "measure", fake)
    assert wallclock.main([*command, "0", "1"]) == 0
    missing = [(schedule, 0) for schedule in list(SCHEDULES)[2:]]
    assert measured == [*missing, *((schedule, 1) for schedule in SCHEDULES)]
    assert len(results.read_text().splitlines()) == 10
    monkeypatch.setattr(wallclock, "Pool", None)
    assert wallclock.main([*command, "0", "1"]) == 0
    assert len(measured) == 8


@pytest.mark.usefixtures("quick")
def test_user_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    command = ["--model", "tiny", "--setting", "pp2", "--seeds", "0", "--results"]
    assert wallclock.main([*command, str(results), "--budget", "0.001"]) == 2
    assert " steps: give a larger --budget." in capsys.readouterr().err
    assert not results.exists()
    assert wallclock.main([*command, str(tmp_path / "no" / "results.jsonl")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    for wrong in (["--budget", "0"], ["--budget", "nan"], ["--lr", "-1"], ["--setting", "pp3"]):
        with pytest.raises(SystemExit, match="2"):
            wallclock.main([*command, str(results), *wrong])
