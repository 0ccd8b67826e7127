"""The stages of a run are timed in a few steps, and not afterwards."""

from types import SimpleNamespace

import pytest
import torch

from titan_async.training.telemetry import stage_times
from titan_async.training.telemetry.stage_times import SKIPPED, STEPS, StageTimer


class Clock:
    """A clock that only stages advance."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now


class Stage:
    """Advances the clock when it computes."""

    def __init__(self, index, layers, clock):
        self.stage_index = index
        self.clock = clock
        self.submod = torch.nn.Module()
        self.submod.layers = torch.nn.ModuleDict({str(i): torch.nn.Identity() for i in layers})
        self.calls = []

    def forward_one_chunk(self, microbatch, *, seconds):
        self.calls.append(("F", microbatch))
        self.clock.now += seconds
        return microbatch + 1

    def backward_one_chunk(self, seconds):
        self.clock.now += seconds

    def backward_weight_one_chunk(self, seconds):
        self.clock.now += seconds


@pytest.mark.parametrize("halves", [False, True])
def test_stages_are_timed_in_some_steps_and_then_restored(halves, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stage_times, "time", clock)
    stages = [Stage(0, [0, 1], clock), Stage(3, [6], clock)]
    stages[1].submod.lm_head = torch.nn.Linear(1, 1)
    timer = StageTimer(stages, torch.device("cpu"), warn=print)
    monkeypatch.setattr(timer, "write", lambda *_: written.append(step))
    trainer, written = SimpleNamespace(config=None, parallel_dims=None), []
    for step in range(SKIPPED + STEPS + 3):
        slow = 1 if SKIPPED <= step < SKIPPED + STEPS else 0  # earlier and later steps must not count
        for stage in stages:
            assert stage.forward_one_chunk(step, seconds=0.002 * slow) == step + 1
            stage.backward_one_chunk(0.002 * slow)
            if halves:
                stage.backward_weight_one_chunk(0.004 * slow)
        timer.after_batch(trainer)
        timer.before_pause(trainer)
    assert written == [SKIPPED + STEPS - 1]
    assert [set(vars(stage)) for stage in stages] == [{"stage_index", "clock", "submod", "calls"}] * 2
    assert stages[0].calls == [("F", step) for step in range(SKIPPED + STEPS + 3)]
    first, last = timer.seconds()
    assert (first["stage"], first["parts"]) == (0, ["layers.0", "layers.1"])
    assert (last["stage"], last["parts"]) == (3, ["layers.6", "head"])
    for entry in (first, last):
        assert entry["forward"] == pytest.approx(0.002)
        assert entry["backward"] == pytest.approx(0.006 if halves else 0.002)
