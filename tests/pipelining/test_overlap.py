"""Overlapped pairs: turns, errors, random numbers, and thread-local state."""

import contextvars
import gc
import signal
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from titan_async.pipelining import hand_over
from titan_async.pipelining.overlap import Overlap

CPU = torch.device("cpu")


class RecordedState:
    """Records which half resumes."""

    def __init__(self):
        self.entered = []

    def leave(self, half):
        assert self.entered[-1:] in ([half], []), "the half that stops is not the one that resumed"

    def enter(self, half):
        self.entered.append(half)


def half(done, name, stops):
    def run():
        for stop in range(stops):
            done.append(f"{name}{stop}")
            hand_over()
        done.append(f"{name}{stops}")

    return run


@pytest.mark.parametrize(
    ("of_forward", "of_backward", "order"),
    [
        (2, 2, "B0 F0 B1 F1 B2 F2"),
        (0, 2, "B0 F0 B1 B2"),
        (3, 0, "B0 F0 F1 F2 F3"),
        (1, 3, "B0 F0 B1 F1 B2 B3"),
    ],
)
def test_halves_take_strict_turns_and_the_longer_one_continues_alone(of_forward, of_backward, order):
    overlap, done = Overlap(CPU), []
    for _ in range(2):
        done.clear()
        overlap.run(half(done, "F", of_forward), half(done, "B", of_backward), RecordedState())
        assert done == order.split()


def test_handing_over_outside_of_a_pair_does_nothing():
    hand_over()


def test_each_half_resumes_with_its_own_state():
    halves, done = RecordedState(), []
    Overlap(CPU).run(half(done, "F", 2), half(done, "B", 1), halves)
    assert halves.entered == [1, 0, 1, 0, 0]  # the last one: the forward's is shown afterwards


@pytest.mark.parametrize("failing", ["F", "B"])
@pytest.mark.parametrize("stops", [0, 1])
def test_an_error_ends_the_other_half_and_is_raised(failing, stops):
    done = []

    def fails():
        half(done, failing, stops)()
        raise ValueError("lost")

    other = half(done, "other", 5)
    forward, backward = (fails, other) if failing == "F" else (other, fails)
    overlap = Overlap(CPU)
    with pytest.raises(ValueError, match="lost"):
        overlap.run(forward, backward, RecordedState())
    assert "other5" not in done
    done.clear()
    overlap.run(half(done, "F", 1), half(done, "B", 1), RecordedState())
    assert done == ["B0", "F0", "B1", "F1"]


def test_an_interrupt_does_not_wait_for_a_backward_that_is_stuck():
    """Such as one that waits for the tokens of a dead rank: only the main thread receives signals."""
    stuck, resumes, ended, errors = threading.Event(), threading.Event(), threading.Event(), []

    def backward():
        stuck.set()
        resumes.wait()
        try:
            hand_over()
        except BaseException as error:
            errors.append(type(error).__name__)
            raise
        finally:
            ended.set()

    def interrupt():
        stuck.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        Overlap(CPU).run(hand_over, backward, RecordedState())
    interrupter.join()
    hand_over()  # a later forward is not part of the pair
    resumes.set()
    assert ended.wait(60)
    assert errors == ["_OtherHalfError"]


def test_random_numbers_are_those_of_one_half_after_the_other():
    weight = torch.ones(64, requires_grad=True)

    def layer(x):
        x = torch.dropout(x, 0.5, train=True)
        hand_over()  # in the recomputation too, which has rewound the generator by then
        return torch.dropout(x * weight, 0.5, train=True)

    def train(run):
        torch.manual_seed(0)
        earlier = checkpoint(layer, torch.ones(64), use_reentrant=False)
        found = {}

        def forward():
            found["forward"] = layer(torch.ones(64)).detach()

        def backward():
            (found["gradient"],) = torch.autograd.grad(earlier.sum(), weight)

        run(forward, backward)
        return found | {"later": torch.rand(4)}

    expected = train(lambda forward, backward: (forward(), backward()))
    found = train(lambda forward, backward: Overlap(CPU).run(forward, backward, RecordedState()))
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def test_a_second_pair_at_the_same_time_is_refused():
    overlap = Overlap(CPU)
    with pytest.raises(RuntimeError, match="one overlapped pair at a time"):
        overlap.run(
            lambda: Overlap(CPU).run(hand_over, hand_over, RecordedState()), hand_over, RecordedState()
        )
    overlap.run(hand_over, hand_over, RecordedState())


def test_options_of_the_calling_context_hold_in_the_backward():
    variable = contextvars.ContextVar("option", default=0)
    variable.set(3)
    seen = []
    Overlap(CPU).run(lambda: None, lambda: seen.append(variable.get()), RecordedState())
    assert seen == [3]


def test_autocast_around_a_pair_holds_in_the_backward():
    seen = []
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        Overlap(CPU).run(
            lambda: None, lambda: seen.append(torch.ones(2, 2) @ torch.ones(2, 2)), RecordedState()
        )
    Overlap(CPU).run(lambda: None, lambda: seen.append(torch.ones(2, 2) @ torch.ones(2, 2)), RecordedState())
    assert [product.dtype for product in seen] == [torch.float16, torch.float32]


def test_the_thread_ends_with_its_owner():
    overlap, threads = Overlap(CPU), []
    overlap.run(lambda: None, lambda: threads.append(threading.current_thread()), RecordedState())
    assert threads[0] is not threading.current_thread()
    del overlap
    gc.collect()
    threads[0].join(60)
    assert not threads[0].is_alive()
