"""The output of a run: the lines of the reporter, and the unigram entropy."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from titan_async.monitor.formatting import format_duration
from titan_async.training.telemetry import reporter as reporter_module
from titan_async.training.telemetry.reporter import Reporter, StepReport
from titan_async.training.validator import AsyncValidator


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (0.4, "0:00"),
        (59.6, "1:00"),
        (83, "1:23"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (3723, "1:02:03"),
        (360_000, "100:00:00"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


class Clock:
    """A clock that is advanced by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reporter_module, "time", clock)
    # Neither the width of a terminal nor color settings may change the output to a file.
    for name in ("FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return clock


def test_lines_without_a_terminal(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(is_logging_rank=True, steps=300)
    reporter.start(0)
    clock.now += 2
    reporter.advance(1)
    reporter.step(StepReport(1, 8.11734, None, 1275.4, 2e-3))
    clock.now += 20
    reporter.advance(11)  # a step is reported when the next one has been launched
    reporter.step(StepReport(10, 7.1939, 1.3118, 34_720.6, 0.0098432))
    reporter.log("files of the run: [bold]/a very/" + "long/" * 40)
    reporter.stop()
    reporter.stop()
    # No escape sequence, no bar, no line broken at a width, no markup; remaining from this run's own pace.
    assert capsys.readouterr().out == (
        "step   1/300  loss  8.1173  grad_norm      -  tok/s 1,275  lr 2.00e-03  elapsed 0:02  "
        "remaining 9:58\n"
        "step  10/300  loss  7.1939  grad_norm  1.312  tok/s 34,721  lr 9.84e-03  elapsed 0:22  "
        "remaining 9:38\n"
        "files of the run: [bold]/a very/" + "long/" * 40 + "\n"
    )


def test_a_resumed_run_measures_time_from_its_start(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(is_logging_rank=True, steps=120)
    reporter.start(100)
    clock.now += 10
    reporter.step(StepReport(110, 5.0, 1.0, 10.0, 1e-3))
    assert capsys.readouterr().out.rstrip().endswith("elapsed 0:10  remaining 0:10")


def test_other_ranks_print_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(is_logging_rank=False, steps=3)
    reporter.start(0)
    reporter.advance(1)
    reporter.step(StepReport(1, 5.0, 1.0, 10.0, 1e-3))
    reporter.log("anything")
    reporter.stop()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_temporary_progress_bar(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    reporter = Reporter(is_logging_rank=True, steps=30)
    reporter.start(0)
    reporter.advance(15)
    reporter.log("a line above the bar")
    reporter.stop()
    out = capsys.readouterr().out
    assert "a line above the bar" in out and "15/30" in out
    assert out.rpartition("15/30")[2].count("\x1b[2K"), "the bar was left on the screen"


@pytest.fixture
def validator(monkeypatch: pytest.MonkeyPatch) -> AsyncValidator:
    """A validator with a vocabulary of 8, before its first validation."""
    validator = AsyncValidator.__new__(AsyncValidator)
    validator.tokenizer = SimpleNamespace(get_vocab_size=lambda: 8)
    validator.config = SimpleNamespace(freq=10)
    base = AsyncValidator.__mro__[1]
    monkeypatch.setattr(base, "post_dataloading_process", lambda *args: args[1:])
    return validator


def validate(
    validator: AsyncValidator, batches: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over batches of labels, by torchtitan's validator without a model."""

    def loop(self: AsyncValidator, model_parts: list, step: int) -> None:
        for labels in batches:
            self.post_dataloading_process({}, torch.tensor(labels), model_parts)

    monkeypatch.setattr(AsyncValidator.__mro__[1], "validate", loop)
    validator.validate([], 10)


def test_unigram_entropy_by_hand(validator: AsyncValidator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert math.isnan(validator.unigram_entropy())
    # Token 1 four times, 2 and 3 twice each: shares 1/2, 1/4, 1/4. Ignored labels do not count.
    validate(validator, [[[1, 1, 2], [3, IGNORE_INDEX, IGNORE_INDEX]], [[1, 1, 2, 3]]], monkeypatch)
    assert validator.unigram_entropy() == pytest.approx(1.5 * math.log(2))
    # A later validation starts counting from zero.
    validate(validator, [[[0, 1], [2, 7]]], monkeypatch)
    assert validator.unigram_entropy() == pytest.approx(math.log(4))
    validate(validator, [[[5, 5, 5]]], monkeypatch)
    assert validator.unigram_entropy() == 0


def test_validates_at_its_frequency_and_at_the_last_step(validator: AsyncValidator) -> None:
    assert [step for step in range(1, 36) if validator.should_validate(step)] == [10, 20, 30]
    validator.last_step = 35
    assert [step for step in range(1, 36) if validator.should_validate(step)] == [10, 20, 30, 35]
