"""Inputs of stages: their own tensors, of the shapes that the pipeline was built for."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from tests.pipelining import test_schedule
from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import WIDTH, build_blocks, loss_fn
from tests.support.training import environment
from tests.support.waiting import until
from titan_async.pipelining import ScheduleAsync2BW

M = 4
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(4)


build = partial(test_schedule.build, m=M)


def data(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)


def feed(stage, seed, *shape):
    inputs, targets = data(seed, *shape)
    return ((inputs,) if stage.is_first else ()), {"target": targets if stage.is_last else None}


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def reference(stages, seed, *shape, dim=0, m=M, halved=False):
    """Gradients of each stage for one batch, by autograd over the whole model."""
    blocks = build_blocks(stages)
    inputs, targets = data(seed, *shape)
    for x, y in zip(inputs.tensor_split(m, dim), targets.tensor_split(m, dim), strict=True):
        for index, block in enumerate(blocks):
            if halved and index:
                x.register_hook(lambda gradient: gradient / 2)
            x = block(x)
        (loss_fn(x, y) / m).backward()
    return [gradients(block) for block in blocks]


def assert_same(results, *expected):
    for rank, found in enumerate(results):
        for batch, of_stages in zip(found, expected, strict=True):
            torch.testing.assert_close(batch, of_stages[rank])


class Keeping(nn.Module):
    """Halves the gradient of its input by a hook, and keeps inputs and gradients, with a copy of each."""

    def __init__(self, block):
        super().__init__()
        self.block, self.kept, self.fired = block, [], 0

    def forward(self, x):
        self.keep(x)
        if x.requires_grad and not x._is_view():
            x.register_hook(self.halve)
        output = self.block(x)
        if output.requires_grad:
            output.register_hook(self.keep)
        return output

    def halve(self, gradient):
        self.fired += 1
        return gradient / 2

    def keep(self, tensor):
        if not tensor.is_meta:
            self.kept.append((tensor, tensor.detach().clone()))


def keeping(rank, group, batches):
    block = build_blocks(group.size())[rank]
    module = Keeping(block)
    stage, schedule = build(rank, group, module=module)
    found = []
    for seed in range(batches):
        args, options = feed(stage, seed, 8)
        schedule.step(*args, **options)
        if schedule.gradient_ready:
            found.append(gradients(block))
            block.zero_grad()
    schedule.drain()
    found.append(gradients(block))
    # torch infers shapes from tensors with uninitialized memory, which may hold NaN.
    unchanged = all(torch.allclose(*both, rtol=0, atol=0, equal_nan=True) for both in module.kept)
    return found, module.fired, len(module.kept), unchanged


@pytest.mark.parametrize("stages", [2, 3])
def test_receive_buffers_are_not_reused(pool: WorkerPool, stages: int) -> None:
    batches = 4
    results = pool.run(stages, keeping, batches)
    assert_same(
        [found for found, *_ in results],
        *(reference(stages, seed, 8, halved=True) for seed in range(batches)),
    )
    for rank, (_, fired, kept, unchanged) in enumerate(results):
        # One more to infer shapes.
        assert fired == (batches * M + 1 if rank else 0)
        assert unchanged and kept >= 2 * batches * M


def identity(rank, group):
    """Outputs of a last stage that returns its input, all of them kept."""
    stage, schedule = build(rank, group, module=nn.Identity() if rank else None)
    outputs = []
    with torch.no_grad():
        for seed in range(3):
            outputs.append(schedule.eval(*feed(stage, seed, 8)[0]))
    return outputs


def test_outputs_of_a_last_stage_that_returns_its_input_are_kept(pool: WorkerPool) -> None:
    outputs = pool.run(2, identity)[1]
    block = build_blocks(2)[0]
    with torch.no_grad():
        for seed, output in enumerate(outputs):
            torch.testing.assert_close(output, block(data(seed, 8)[0]))


class Tied(nn.Module):
    """The first stage also sends a weight and its input; the last waits for the first one's update."""

    def __init__(self, block, updated=None):
        super().__init__()
        self.block, self.updated, self.seen = block, updated, []
        if updated is None:
            self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x, weight=None, first=None):
        if self.updated is None:
            return self.block(x.clone()), self.weight, x
        self.seen.append((weight.detach().clone(), first.detach().clone()))
        if len(self.seen) == 1 + M + 2:  # after shapes were inferred, a batch, and a microbatch
            until(self.updated.exists, "the first stage does not continue")
        return self.block(x) * weight


def tied(rank, group, updated):
    module = Tied(build_blocks(2)[rank], updated if rank else None)
    stage, schedule = build(rank, group, module=module, lookahead=2)
    inputs, targets = data(0, 8)
    for _ in range(2):
        schedule.step(*([inputs] if stage.is_first else ()), target=targets if stage.is_last else None)
        if schedule.gradient_ready and stage.is_first:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1)
            inputs.zero_()
            updated.touch()
    schedule.drain()
    return module.seen


def test_pending_sends_are_not_overwritten(pool: WorkerPool, tmp_path: Path) -> None:
    """Weights and inputs that are sent may be written to before the next stage receives them."""
    seen = pool.run(2, tied, tmp_path / "updated")[1][1:]
    assert len(seen) == 2 * M
    for index, (weight, first) in enumerate(seen):
        assert torch.equal(weight, torch.ones(WIDTH, dtype=torch.float64))
        assert torch.equal(first, data(0, 8)[0].split(2)[index % M])


def refusal(schedule, method, *args, **options):
    with pytest.raises(ValueError, match="microbatch|_mbs") as caught:
        getattr(schedule, method)(*args, **options)
    return str(caught.value)


def uneven(rank, group, method):
    """A batch that does not split evenly, on the ranks that see it; then one that does."""
    stage, schedule = build(rank, group, m=3)
    messages = []
    for number in range(2):  # before anything was inferred, and after
        if method == "eval" or not number:
            args, options = feed(stage, 0, 8)
            if stage.is_first:
                messages.append(refusal(schedule, method, *args))
            if stage.is_last and method == "step":
                messages.append(refusal(schedule, method, **options))
        args, options = feed(stage, number, 9)
        with torch.set_grad_enabled(method == "step"):
            output = getattr(schedule, method)(*args, **options)
    if method == "step":
        schedule.drain()
    return messages, None if output is None else len(output)


@pytest.mark.parametrize("method", ["step", "eval"])
def test_microbatches_of_different_shapes_are_refused(pool: WorkerPool, method: str) -> None:
    (first, _), (last, rows) = pool.run(2, uneven, method)
    assert rows == 9 and len(first) == (2 if method == "eval" else 1)
    for sentence in first:
        assert sentence == (
            f"args[0] of microbatch 2 is a tensor of shape (2, {WIDTH}) and torch.float64, expected "
            f"a tensor of shape (3, {WIDTH}) and torch.float64: all microbatches of a batch must be alike"
        )
    assert all(sentence.startswith("target of microbatch 2 is a tensor of shape (2, ") for sentence in last)


class Scaled(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, scale=None):
        return self.block(x if scale is None else x * scale)


def other_inputs(rank, group):
    """The errors of batches that are refused while others are in flight, and the gradients of these."""
    stage, schedule = build(rank, group, module=Scaled(build_blocks(group.size())[rank]))
    module = stage.submod.block
    args, options = feed(stage, 0, 8)
    scale = torch.ones(8, 1, dtype=torch.float64)
    schedule.step(*args, **options, scale=scale)
    short, short_options = feed(stage, 1, 8, 3)
    messages = {"missing": refusal(schedule, "step", *args, **options)}
    messages["size"] = refusal(schedule, "step", *args, **options, scale=scale[:4])
    messages["dtype"] = refusal(schedule, "step", *args, **options, scale=scale.float())
    messages["more"] = refusal(schedule, "step", *args, **options, scale=scale, other=1)
    if stage.is_first:
        messages["args"] = refusal(schedule, "step", *short, **short_options, scale=scale)
    if stage.is_last:
        messages["target"] = refusal(schedule, "step", **short_options, scale=scale)
    args, options = feed(stage, 1, 8)
    schedule.step(*args, **options, scale=scale)
    found = [gradients(module)]
    module.zero_grad()
    schedule.drain()
    return messages, [*found, gradients(module)]


def test_other_inputs_are_refused_while_batches_are_in_flight(pool: WorkerPool) -> None:
    results = pool.run(3, other_inputs)
    assert_same([found for _, found in results], reference(3, 0, 8), reference(3, 1, 8))
    whole = "a tensor of shape (2, 1) and torch.float64"
    for messages, _ in results:
        assert all(messages[key].endswith(": drain() before a batch of other shapes") for key in messages)
        assert f"kwargs['scale'] of microbatch 0 is missing, expected {whole}:" in messages["missing"]
        scale = "kwargs['scale'] of microbatch 0 is a tensor of shape"
        assert f"{scale} (1, 1) and torch.float64" in messages["size"]
        assert f"{scale} (2, 1) and torch.float32" in messages["dtype"]
        assert "kwargs['other'] of microbatch 0 is of type int, expected no such" in messages["more"]
    assert "args[0] of microbatch 0 is a tensor of shape (2, 3, " in results[0][0]["args"]
    assert "target of microbatch 0 is a tensor of shape (2, 3, " in results[2][0]["target"]


def lengths(rank, group, shapes):
    """Gradients of batches of other lengths and sizes, and outputs of an eval of each, each after a drain."""
    stage, schedule = build(rank, group)
    found, rows = [], []
    for seed, shape in enumerate(shapes):
        args, options = feed(stage, seed, *shape)
        schedule.step(*args, **options)
        schedule.drain()
        found.append(gradients(stage.submod))
        stage.submod.zero_grad()
    with torch.no_grad():
        for seed, shape in enumerate(shapes):
            rows.append(schedule.eval(*feed(stage, seed, *shape)[0]))
    return found, rows


def test_after_a_drain_a_batch_may_have_other_shapes(pool: WorkerPool) -> None:
    shapes = [(8, 5), (8, 3), (4, 3), (8, 5, 2), (12, 5, 2), (8, 5, 2)]
    results = pool.run(2, lengths, shapes)
    expected = [reference(2, seed, *shape) for seed, shape in enumerate(shapes)]
    assert_same([found for found, _ in results], *expected)
    model = nn.Sequential(*build_blocks(2))
    for seed, (shape, output) in enumerate(zip(shapes, results[1][1], strict=True)):
        with torch.no_grad():
            torch.testing.assert_close(output, model(data(seed, *shape)[0]))


def replicas(rank, group):
    """Two pipelines under FSDP, of which only one is given other shapes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    block = build_blocks(2)[index]
    fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(block, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleAsync2BW(stage, M, loss_fn=loss_fn)
    found = []
    for seed, lengths in enumerate([(5, 5), (3, 5), (3, 2)]):
        args, options = feed(stage, 10 * seed + replica, 8, lengths[replica])
        schedule.step(*args, **options)
        schedule.drain()
        found.append(
            {name: parameter.grad.full_tensor().clone() for name, parameter in block.named_parameters()}
        )
        block.zero_grad()
    return found


def test_one_of_two_replicas_may_have_other_shapes(pool: WorkerPool) -> None:
    results = pool.run(4, replicas)
    for seed, lengths in enumerate([(5, 5), (3, 5), (3, 2)]):
        each = [reference(2, 10 * seed + replica, 8, lengths[replica]) for replica in range(2)]
        for rank, found in enumerate(results):
            mean = {name: (each[0][rank // 2][name] + each[1][rank // 2][name]) / 2 for name in found[seed]}
            torch.testing.assert_close(found[seed], mean)


def sizes_of_split_keywords(rank, group):
    """Split keyword inputs whose sizes differ from one microbatch to the next."""
    stage, schedule = build(rank, group, module=Scaled(build_blocks(group.size())[rank]))
    inputs, targets = data(0, 8)
    pieces = [{"scale": torch.ones(1 + index % 2, 1, dtype=torch.float64)} for index in range(M)]
    schedule.step(
        arg_mbs=[(x,) for x in inputs.split(2)] if stage.is_first else None,
        kwarg_mbs=pieces,
        target_mbs=list(targets.split(2)) if stage.is_last else None,
    )
    schedule.drain()
    return [gradients(stage.submod.block)]


def test_split_keyword_inputs_may_be_of_any_sizes(pool: WorkerPool) -> None:
    assert_same(pool.run(2, sizes_of_split_keywords), reference(2, 0, 8))


def along_dimension_1(rank, group):
    """Sequences first: (length, batch, width)."""
    spec = TensorChunkSpec(1)
    options = {"args_chunk_spec": (spec,), "output_merge_spec": spec}
    with pytest.raises(ValueError, match="split along dimension 1, so the target needs a target_chunk_spec"):
        build(rank, group, **options)
    stage, schedule = build(rank, group, **options, target_chunk_spec=spec)
    args, options = feed(stage, 0, 3, 8)
    output = schedule.step(*args, **options)
    schedule.drain()
    short = refusal(schedule, "step", target=torch.zeros(3, 3, WIDTH)) if stage.is_last else ""
    return [gradients(stage.submod)], short, None if output is None else tuple(output.shape)


def test_the_target_is_split_by_its_chunk_spec(pool: WorkerPool) -> None:
    results = pool.run(2, along_dimension_1)
    assert_same([found for found, *_ in results], reference(2, 0, 3, 8, dim=1))
    assert results[1][2] == (3, 8, WIDTH)
    assert "Expecting 4 target_mbs but got 3" in results[1][1]


def mistakes(rank, group):
    """Errors before the first message leave the schedule unchanged."""
    stage, schedule = build(rank, group)
    assert not schedule.drain()  # nothing has started
    found = []
    for seed in range(3):
        args, options = feed(stage, seed, 8)
        with pytest.raises(TypeError, match="losses must be a list"):
            schedule.step(*args, **options, losses=())
        with pytest.raises(ValueError, match="cannot be mixed"):
            schedule.step(*args, arg_mbs=[()] * M, kwarg_mbs=[{}] * M, target=options["target"], other=1)
        with pytest.raises(ValueError, match="Expecting 4 arg_mbs but got 3"):
            schedule.step(arg_mbs=[()] * 3)
        with pytest.raises(TypeError, match=r"arg_mbs\[0\] must be a tuple but is a list"):
            schedule.step(arg_mbs=[[]] * M)
        with pytest.raises(RuntimeError, match="needs gradients"), torch.no_grad():
            schedule.step(*args, **options)
        if stage.is_last:
            with pytest.raises(ValueError, match="needs a target"):
                schedule.step(*args)
        if seed:
            with pytest.raises(RuntimeError, match="drain"):
                schedule.eval(*args)
            stage.submod.scale.requires_grad_(False)
            with pytest.raises(RuntimeError, match="new schedule"):
                schedule.step(*args, **options)
            stage.submod.scale.requires_grad_(True)
        schedule.step(*args, **options)
        if schedule.gradient_ready:
            found.append(gradients(stage.submod))
            stage.submod.zero_grad()
    schedule.drain()
    return [*found, gradients(stage.submod)]


def test_invalid_inputs_leave_the_schedule_usable(pool: WorkerPool) -> None:
    assert_same(pool.run(2, mistakes), *(reference(2, seed, 8) for seed in range(3)))


def microbatches_alone(rank, group):
    stage, schedule = build(rank, group)
    inputs, targets = data(0, 8)
    losses = []
    schedule._step_microbatches(
        arg_mbs=[[x] for x in inputs.split(2)] if stage.is_first else None,
        target_mbs=list(targets.split(2)) if stage.is_last else None,
        losses=losses,
    )
    schedule.drain()
    assert len(losses) == (M if stage.is_last else 0)
    return [gradients(stage.submod)]


def test_step_microbatches_is_supported(pool: WorkerPool) -> None:
    assert_same(pool.run(2, microbatches_alone), reference(2, 0, 8))


class Shrinking(nn.Module):
    """Returns a row less from its third microbatch on."""

    def __init__(self, block):
        super().__init__()
        self.block, self.calls = block, 0

    def forward(self, x):
        self.calls += 1
        return self.block(x)[self.calls // 4 :]


PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from tests.support.recurrence import build_blocks, build_data, loss_fn
from tests.pipelining.test_inputs import Shrinking
from titan_async.pipelining import ScheduleAsync2BW

rank, what = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], 3), rank=rank, world_size=3)
block = build_blocks(3)[rank]
if what == "outputs" and rank == 0:
    block = Shrinking(block)
stage = PipelineStage(block, rank, 3, torch.device("cpu"))
schedule = ScheduleAsync2BW(stage, 4, loss_fn=loss_fn)
for batch in range(3):
    inputs, targets = (each[0].flatten(0, 1) for each in build_data(1, 4))
    if what == "args" and batch == 2:
        inputs = inputs[:4]
    schedule.step(*((inputs,) if rank == 0 else ()), target=targets if rank == 2 else None)
    block.zero_grad()
"""


@pytest.mark.parametrize("what", ["args", "outputs"])
def test_the_other_ranks_end_with_one_sentence(tmp_path: Path, what: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), what, str(tmp_path / "store")],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for rank in range(3)
    ]
    last_lines = [rank.communicate(timeout=100)[1].strip().splitlines()[-1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1, 1], last_lines
    if what == "args":
        assert "args[0] of microbatch 0 is a tensor of shape (1, " in last_lines[0]
    else:
        assert "stage 0 returned a tensor of shape (2, " in last_lines[0]
    for stage in (1, 2):
        assert f"stage {stage} lost contact with stage" in last_lines[stage]
        assert "see the error of that stage" in last_lines[stage]


def test_the_reference_is_not_the_same_for_all() -> None:
    """The tests above would prove nothing if a hook or another batch made no difference."""
    plain, halved, other = reference(2, 0, 8), reference(2, 0, 8, halved=True), reference(2, 1, 8)
    assert not torch.allclose(plain[0]["scale"], halved[0]["scale"])
    assert not torch.allclose(plain[0]["scale"], other[0]["scale"])
