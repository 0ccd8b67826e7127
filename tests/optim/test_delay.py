"""`DelayedGradients` against independent loops of the recurrence, bitwise."""

import copy
import inspect
import textwrap

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.support.delay import (
    BATCHES,
    DEPTH,
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
from tests.support.recurrence import WIDTH, build_data, loss_fn, run_recurrence
from tests.support.selection import slow
from titan_async.optim import DelayedGradients, pipedream_delays


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_norm", [None, 0.2])
@pytest.mark.parametrize("delay", [0, 1, 2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follows_the_recurrence(name, delay, max_norm):
    module = model()
    optimizer = OPTIMIZERS[name](module)
    losses = train(module, DelayedGradients(module, delay), optimizer, range(BATCHES), max_norm)
    delays = dict.fromkeys(names(module), delay)
    weights, expected = oracle(OPTIMIZERS[name], delays, max_norm)
    assert difference(module, weights) == 0
    assert losses == expected
    other, _ = oracle(OPTIMIZERS[name], dict.fromkeys(names(module), 1 if delay != 1 else 2), max_norm)
    assert difference(module, other) > 1e-4


@pytest.mark.parametrize("name", PLAIN)
def test_delay_0_is_bitwise_equal_to_the_plain_loop(name):
    plain, module = model(), model()
    optimizer = OPTIMIZERS[name](plain)
    inputs, targets = build_data(BATCHES, MICROBATCHES)
    for b in range(BATCHES):
        batch_loss(plain, inputs[b], targets[b])
        optimizer.step()
        optimizer.zero_grad()
    delayed = DelayedGradients(module, 0)
    train(module, delayed, OPTIMIZERS[name](module), range(BATCHES))
    assert difference(module, plain.state_dict()) == 0
    assert not any(delayed.state_dict()["weights"].values())


def test_agrees_with_the_oracle_of_the_schedule():
    """The oracle of `ScheduleAsync2BW` sums gradients in another order."""
    module = model()
    train(module, DelayedGradients(module, 1), PLAIN["adamw"](module), range(BATCHES))
    weights, _ = run_recurrence(DEPTH, MICROBATCHES, BATCHES, PLAIN["adamw"])
    assert difference(module, weights) < 1e-12


def test_scalar_quadratic_follows_its_recurrence():
    """w[b+1] = w[b] - lr a w[max(b-k, 0)], in Python floats."""
    for delay in range(4):
        weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        holder = nn.ParameterList([weight])
        optimizer, delayed = torch.optim.SGD([weight], lr=0.25), DelayedGradients(holder, delay)
        expected = [1.0]
        for b in range(12):
            with delayed.batch():
                (0.5 * weight.square()).backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(expected[-1] - 0.25 * expected[max(b - delay, 0)])
            assert weight.item() == expected[-1]


@pytest.mark.parametrize("name", ["sgd", "muon", "adamw with feedback"])
def test_one_delay_per_parameter(name):
    """PipeDream's delays, and delays that no pipeline has."""
    module = model()
    by_depth = pipedream_delays(list(module))
    mixed = {param: i % 4 for i, param in enumerate(module.parameters())}
    for delays in (by_depth, mixed):
        module = model()
        named = {
            name: delays[param] for (name, _), param in zip(module.named_parameters(), delays, strict=True)
        }
        assert set(named.values()) == ({0, 1, 2} if delays is by_depth else {0, 1, 2, 3})
        delayed = DelayedGradients(module, {p: named[n] for n, p in module.named_parameters()})
        assert delayed.delays == named
        losses = train(module, delayed, OPTIMIZERS[name](module), range(BATCHES))
        weights, expected = oracle(OPTIMIZERS[name], named)
        assert difference(module, weights) == 0 and losses == expected


def test_pipedream_delays_fall_to_zero_at_the_last_stage():
    module = model(3)
    delays = pipedream_delays([module[0], list(module[1].parameters()), module[2]])
    for depth, expected in enumerate((2, 1, 0)):
        assert {delays[param] for param in module[depth].parameters()} == {expected}
    assert len(delays) == len(list(module.parameters()))
    with pytest.raises(ValueError, match=r"shape \[8\] is in the stages 0 and 2"):
        pipedream_delays([[module[0].scale], [], [module[0].scale]])
    repeated = pipedream_delays([[module[0].scale, module[0].scale], module[1]])
    assert repeated[module[0].scale] == 1


def mixed_versions(module, delayed, optimizer, batches):
    """A wrong loop: the forward reads the old weights, the backward the newest."""
    inputs, targets = build_data(BATCHES, MICROBATCHES)
    for b in batches:
        newest = [param.detach().clone() for param in module.parameters()]
        with delayed.batch():
            loss = sum(loss_fn(module(x), y) for x, y in zip(inputs[b], targets[b], strict=True))
            for param, value in zip(module.parameters(), newest, strict=True):
                param.data = value  # autograd does not detect this
            (loss / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", PLAIN)
def test_mixed_versions_fail_the_check(name):
    module = model()
    mixed_versions(module, DelayedGradients(module, 1), OPTIMIZERS[name](module), range(BATCHES))
    weights, _ = oracle(OPTIMIZERS[name], dict.fromkeys(names(module), 1))
    assert difference(module, weights) > 1e-6


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_recomputation_reads_the_weights_of_its_forward(recompute):
    module = model(recompute=recompute)
    train(module, DelayedGradients(module, 2), PLAIN["fused_adamw"](module), range(BATCHES))
    weights, _ = oracle(PLAIN["fused_adamw"], dict.fromkeys(names(module), 2))
    assert difference(module, weights) == 0


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
def test_compiled_model_is_not_recompiled(backend):
    torch._dynamo.reset()
    module = model(2)
    compiled = torch.compile(module, backend=backend)
    delayed = DelayedGradients(compiled, 2)
    assert list(delayed.delays) == names(module)
    optimizer = PLAIN["fused_adamw"](module)
    train(compiled, delayed, optimizer, range(1))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train(compiled, delayed, optimizer, range(1, BATCHES))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    eager = model(2)
    train(eager, DelayedGradients(eager, 2), PLAIN["fused_adamw"](eager), range(BATCHES))
    assert difference(eager, module.state_dict()) < 1e-12


def test_buffers_are_not_delayed():
    """The statistics of batch normalization include all batches so far."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).double()

    inputs, targets = build_data(BATCHES, 1)
    module, expected = build(), build()
    delayed, optimizer = DelayedGradients(module, 1), PLAIN["adamw"](module)
    other = PLAIN["adamw"](expected)
    history = [{n: p.detach().clone() for n, p in expected.named_parameters()}]
    for b in range(BATCHES):
        with delayed.batch():
            loss_fn(module(inputs[b, 0]), targets[b, 0]).backward()
        optimizer.step()
        optimizer.zero_grad()

        stale = {n: p.requires_grad_() for n, p in copy.deepcopy(history[max(b - 1, 0)]).items()}
        loss_fn(functional_call(expected, stale, (inputs[b, 0],)), targets[b, 0]).backward()
        for name, param in expected.named_parameters():
            param.grad = stale[name].grad
        other.step()
        history.append({n: p.detach().clone() for n, p in expected.named_parameters()})
        assert difference(module, expected.state_dict()) == 0
    assert module[1].num_batches_tracked == BATCHES


def test_weights_are_old_inside_a_batch_and_newest_between_batches():
    module = model()
    delayed, optimizer = DelayedGradients(module, 2), PLAIN["sgd"](module)
    inputs, targets = build_data(BATCHES, MICROBATCHES)
    addresses = [param.data_ptr() for param in module.parameters()]
    history = []
    for b in range(BATCHES):
        history.append(copy.deepcopy(module.state_dict()))
        with delayed.batch():
            module.eval()
            assert difference(module, history[max(b - 2, 0)]) == 0
            batch_loss(module, inputs[b], targets[b])
            module.train()
        assert difference(module, history[b]) == 0
        optimizer.step()
        optimizer.zero_grad()
        assert difference(module, history[b]) > 0
    assert [param.data_ptr() for param in module.parameters()] == addresses


def test_tied_and_frozen_weights():
    def build():
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))
        module[2].weight = module[0].weight
        module[1].requires_grad_(False)
        return module

    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    module, newest, reader = build(), build(), build()
    delayed, optimizer = DelayedGradients(module, 2), torch.optim.SGD(module.parameters(), 0.1)
    other = torch.optim.SGD(newest.parameters(), 0.1)
    assert list(delayed.delays) == ["0.weight", "0.bias", "2.bias"]
    history = [copy.deepcopy(newest.state_dict())]
    for b in range(6):
        with delayed.batch():
            module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reader.load_state_dict(history[max(b - 2, 0)])
        reader.zero_grad()
        reader(x).square().mean().backward()
        for param, read in zip(newest.parameters(), reader.parameters(), strict=True):
            param.grad = read.grad
        other.step()
        history.append(copy.deepcopy(newest.state_dict()))
    assert difference(module, history[-1]) == 0
    assert list(delayed.state_dict()["weights"]) == list(delayed.delays)


def test_docstring_example_learns():
    _, _, block = inspect.getdoc(DelayedGradients).partition("delay:\n\n")
    lines = block.splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("    "))
    namespace = {}
    exec(textwrap.dedent("\n".join(lines[:end])), namespace)
    assert namespace["delayed"].delays == {"weight": 1, "bias": 1}
    assert namespace["loss"].item() < 0.05  # about 8 before training
