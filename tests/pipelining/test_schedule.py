"""The contract of ScheduleAsync2BW beside the recurrence: gradients, losses, outputs, messages, errors."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import build_blocks, build_data, loss_fn
from titan_async.pipelining import ScheduleAsync2BW


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(4)


def build(rank, group, m, module=None, schedule_class=ScheduleAsync2BW, **options):
    module = module if module is not None else build_blocks(group.size())[rank]
    stage = PipelineStage(module, rank, group.size(), torch.device("cpu"), group=group)
    return stage, schedule_class(stage, m, loss_fn=loss_fn, **options)


def feed(stage, inputs, targets, **options):
    args = (inputs.flatten(0, 1),) if stage.is_first else ()
    return args, {"target": targets.flatten(0, 1) if stage.is_last else None, **options}


def refused(rank, group, m):
    try:
        build(rank, group, m)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("d", "m"), [(4, 1), (4, 3), (2, 1)])
def test_fewer_microbatches_than_stages_is_refused_on_every_rank(pool, d, m):
    for message in pool.run(d, refused, m):
        assert f"({m})" in message and f"({d})" in message


def wrapped(rank, group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.nn.parallel import DistributedDataParallel

    mesh = DeviceMesh("cpu", [0])

    def parts_only(module):
        fully_shard(module[0], mesh=mesh, reshard_after_forward=False)
        return module

    def reshards(module):
        fully_shard(module[0], mesh=mesh, reshard_after_forward=True)
        return fully_shard(module, mesh=mesh)

    def ignores(module):
        return fully_shard(module, mesh=mesh, ignored_params=set(module[0].parameters()))

    def offloads(module):
        return fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))

    def as_dtensors(module):
        for name, parameter in list(module[0].named_parameters()):
            whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()])
            module[0].register_parameter(name, nn.Parameter(whole))
        return module

    messages = {}
    x = torch.zeros(1, 8)

    def data_parallel(module):
        return DistributedDataParallel(module, process_group=group)

    for wrap in (
        data_parallel,
        parts_only,
        reshards,
        ignores,
        offloads,
        as_dtensors,
    ):
        module = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        try:
            build(rank, group, 1, module=module)[1].step(x, target=x)
        except NotImplementedError as error:
            messages[wrap.__name__] = str(error)
    return messages


def test_unsupported_wrappers_are_refused(pool):
    (messages,) = pool.run(1, wrapped)
    for name, words in {
        "data_parallel": "DistributedDataParallel",
        "parts_only": "whole module of a stage",
        "reshards": "reshard_after_forward=False",
        "ignores": "ignored_params",
        "offloads": "offload",
        "as_dtensors": "DTensor parameters outside of fully_shard",
    }.items():
        assert words in messages[name]


def several_stages(rank, group):
    stage, _ = build(rank, group, 1)
    with pytest.raises(NotImplementedError, match="one stage per rank"):
        ScheduleAsync2BW([stage, stage], 2, loss_fn=loss_fn)
    return True


def test_several_stages_per_rank_are_refused(pool):
    assert pool.run(1, several_stages) == [True]


def synchronous_then_async(rank, group, m, scale_grads):
    """One batch each way, from the same weights: outputs, losses and gradients."""
    results = []
    inputs, targets = build_data(1, m)
    for schedule_class in (Schedule1F1B, ScheduleAsync2BW):
        stage, schedule = build(rank, group, m, schedule_class=schedule_class, scale_grads=scale_grads)
        losses = []
        args, options = feed(stage, inputs[0], targets[0], losses=losses)
        output = schedule.step(*args, **options)
        if schedule_class is ScheduleAsync2BW:
            assert all(p.grad is None for p in stage.submod.parameters()) and not schedule.gradient_ready
            assert schedule.drain() and schedule.gradient_ready
        results.append(
            (
                None if output is None else output.detach(),
                [loss.item() for loss in losses],
                {name: p.grad for name, p in stage.submod.named_parameters()},
            )
        )
    return results


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("d", [1, 2, 4])
def test_one_batch_equals_1f1b(pool, d, scale_grads):
    for rank, (wanted, found) in enumerate(pool.run(d, synchronous_then_async, d + 1, scale_grads)):
        assert (found[0] is None) == (rank < d - 1)
        if found[0] is not None:
            torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=0)
        assert found[1] == wanted[1] and len(found[1]) == (d + 1 if rank == d - 1 else 0)
        for name, gradient in wanted[2].items():
            torch.testing.assert_close(found[2][name], gradient, rtol=1e-14, atol=1e-15)


def presplit(rank, group, m):
    inputs, targets = build_data(2, m)
    gradients = []
    for split in (False, True):
        stage, schedule = build(rank, group, m)
        for b in range(2):
            if split:
                schedule.step(
                    arg_mbs=[(x,) for x in inputs[b]] if stage.is_first else None,
                    kwarg_mbs=[{} for _ in range(m)],
                    target_mbs=list(targets[b]) if stage.is_last else None,
                    return_outputs=False,
                )
            else:
                args, options = feed(stage, inputs[b], targets[b])
                schedule.step(*args, **options)
        gradients.append([p.grad.clone() for p in stage.submod.parameters()])
        schedule.drain()
    return gradients


def test_inputs_may_be_split_already(pool):
    for whole, split in pool.run(2, presplit, 3):
        for a, b in zip(whole, split, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def accumulated(rank, group, m):
    """Gradients of two batches at fixed weights, without zero_grad between them, add up."""
    inputs, targets = build_data(2, m)
    stage, schedule = build(rank, group, m)
    single, total = [], None
    for b in range(2):
        args, options = feed(stage, inputs[b], targets[b])
        schedule.step(*args, **options)
    single.append([p.grad.clone() for p in stage.submod.parameters()])
    schedule.drain()
    total = [p.grad.clone() for p in stage.submod.parameters()]
    stage, schedule = build(rank, group, m)
    args, options = feed(stage, inputs[1], targets[1])
    schedule.step(*args, **options)
    schedule.drain()
    single.append([p.grad for p in stage.submod.parameters()])
    return single, total


def test_gradients_accumulate_until_zeroed(pool):
    for (first, second), total in pool.run(2, accumulated, 2):
        for a, b, both in zip(first, second, total, strict=True):
            torch.testing.assert_close(a + b, both)


def follows_the_module(rank, group):
    """Frozen parameters stay shared; loads between steps are read; tied parameters stay tied."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).double()
    module[0].weight.requires_grad_(False)
    module[2].weight = module[1].weight
    inputs, targets = build_data(3, 2)
    stage, schedule = build(rank, group, 2, module=module)
    reference = copy.deepcopy(module)
    losses = []
    for b in range(3):
        with torch.no_grad():
            for p, q in zip(module.parameters(), reference.parameters(), strict=True):
                if b == 1:
                    p.add_(0.125)  # an in-place write
                elif b == 2:
                    p.data = p.data * 2  # a new storage
                q.copy_(p)
        schedule.step(inputs[b].flatten(0, 1), target=targets[b].flatten(0, 1), losses=losses)
        wanted = [loss_fn(reference(x), y) for x, y in zip(inputs[b], targets[b], strict=True)]
        torch.testing.assert_close(torch.stack(losses), torch.stack(wanted), rtol=0, atol=1e-14)
        reference.zero_grad()
        (sum(wanted) / 2).backward()
        if b < 2:
            module.zero_grad()
    schedule.drain()
    assert module[0].weight.grad is None and module[2].weight is module[1].weight
    return True


def test_weights_are_read_as_they_are(pool):
    assert pool.run(1, follows_the_module) == [True]


def storage_after_drains(rank, group, m):
    """Whether the parameters are back in their first storage whenever the pipeline has been drained."""
    inputs, targets = build_data(6, m)
    stage, schedule = build(rank, group, m)
    first = [p.data_ptr() for p in stage.submod.parameters()]
    found = []
    for b in range(6):
        args, options = feed(stage, inputs[b], targets[b])
        schedule.step(*args, **options)
        if b in (0, 1, 3, 5):
            schedule.drain()
            found.append([p.data_ptr() for p in stage.submod.parameters()] == first)
    return found


@pytest.mark.parametrize("d", [1, 2, 4])
def test_drained_parameters_are_in_their_first_storage(pool, d):
    """torchtitan's checkpointer keeps the tensors of its first state_dict, and writes into them at a save
    if the parameters have moved: into a version of the weights that is still to be used."""
    assert all(all(found) for found in pool.run(d, storage_after_drains, d))


def memory(rank, group, m):
    """Bytes of weight storage held at the end of a step, in copies of the weights."""
    inputs, targets = build_data(3, m)
    stage, schedule = build(rank, group, m)
    for b in range(3):
        args, options = feed(stage, inputs[b], targets[b])
        schedule.step(*args, **options)
    size = sum(p.untyped_storage().nbytes() for p in stage.submod.parameters())
    storages = {}
    for weight in schedule._executor.versions.weights._weights:
        for p in (weight.master, *weight.shadows):
            storages[p.untyped_storage().data_ptr()] = p.untyped_storage().nbytes()
    schedule.drain()
    return sum(storages.values()) / size


def test_two_copies_of_the_weights_and_one_on_the_last_stage(pool):
    assert pool.run(2, memory, 2) == [2.0, 1.0]


def recurrent(rank, group):
    """nn.LSTM keeps its own list of weights, which must follow the version too."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    module = Net().double()
    stage, schedule = build(rank, group, 2, module=module)
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    reference = copy.deepcopy(module)
    schedule.step(x if stage.is_first else None, target=x if stage.is_last else None)
    schedule.drain()
    sum(loss_fn(reference(mb), mb) / 2 for mb in x.chunk(2)).backward()
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    return True


def test_modules_with_their_own_weight_lists(pool):
    assert pool.run(1, recurrent) == [True]


def dropped(rank, group, m):
    import gc

    inputs, targets = build_data(3, m)
    gc.freeze()  # otherwise each collection would copy the pages that this process shares with others
    for _ in range(3):
        stage, schedule = build(rank, group, m)
        for b in range(3):
            args, options = feed(stage, inputs[b], targets[b])
            schedule.step(*args, **options)
        del stage, schedule
        gc.collect()
    gc.unfreeze()
    return True


def test_a_schedule_may_be_dropped_with_batches_in_flight(pool):
    """gloo cancels a send whose handle is freed, and the neighbor would wait for it forever."""
    assert pool.run(4, dropped, 4) == [True] * 4


class Attributed(nn.Module):
    """Reads an attribute of its weight, as layers of quantization or tensor parallelism do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8, dtype=torch.float64))
        self.weight.factor = 3.0

    def forward(self, x):
        return x @ self.weight * self.weight.factor


class Bypassing(nn.Module):
    """Keeps its weight in a list as well."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8, dtype=torch.float64))
        self.hidden = [self.weight]

    def forward(self, x):
        return x @ self.hidden[0]


class Odd(nn.Parameter):
    pass


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.fails = nn.Linear(8, 8, dtype=torch.float64), False

    def forward(self, x):
        if self.fails:
            raise ArithmeticError("as asked")
        return self.linear(x)


def unsupported_modules(rank, group):
    inputs, targets = build_data(2, 2)

    def steps(module, between=lambda module, schedule: None):
        stage, schedule = build(rank, group, 2, module=module)
        args, options = feed(stage, inputs[0], targets[0])
        losses = []
        try:
            schedule.step(*args, losses=losses, **options)
            between(module, schedule)
            schedule.step(*args, **options)
        except (RuntimeError, NotImplementedError, ArithmeticError) as error:
            return f"{type(error).__name__}: {error}"
        return losses[0].item()

    found = {"attribute": steps(Attributed())}
    module = Attributed()
    module.weight.factor = 1.0
    found["other attribute"] = steps(module)

    odd = nn.Linear(8, 8, dtype=torch.float64)
    odd.weight = Odd(odd.weight.detach())
    found["subclass"] = steps(odd)

    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    tied[1].weight.data = tied[0].weight.data
    found["tied data"] = steps(tied)
    found["bypass"] = steps(Bypassing())

    hooked = nn.Linear(8, 8, dtype=torch.float64)
    hooked.weight.register_hook(lambda gradient: gradient * 0)
    found["hook"] = steps(hooked)

    def add_hook(module, schedule):
        module.bias.register_post_accumulate_grad_hook(lambda p: None)

    found["later hook"] = steps(nn.Linear(8, 8, dtype=torch.float64), add_hook)

    def assign(module, schedule):
        module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}, assign=True)
        schedule.drain()

    found["assign"] = steps(nn.Linear(8, 8, dtype=torch.float64), assign)

    def convert(module, schedule):
        module.float()

    found["dtype"] = steps(nn.Linear(8, 8, dtype=torch.float64), convert)

    def fail(module, schedule):
        module.fails = True
        args, options = feed(schedule._stage, inputs[0], targets[0])
        before = module.linear.weight
        try:
            schedule.step(*args, **options)
        except RuntimeError as error:
            found["failure"] = str(error.__cause__)
        assert module.linear.weight is before
        module.fails = False
        for call in (schedule.drain, schedule.state_dict):
            try:
                call()
            except RuntimeError as error:
                found[call.__name__] = str(error)

    found["after a failure"] = steps(Failing(), fail)
    return found


def test_unsupported_modules_are_refused(pool):
    (found,) = pool.run(1, unsupported_modules)
    inputs, targets = build_data(2, 2)
    assert found["attribute"] == pytest.approx(float(loss_fn(inputs[0][0] * 3, targets[0][0])))
    assert found["other attribute"] == pytest.approx(float(loss_fn(inputs[0][0], targets[0][0])))
    for name, words in {
        "subclass": ["NotImplementedError", "weight is a Odd"],
        "tied data": ["NotImplementedError", "0.weight and 1.weight share storage"],
        "bypass": ["RuntimeError", "weight from outside"],
        "hook": ["NotImplementedError", "weight has hooks"],
        "later hook": ["NotImplementedError", "bias has hooks"],
        "assign": ["RuntimeError", "replaced", "new schedule"],
        "dtype": ["RuntimeError", "moved", "new schedule"],
        "failure": ["as asked"],
        "drain": ["an earlier step failed", "new schedule"],
        "state_dict": ["an earlier step failed"],
        "after a failure": ["RuntimeError", "an earlier step failed"],
    }.items():
        for word in words:
            assert word in found[name], (name, found[name])


def saved_weights(rank, group):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = build_blocks(1)[0]
    wrapped = nn.Sequential()
    wrapped.add_module("block", checkpoint_wrapper(build_blocks(1)[0]))
    wrapped.compile(backend="eager")
    _, schedule = build(rank, group, 1, module=wrapped)
    names = [f"block.{name}" for name, _ in plain.named_parameters()]
    state = schedule.state_dict()
    assert list(state) == names
    mistakes = []
    for wrong in ({**state, names[0]: torch.zeros(3)}, {names[0]: state[names[0]]}):
        try:
            schedule.load_state_dict(wrong)
        except (ValueError, KeyError) as error:
            mistakes.append(str(error))
    assert all(torch.equal(value, state[name]) for name, value in schedule.state_dict().items())
    return mistakes


def test_state_has_plain_names_and_is_refused_if_it_does_not_fit(pool):
    """Activation checkpointing may be turned on between a save and a load."""
    (mistakes,) = pool.run(1, saved_weights)
    assert "(8,)" in mistakes[0] and "(3,)" in mistakes[0] and len(mistakes) == 2


def evaluate_through_identities(rank, group):
    """A stage whose output is its receive buffer, which the next microbatches need."""
    module = nn.Identity() if 0 < rank < 3 else nn.Linear(8, 8).double()
    stage, schedule = build(rank, group, 4, module=module)
    x = torch.arange(12 * 8, dtype=torch.float64).view(12, 8)
    if rank in (0, 3):
        nn.init.eye_(module.weight)
        nn.init.zeros_(module.bias)
    with torch.no_grad():
        output = schedule.eval(
            arg_mbs=[(row[None],) for row in x] if stage.is_first else None,
            kwarg_mbs=[{}] * 12,
            target_mbs=list(x[:, None]) if stage.is_last else None,
        )
    return None if output is None else bool((output == x).all())


def test_an_evaluation_does_not_overwrite_pending_sends(pool):
    """Also with another number of microbatches than in training, if inputs are split."""
    assert pool.run(4, evaluate_through_identities) == [None, None, None, True]


class Bridge(torch.autograd.Function):
    """A loss whose gradient is known already."""

    @staticmethod
    def forward(ctx, hidden, gradient, loss):
        ctx.save_for_backward(gradient)
        return loss.detach().clone()

    @staticmethod
    def backward(ctx, unit):
        return ctx.saved_tensors[0], None, None


class Headed(nn.Module):
    """A last stage whose loss applies its head and runs that backwards, as torchtitan's chunked losses do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.body(x)

    def loss(self, hidden, target):
        leaf = hidden.detach().requires_grad_()
        loss = nn.functional.mse_loss(self.head(leaf), target, reduction="sum")
        loss.backward()
        return Bridge.apply(hidden, leaf.grad, loss.detach())


def loss_that_runs_backwards(rank, group):
    torch.manual_seed(0)
    first, last = nn.Linear(3, 3), Headed()
    x, y = torch.randn(2, 4, 3)
    whole = copy.deepcopy((first, last))
    nn.functional.mse_loss(whole[1].head(whole[1](whole[0](x))), y, reduction="sum").backward()
    module = (first, last)[rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleAsync2BW(stage, 2, loss_fn=last.loss, scale_grads=False)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)  # gradients accumulate
    args, options = ((x,), {}) if stage.is_first else ((), {"target": y})
    schedule.step(*args, **options)
    schedule.drain()
    return [
        float((own.grad - 1 - other.grad).abs().max())
        for own, other in zip(module.parameters(), whole[rank].parameters(), strict=True)
    ]


def test_a_loss_may_run_backwards_itself(pool):
    for differences in pool.run(2, loss_that_runs_backwards):
        assert max(differences) < 1e-5
