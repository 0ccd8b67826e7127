"""State, failures and invalid uses of `DelayedGradients`."""

import copy
import io

import pytest
import torch
from torch import nn

from tests.support.delay import (
    BATCHES,
    MICROBATCHES,
    OPTIMIZERS,
    PLAIN,
    batch_loss,
    difference,
    model,
    names,
    oracle,
    train,
)
from tests.support.recurrence import build_data, loss_fn
from titan_async.optim import DelayedGradients, pipedream_delays


@pytest.mark.covering(1)
@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("name", ["sgd", "muon with feedback"])
@pytest.mark.parametrize("saved_after", range(6))
def test_resuming_is_bitwise_exact(name, delay, saved_after):
    module = model()
    delayed, optimizer = DelayedGradients(module, delay), OPTIMIZERS[name](module)
    train(module, delayed, optimizer, range(saved_after))
    file = io.BytesIO()
    torch.save([module.state_dict(), optimizer.state_dict(), delayed.state_dict()], file)
    train(module, delayed, optimizer, range(saved_after, BATCHES))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = model()
    again, other = DelayedGradients(resumed, delay), OPTIMIZERS[name](resumed)
    # Earlier state must have no effect.
    train(resumed, again, other, range(6, 8))
    other = OPTIMIZERS[name](resumed)
    for each, state in zip((resumed, other, again), saved, strict=True):
        each.load_state_dict(state)
    train(resumed, again, other, range(saved_after, BATCHES))
    assert difference(resumed, module.state_dict()) == 0


def test_state_is_not_modified_and_loading_copies_it():
    module = model()
    delayed, optimizer = DelayedGradients(module, 2), PLAIN["fused_adamw"](module)
    train(module, delayed, optimizer, range(3))
    state = delayed.state_dict()
    before = copy.deepcopy(state)
    other = DelayedGradients(module, 2)
    other.load_state_dict(state)
    train(module, delayed, optimizer, range(3, 6))
    for name, versions in before["weights"].items():
        assert len(versions) == 2
        for i, version in enumerate(versions):
            assert torch.equal(version, state["weights"][name][i])
            state["weights"][name][i].zero_()
            assert torch.equal(version, other.state_dict()["weights"][name][i])


def test_keeps_as_many_copies_as_the_delay():
    module = model()
    delayed, optimizer = DelayedGradients(module, 3), PLAIN["sgd"](module)

    def copies():
        storages = {v.data_ptr() for w in delayed._weights for v in w.versions}
        return len(storages) / len(list(module.parameters()))

    for b in range(6):
        with delayed.batch():
            assert copies() == min(b + 1, 3)
            batch_loss(module, *(data[b] for data in build_data(BATCHES, MICROBATCHES)))
        assert copies() == min(b + 1, 3)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3, 5])
def test_batch_that_raises_is_not_counted(fails_at):
    module = model()
    delayed, optimizer = DelayedGradients(module, 2), PLAIN["adamw"](module)
    train(module, delayed, optimizer, range(fails_at))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ZeroDivisionError), delayed.batch():
        raise ZeroDivisionError
    assert difference(module, before) == 0
    train(module, delayed, optimizer, range(fails_at, BATCHES))
    weights, _ = oracle(PLAIN["adamw"], dict.fromkeys(names(module), 2))
    assert difference(module, weights) == 0


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_backward_after_the_batch_raises(batches):
    module = model()
    delayed, optimizer = DelayedGradients(module, 1), PLAIN["sgd"](module)
    train(module, delayed, optimizer, range(batches))
    inputs, targets = build_data(BATCHES, MICROBATCHES)
    with delayed.batch():
        loss = loss_fn(module(inputs[0, 0]), targets[0, 0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["sgd", "fused_adamw", "muon with feedback"])
@pytest.mark.parametrize("delay", [0, 2])
def test_step_inside_a_batch_raises_and_restores_the_newest_weights(name, delay):
    module, other = model(), model()
    delayed, optimizer = DelayedGradients(module, delay), OPTIMIZERS[name](module)
    train(module, delayed, optimizer, range(3))
    before = copy.deepcopy(module.state_dict())
    with (
        pytest.raises(RuntimeError, match=r"step\(\) inside batch\(\).*after the with block"),
        delayed.batch(),
    ):
        optimizer.step()
    assert difference(module, before) == 0
    with delayed.batch():
        OPTIMIZERS[name](other).step()  # of another model
    optimizer.step()


def test_calls_inside_a_batch_raise():
    module = model()
    delayed = DelayedGradients(module)
    with delayed.batch():
        for call in (delayed.batch().__enter__, delayed.state_dict, lambda: delayed.load_state_dict({})):
            with pytest.raises(
                RuntimeError, match=r"old weights inside batch\(\): exit the with block first"
            ):
                call()
    with delayed.batch():
        pass


@pytest.mark.parametrize("delay", [-1, 1.0, True, None, "1"])
def test_invalid_delay_raises(delay):
    with pytest.raises(ValueError, match="must be an integer, 0 or more"):
        DelayedGradients(model(), delay)
    module = model()
    with pytest.raises(ValueError, match="must be an integer, 0 or more"):
        DelayedGradients(module, dict.fromkeys(module.parameters(), delay))


def test_delays_must_match_the_parameters_of_the_model():
    module, other = model(), model(1)
    delays = pipedream_delays(list(module))
    with pytest.raises(ValueError, match=r"shape \[\d+(, \d+)?\], which is not in the model"):
        DelayedGradients(module, delays | pipedream_delays([other]))
    del delays[module[1].up.bias]
    with pytest.raises(ValueError, match=r"no delay is given for parameter '1.up.bias' of shape \[16\]"):
        DelayedGradients(module, delays)
    module[1].up.bias.requires_grad_(False)
    assert "1.up.bias" not in DelayedGradients(module, delays).delays


def replaced(module):
    module[0].scale = nn.Parameter(module[0].scale.detach().clone())


@pytest.mark.parametrize(
    "change",
    [
        replaced,
        lambda module: module[0].scale.requires_grad_(False),
        lambda module: module.append(nn.Linear(2, 2)),
        lambda module: module.float(),
        lambda module: setattr(module[0].scale, "data", torch.zeros(3, dtype=torch.float64)),
    ],
)
def test_changed_parameters_raise(change):
    module = model()
    delayed = DelayedGradients(module)
    train(module, delayed, PLAIN["sgd"](module), range(2))
    change(module)
    with (
        pytest.raises(
            RuntimeError, match="were replaced, frozen, added, moved or converted.*create a new one"
        ),
        delayed.batch(),
    ):
        pass


def test_state_that_does_not_match_raises_without_changes():
    module = model()
    delayed = DelayedGradients(module, 2)
    train(module, delayed, PLAIN["sgd"](module), range(4))
    good = delayed.state_dict()
    before = copy.deepcopy(good["weights"])
    last = list(delayed.delays)[-1]

    def changed(**changes):
        return {"delays": good["delays"], "weights": good["weights"] | changes}

    with pytest.raises(ValueError, match=r"saved with the delays \{0.scale: 1, .*, \.\.\.\}.*0.scale: 2"):
        delayed.load_state_dict(DelayedGradients(module, 1).state_dict())
    versions = good["weights"][last]
    for wrong in (versions[:1], [], versions * 2):
        with pytest.raises(ValueError, match="incomplete"):
            delayed.load_state_dict(changed(**{last: wrong}))
    for wrong in (torch.zeros(3, dtype=torch.float64), versions[0].float()):
        with pytest.raises(ValueError, match=r"version of shape .* does not fit parameter"):
            delayed.load_state_dict(changed(**{last: [wrong, wrong]}))
    for name, kept in before.items():
        for one, two in zip(kept, delayed.state_dict()["weights"][name], strict=True):
            assert torch.equal(one, two)
