"""What Muon promises about sharded parameters: gloo, four processes, against one process or a run without."""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support.processes import Pools, WorkerPool
from titan_async.optim import ErrorFeedback, Muon
from titan_async.optim import distributed_orthogonalization as distribution_module

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LEVELS = ["update", "gradient"]
SHAPES = [(8, 4), (6, 10), (3, 5, 4), (1, 4), (9, 9)]
LAYOUTS = {"rows": ((4,), [S0]), "hsdp": ((2, 2), [R, S0]), "blocks": ((2, 2), [S0, S1])}
MAKE = {
    "plain": lambda params, **options: Muon(params, 0.1, **options),
    **{
        f"inside {level}": lambda params, level=level, **options: Muon(
            params, 0.1, error_feedback=1.0, error_feedback_level=level, **options
        )
        for level in LEVELS
    },
    **{
        f"around {level}": lambda params, level=level, **options: ErrorFeedback(
            Muon(params, 0.1, **options), level=level
        )
        for level in LEVELS
    },
}


meshes: dict[str, DeviceMesh] = {}


def make_meshes(rank, group):
    """Once for all tests: each mesh has groups of its own."""
    meshes["line"] = init_device_mesh("cpu", (4,))
    meshes["grid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    turned = torch.tensor([[0, 2], [1, 3]])
    meshes["turned"] = DeviceMesh("cpu", turned, mesh_dim_names=("a", "b"))
    meshes["first half"], meshes["second half"] = (
        DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3])
    )


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    pool = pools(4)
    pool.run(4, make_meshes, keeps=True)
    return pool


def randn(shape, *seed):
    generator = torch.Generator().manual_seed(1000 * seed[0] + seed[1] if len(seed) > 1 else seed[0])
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def whole(tensor):
    return tensor


def distribute(tensor, mesh, placements):
    """Each rank's share of what all ranks have; so nothing has to be sent."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def placed(layout):
    mesh_shape, placements = layout
    mesh = meshes["line" if len(mesh_shape) == 1 else "grid"]
    return lambda tensor: distribute(tensor, mesh, placements)


def parameters(place, shapes=SHAPES, dtype=torch.float64):
    return [
        torch.nn.Parameter(place(randn(shape, 99, number).to(dtype))) for number, shape in enumerate(shapes)
    ]


def give_gradients(params, place, step, missing=()):
    for number, param in enumerate(params):
        grad = place(randn(param.shape, step, number).to(param.dtype))
        param.grad = None if number in missing else grad


def full(params):
    """Whole weights as numpy arrays, which travel between processes as they are."""
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().double().numpy().copy() for p in params
    ]


def assert_all_close(results, expected, tolerance=1e-12):
    for found in results:
        assert_close(found, full(expected), tolerance)


def assert_close(found, expected, tolerance=1e-12):
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        error = abs(one - other)
        assert error.size == 0 or error.max() <= tolerance, f"parameter {number}:\n{error}"


def local_bits(params, optimizer):
    tensors = [("", param) for param in params]
    tensors += [entry for param in params for entry in sorted(optimizer.state[param].items())]
    return [
        (key, (value.to_local() if isinstance(value, DTensor) else value).detach().clone())
        for key, value in tensors
    ]


def same_bits(one, other):
    return [a for a, _ in one] == [a for a, _ in other] and all(
        x.dtype == y.dtype and torch.equal(x, y) for (_, x), (_, y) in zip(one, other, strict=True)
    )


def skipped(optimizer):
    return getattr(optimizer, "optimizer", optimizer).step_was_skipped


# Missing and bad gradients


def train_with_gaps(rank, group, name, layout, on=None):
    """Parameter 1 has no gradient in step 2, on rank 2 alone; 0 and 4 none in step 3, on ranks 0 and 3."""
    place = placed(LAYOUTS[layout]) if layout else whole
    params = parameters(place)
    optimizer = MAKE[name](params, compute_dtype="float64")
    gaps = {2: {1: [2]}, 3: {0: [0], 4: [3]}}
    report = []
    for step in range(5):
        missing = [n for n, ranks in gaps.get(step, {}).items() if rank is None or rank in ranks]
        give_gradients(params, place, step, missing)
        before = local_bits([params[n] for n in gaps.get(step, {})], optimizer)
        optimizer.step()
        after = local_bits([params[n] for n in gaps.get(step, {})], optimizer)
        for (key, old), (_, new) in zip(before, after, strict=True):
            report.append(not new.any() if "error_feedback" in key else torch.equal(old, new))
    return full(params), report


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MAKE)
def test_a_gradient_that_some_ranks_miss_is_missing_on_all(pool, name, layout):
    expected, report = train_with_gaps(None, None, name, None)
    assert all(report)
    results = pool.run(4, train_with_gaps, name, layout)
    for found, report in results:
        assert report and all(report)
        assert_close(found, expected)


def train_with_a_bad_gradient(rank, group, name, layout, value, bad_rank):
    place = placed(LAYOUTS[layout])
    params, others = parameters(place), parameters(place)
    optimizer, other = MAKE[name](params), MAKE[name](others)
    report = []
    for step in range(5):
        for each, each_params in ((optimizer, params), (other, others)):
            give_gradients(each_params, place, step)
            each.step()
            report.append(not skipped(each))
        report.append(same_bits(local_bits(params, optimizer), local_bits(others, other)))
        if step in (0, 2):
            give_gradients(params, place, 50 + step, missing=[0] if step else [])
            if rank == bad_rank:
                params[1].grad.to_local()[-1, -1] = value
            before = local_bits(params, optimizer)
            optimizer.step()
            report += [skipped(optimizer), same_bits(before, local_bits(params, optimizer))]
    return report


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("value", "layout", "bad_rank"), [(math.nan, "rows", 1), (math.inf, "hsdp", 3), (-math.inf, "blocks", 0)]
)
@pytest.mark.parametrize("name", MAKE)
def test_a_bad_gradient_on_one_rank_changes_nothing_on_any(pool, name, value, layout, bad_rank):
    for report in pool.run(4, train_with_a_bad_gradient, name, layout, value, bad_rank):
        assert len(report) == 19
        assert all(report)


def train_with_huge_gradients(rank, group):
    place = placed(LAYOUTS["rows"])
    params = parameters(place, [(8, 4), (8, 4)])
    optimizer = Muon(params, 1.0, 0.0)
    before = full(params)
    for param, size in zip(params, (1e20 if rank == 3 else 1.0, 1.0), strict=True):
        param.grad = place(randn((8, 4), 1).to(param.dtype))
        param.grad.to_local().mul_(size)
    optimizer.step()
    return optimizer.step_was_skipped, [abs(a - b).max() for a, b in zip(before, full(params), strict=True)]


def test_gradients_whose_squares_overflow_are_finite(pool):
    for was_skipped, moved in pool.run(4, train_with_huge_gradients):
        assert not was_skipped
        assert all(0.01 < size < 10 for size in moved)


def warm_up(rank, group, name, sharded):
    """The first learning rate is zero, and the gradients of most shards are."""
    place = placed(LAYOUTS["rows"]) if sharded else whole
    params = parameters(place, [(8, 4), (4, 4)])
    build = {**MAKE, "around adamw": lambda params, **_: ErrorFeedback(torch.optim.AdamW(params, 0.1))}
    optimizer = build[name](params, compute_dtype="float64")
    flags = []
    for step, lr in enumerate([0.0, 0.1, 0.1]):
        optimizer.param_groups[0]["lr"] = lr
        give_gradients(params, place, step)
        if step == 0:
            for param in params:
                grad = torch.zeros(param.shape, dtype=torch.float64)
                grad[0, 0] = 1
                param.grad = place(grad)
        optimizer.step()
        flags.append([bool(v) for p in params for k, v in optimizer.state[p].items() if "valid" in k])
    return full(params), flags


@pytest.mark.parametrize("name", [*MAKE, "around adamw"])
def test_a_warm_up_whose_gradients_are_zero_on_some_ranks(pool, name):
    """They take it for an update as the others do, not for the step that only creates state."""
    expected, flags = warm_up(None, None, name, False)
    for found, their_flags in pool.run(4, warm_up, name, True):
        assert their_flags == flags
        assert_close(found, expected)


def create_state(rank, group, name):
    """Zero gradients at learning rate zero, on shards."""
    place = placed(LAYOUTS["rows"])
    params = parameters(place)
    optimizer = MAKE[name](params)
    before = local_bits(params, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    report = [same_bits(before, local_bits(params, optimizer))]
    optimizer.param_groups[0]["lr"] = 0.1
    others = parameters(place)
    plain = MAKE["plain"](others)
    for each, each_params in ((optimizer, params), (plain, others)):
        give_gradients(each_params, place, 0)
        each.step()
    return [
        *report,
        all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(params, others, strict=True)),
    ]


@pytest.mark.parametrize("name", MAKE)
def test_creating_state_is_no_update(pool, name):
    assert all(map(all, pool.run(4, create_state, name)))


# Values


def extremes(rank, group):
    """The extreme singular values of updates sharded over two ranks, for every way of computing them."""
    mesh = meshes["grid"]["inner"]
    found = {}
    torch.manual_seed(0)
    spectrum = torch.diag(torch.linspace(0.3, 1, 32, dtype=torch.float64))
    u, _, vh = torch.linalg.svd(torch.randn(32, 48, dtype=torch.float64), full_matrices=False)
    for coefficients, form, dtype, scale, placement in itertools.product(
        ["standard", "polar_express"],
        ["auto", "standard", "gram"],
        ["bfloat16", "float16", "float32"],
        [1e-12, 1e20],
        [S0, S1],
    ):
        param = torch.nn.Parameter(distribute(torch.zeros(32, 48), mesh, [placement]))
        options = {"ns_coefficients": coefficients, "ns_form": form, "compute_dtype": dtype}
        optimizer = Muon([param], 1.0, 0.0, adjust_lr="spectral", **options)
        param.grad = distribute((u @ spectrum @ vh * scale).float(), mesh, [placement])
        optimizer.step()
        values = torch.linalg.svdvals(param.full_tensor().detach().double()) * math.sqrt(48 / 32)
        key = (coefficients, form, dtype, scale, str(placement))
        found[key] = (values.min().item(), values.max().item())
    return found


def test_singular_values_at_extreme_gradients(pool):
    """That the exact iteration brings this spectrum into the same bounds is tested for whole matrices."""
    for found in pool.run(4, extremes):
        assert len(found) == 72
        for key, (least, most) in found.items():
            # See the test for whole matrices.
            assert least > 0.6, key
            assert most < (1.3 if key[:3] == ("polar_express", "gram", "bfloat16") else 1.2), key


SPLIT = (8, 8, 2, 2)


def train_fused(rank, group, layout, dim, shape, adjust_lr):
    place = placed(layout)
    [param] = parameters(place, [shape])
    options = {"split_sizes": SPLIT, "split_dim": dim, "adjust_lr": adjust_lr, "compute_dtype": "float64"}
    optimizer = Muon([param], 0.1, **options)
    for step in range(3):
        give_gradients([param], place, step)
        optimizer.step()
    return full([param])


@pytest.mark.covering(2)
@pytest.mark.parametrize("adjust_lr", ["original", "spectral"])
@pytest.mark.parametrize("layout", [((4,), [S0]), ((4,), [S1]), ((2, 2), [S1, S0]), ((2, 2), [R, S0])])
@pytest.mark.parametrize(("dim", "shape"), [(-2, (20, 6)), (-1, (6, 20)), (-2, (3, 20, 6)), (-1, (3, 6, 20))])
def test_shards_cut_through_the_parts_of_a_fused_weight(pool, dim, shape, layout, adjust_lr):
    [start] = parameters(whole, [shape])
    options = {"adjust_lr": adjust_lr, "compute_dtype": "float64"}
    if len(shape) == 2:
        parts = [torch.nn.Parameter(part.clone()) for part in start.detach().split(SPLIT, dim)]
    else:
        parts = [
            torch.nn.Parameter(part.clone()) for matrix in start.detach() for part in matrix.split(SPLIT, dim)
        ]
    apart = Muon(parts, 0.1, **options)
    for step in range(3):
        grad = randn(shape, step, 0)
        matrices = [grad] if len(shape) == 2 else list(grad)
        grads = [part for matrix in matrices for part in matrix.split(SPLIT, dim)]
        for part, part_grad in zip(parts, grads, strict=True):
            part.grad = part_grad.clone()
        apart.step()
    count = len(SPLIT)
    joined = [
        torch.cat([part.detach() for part in parts[i : i + count]], dim) for i in range(0, len(parts), count)
    ]
    expected = joined[0] if len(shape) == 2 else torch.stack(joined)
    assert_all_close(pool.run(4, train_fused, layout, dim, shape, adjust_lr), [expected])


def train_both_ways(rank, group, level, layout, dtype):
    """Error feedback inside and around, with gaps, bad gradients and a schedule: are all bits the same?"""
    place = placed(LAYOUTS[layout])
    runs = []
    for where in ("inside", "around"):
        params = parameters(place, dtype=dtype)
        optimizer = MAKE[f"{where} {level}"](params, weight_decay=0.3, bucket_mb=1e-4)
        for step in range(12):
            optimizer.param_groups[0]["lr"] = 0.1 * math.sin((step + 1) / 13 * math.pi)
            missing = {3: [0], 5: [1, 2] if rank == 2 else [], 8: [0, 1, 2, 3, 4]}.get(step, [])
            give_gradients(params, place, step, missing)
            if step in (6, 9) and rank == 0:
                params[4].grad.to_local()[0, 0] = math.nan
            optimizer.step()
            assert skipped(optimizer) == (step in (6, 9))
        runs.append(local_bits(params, optimizer))
    return same_bits(*runs)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
def test_inside_is_bit_for_bit_what_it_is_around(pool, level, layout, dtype):
    assert all(pool.run(4, train_both_ways, level, layout, dtype))


# Gradients and parameters that lie in other ways


def train_with_other_gradients(rank, group, layout, gradient, name):
    place = placed(layout)
    params = parameters(place, [(8, 4), (6, 10), (4, 8, 4)])
    optimizer = MAKE[name](params, compute_dtype="float64")
    for step in range(3):
        for number, param in enumerate(params):
            grad = randn(param.shape, step, number)
            mesh = param.device_mesh
            if gradient == "partial":
                # Its parts add up to the gradient along all dimensions of the mesh.
                share = grad * (rank + 1) / 10
                param.grad = DTensor.from_local(share, mesh, [Partial()] * mesh.ndim)
            else:
                param.grad = distribute(grad, mesh, [gradient] * mesh.ndim)
        optimizer.step()
    return full(params)


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["plain", "inside update", "inside gradient", "around update"])
@pytest.mark.parametrize("gradient", ["partial", R, S1], ids=str)
@pytest.mark.parametrize("layout", [((4,), [S0]), ((2, 2), [R, S0]), ((2, 2), [S1, S0])], ids=str)
def test_gradients_placed_unlike_their_parameters(pool, layout, gradient, name):
    """As tensor parallelism may leave them."""
    params = parameters(whole, [(8, 4), (6, 10), (4, 8, 4)])
    optimizer = MAKE[name](params, compute_dtype="float64")
    for step in range(3):
        give_gradients(params, whole, step)
        optimizer.step()
    assert_all_close(pool.run(4, train_with_other_gradients, layout, gradient, name), params)


def train_with_sums_that_overflow(rank, group, layout, name):
    """One of two parameters gets its gradient in parts; in step 2 these are finite and their sum is not."""
    mesh_shape, placements = layout
    place, mesh = placed(layout), meshes["line" if len(mesh_shape) == 1 else "grid"]
    params = parameters(place, [(8, 4), (6, 10)], torch.float32)
    optimizer = MAKE[name](params)
    report = []
    for step in range(4):
        give_gradients(params, place, step)
        share = params[0].grad.full_tensor() / 4 if step != 2 else torch.full((8, 4), 2e38)
        params[0].grad = DTensor.from_local(share, mesh, [Partial()] * mesh.ndim)
        before = local_bits(params, optimizer)
        optimizer.step()
        report.append((skipped(optimizer), same_bits(before, local_bits(params, optimizer))))
    return report, full(params)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["plain", "inside update", "inside gradient", "around update"])
@pytest.mark.parametrize("layout", [((4,), [S0]), ((4,), [R]), ((2, 2), [R, S0])], ids=str)
def test_parts_whose_sum_overflows_are_a_bad_gradient(pool, layout, name):
    params = parameters(whole, [(8, 4), (6, 10)], torch.float32)
    optimizer = MAKE[name](params)
    for step in (0, 1, 3):
        give_gradients(params, whole, step)
        optimizer.step()
    for report, weights in pool.run(4, train_with_sums_that_overflow, layout, name):
        assert report == [(False, False), (False, False), (True, True), (False, False)]
        assert_close(weights, full(params), 1e-2)


def finite_on_one_rank_only(rank, group):
    """Whether all agree where a sum overflows on the rank alone that holds the row."""
    mesh = meshes["line"]
    param = torch.nn.Parameter(distribute(torch.zeros(8, 4), mesh, [S0]))
    other = torch.nn.Parameter(distribute(torch.zeros(8, 4), mesh, [S0]))
    optimizer = Muon([param, other], 0.1)
    share = torch.ones(8, 4)
    share[7] = 2e38
    param.grad = DTensor.from_local(share, mesh, [Partial()])
    # A sum that is finite although its parts are large: 3e38 - 2e38.
    other.grad = DTensor.from_local(torch.full((8, 4), [1e38, 1e38, 1e38, -2e38][rank]), mesh, [Partial()])
    optimizer.step()
    first = optimizer.step_was_skipped, bool(param.to_local().any()), bool(other.to_local().any())
    param.grad = None
    optimizer.step()
    return *first, optimizer.step_was_skipped, bool(other.to_local().any())


def test_all_ranks_skip_the_sum_that_overflows_on_one(pool):
    assert pool.run(4, finite_on_one_rank_only) == [(True, False, False, False, True)] * 4


def place_on_several_meshes():
    """Each parameter in another way: rows, blocks, replicas, an inner mesh, a turned mesh, or plain."""
    line, grid, turned = (meshes[name] for name in ("line", "grid", "turned"))
    ways = [
        (line, [S0]),
        (grid, [S0, S1]),
        (grid["inner"], [S1]),
        (turned, [R, S0]),
        None,
        (grid["outer"], [S0]),
        (turned, [S1, S0]),
        (line, [R]),
    ]
    return [whole if way is None else lambda t, way=way: distribute(t, *way) for way in ways]


MIXED = [(8, 4), (6, 10), (12, 5), (7, 7), (3, 5), (9, 4), (4, 12), (5, 6)]


def train_on_several_meshes(rank, group, bucket_mb):
    places = place_on_several_meshes()
    params = [
        torch.nn.Parameter(place(randn(s, 99, n)))
        for n, (place, s) in enumerate(zip(places, MIXED, strict=True))
    ]
    optimizer = MAKE["inside update"](params, compute_dtype="float64", bucket_mb=bucket_mb)
    for step in range(8):
        for number, (param, place) in enumerate(zip(params, places, strict=True)):
            # Ever other sets of gradients, missing on one rank alone.
            missing = rank == step % 4 and (step * 37 >> number) & 1
            grad = place(randn(param.shape, step, number))  # which all ranks do together
            param.grad = None if missing else grad
        if step == 5 and rank == 1:
            params[2].grad.to_local()[0] = math.nan
        optimizer.step()
    return full(params)


@pytest.mark.parametrize("bucket_mb", [1e-4, 32])
def test_several_meshes_and_changing_gradients(pool, bucket_mb):
    params = parameters(whole, MIXED)
    optimizer = MAKE["inside update"](params, compute_dtype="float64")
    for step in range(8):
        if step != 5:
            give_gradients(params, whole, step, [n for n in range(8) if (step * 37 >> n) & 1])
            optimizer.step()
    assert_all_close(pool.run(4, train_on_several_meshes, bucket_mb), params)


def train_like_two_stages(rank, group):
    """Ranks 0, 1 and ranks 2, 3 know nothing of each other: other parameters, groups, numbers of steps."""
    stage = rank // 2
    mesh, other_mesh = (meshes[f"{half} half"] for half in ("first", "second")[:: -1 if stage else 1])
    shapes = [SHAPES, [(4, 6)]][stage]

    def place(tensor):
        return distribute(tensor, mesh, [S0])

    params = parameters(place, shapes)
    optimizer = Muon(params, 0.1, compute_dtype="float64")
    for step in range(3 - stage):
        give_gradients(params, place, step)
        optimizer.step()
    # A mesh that this process is not in.
    other = DTensor.from_local(torch.zeros(2, 6), other_mesh, [S0], run_check=False)
    try:
        optimizer.add_param_group({"params": [torch.nn.Parameter(other)]})
        sentence = ""
    except NotImplementedError as error:
        sentence = str(error)
    return full(params), sentence, len(optimizer.param_groups)


def test_stages_of_a_pipeline_know_nothing_of_each_other(pool):
    results = pool.run(4, train_like_two_stages)
    for stage, (shapes, steps) in enumerate([(SHAPES, 3), ([(4, 6)], 2)]):
        params = parameters(whole, shapes)
        optimizer = Muon(params, 0.1, compute_dtype="float64")
        for step in range(steps):
            give_gradients(params, whole, step)
            optimizer.step()
        for found, sentence, groups in results[2 * stage : 2 * stage + 2]:
            assert_all_close([found], params)
            assert "not in its mesh" in sentence
            assert groups == 1


def train_on_strided_shards(rank, group):
    """Local shards that are no contiguous memory, of parameters and of gradients."""
    mesh = meshes["line"]

    def place(tensor):
        local = distribute(tensor, mesh, [S0]).to_local()
        return DTensor.from_local(local.mT.contiguous().mT, mesh, [S0], shape=tensor.shape, stride=(1, 8))

    params = parameters(place, [(8, 6)])
    assert not params[0].to_local().is_contiguous()
    optimizer = MAKE["inside update"](params, compute_dtype="float64")
    for step in range(3):
        give_gradients(params, place, step)
        optimizer.step()
    return full(params)


def test_shards_that_are_not_contiguous(pool):
    params = parameters(whole, [(8, 6)])
    optimizer = MAKE["inside update"](params, compute_dtype="float64")
    for step in range(3):
        give_gradients(params, whole, step)
        optimizer.step()
    assert_all_close(pool.run(4, train_on_strided_shards), params)


def freeze(rank, group):
    """A frozen parameter in the middle, thawed later; state is alike on all ranks, also the empty ones."""
    place = placed(LAYOUTS["rows"])
    params = parameters(place)
    params[1].requires_grad_(False)
    optimizer = MAKE["inside update"](params, momentum_dtype="float32")
    kinds = []
    for step in range(3):
        if step == 1:
            params[1].requires_grad_(True)
        give_gradients(params, place, step, [1] if step == 0 else [])
        optimizer.step()
        kinds.append(
            [
                (key, value.dtype, tuple(value.shape), str(getattr(value, "placements", None)))
                for param in params
                for key, value in optimizer.state.get(param, {}).items()
            ]
        )
    return kinds


def test_state_is_alike_on_all_ranks(pool):
    kinds = pool.run(4, freeze)
    assert all(kind == kinds[0] for kind in kinds)
    assert [len(each) for each in kinds[0]] == [12, 15, 15]
    assert ("momentum_buffer", torch.float32, (1, 4), "(Shard(dim=0),)") in kinds[0][0]


def refuse(rank, group):
    line, grid = meshes["line"], meshes["grid"]
    sentences = []
    for mesh, placements, local in [
        (line, [Partial()], (8, 4)),
        (grid, [S0, Partial()], (4, 4)),
        (line, [S0], (3, 4)),  # where [2, 4] is expected
    ]:
        param = torch.nn.Parameter(
            DTensor.from_local(
                torch.zeros(local), mesh, placements, run_check=False, shape=torch.Size((8, 4)), stride=(4, 1)
            )
        )
        try:
            Muon([("layer.weight", param)])
            sentences.append("")
        except NotImplementedError as error:
            sentences.append(str(error))
    return sentences


def test_placements_that_are_no_shards_are_refused(pool):
    for sentences in pool.run(4, refuse):
        for sentence, words in zip(sentences, ["placement P", "placement P", "[2, 4]"], strict=True):
            assert "'layer.weight'" in sentence
            assert words in sentence


def copies(rank, group):
    place = placed(LAYOUTS["rows"])
    params = parameters(place)
    optimizer = MAKE["inside update"](params)
    give_gradients(params, place, 0)
    optimizer.step()
    others, other = copy.deepcopy((params, optimizer))
    for each, each_params in ((optimizer, params), (other, others)):
        give_gradients(each_params, place, 1)
        each.step()
    return same_bits(local_bits(params, optimizer), local_bits(others, other))


def test_deep_copies_go_on_alone(pool):
    assert all(pool.run(4, copies))


# What travels, and when


class Watch:
    """Records the all-to-alls of a step, the waits for them, and the orthogonalizations."""

    def __enter__(self):
        self.events, self.elements, self.dtypes = [], [], set()
        self.all_to_all = dist.all_to_all_single
        names = [name for name in vars(distribution_module) if name.startswith("orthogonalize")]
        self.functions = {name: getattr(distribution_module, name) for name in names}

        def watched(received, sent, *args, **kwargs):
            number = len(self.elements)
            self.events.append(("issued", number))
            self.elements.append(sent.numel())
            self.dtypes.add(sent.dtype)
            work = self.all_to_all(received, sent, *args, **kwargs)

            def wait():
                self.events.append(("waited", number))
                return work.wait()

            return SimpleNamespace(wait=wait)

        def computing(function):
            def run(*args, **kwargs):
                self.events.append(("computed", None))
                return function(*args, **kwargs)

            return run

        dist.all_to_all_single = watched
        for name, function in self.functions.items():
            setattr(distribution_module, name, computing(function))
        return self

    def __exit__(self, *error):
        dist.all_to_all_single = self.all_to_all
        for name, function in self.functions.items():
            setattr(distribution_module, name, function)


def watch(rank, group, layout, shapes, dtype, **options):
    place = placed(layout)
    params = parameters(place, shapes, dtype)
    optimizer = Muon(params, 0.1, **options)
    give_gradients(params, place, 0)
    with Watch() as seen:
        optimizer.step()
    return seen.events, seen.elements, [str(dtype) for dtype in seen.dtypes]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "width", "copies"),
    [
        (((4,), [S0]), 4, 0),
        (((4,), [S1]), 4, 0),
        (((2, 2), [S0, S1]), 4, 0),
        (((2, 2), [R, S0]), 2, 1),
        (((4,), [R]), 1, 3),
    ],
    ids=str,
)
def test_elements_on_the_wire(pool, layout, width, copies, dtype):
    """There and back what the owner does not hold, and once to each further replica; in bfloat16."""
    shapes = [(16, 8), (8, 8), (8, 24)]
    results = pool.run(4, watch, layout, shapes, dtype)
    elements = sum(rows * cols for rows, cols in shapes)
    assert sum(sum(sent) for _, sent, _ in results) == elements * (2 * (width - 1) / width + copies)
    for _, sent, dtypes in results:
        assert len(sent) == 2  # one bucket, one pair
        assert dtypes == ["torch.bfloat16"]


def test_uneven_shards_cost_no_more_than_the_whole_matrix_there_and_back(pool):
    results = pool.run(4, watch, ((4,), [S0]), [(3, 16), (5, 8)], torch.float32)
    assert sum(sum(sent) for _, sent, _ in results) < 2 * (3 * 16 + 5 * 8)


@pytest.mark.parametrize("layout", [((4,), [S0]), ((2, 2), [S0, S0])], ids=str)
def test_experts_that_are_whole_on_a_rank_do_not_travel(pool, layout):
    for events, sent, _ in pool.run(4, watch, layout, [(8, 6, 4), (4, 4, 4)], torch.float32):
        assert sent == []
        assert ("computed", None) in events


def test_experts_on_replicas_are_computed_once(pool):
    """Two experts a rank, on two replicas: each computes one of them and sends it to the other."""
    results = pool.run(4, watch, ((2, 2), [R, S0]), [(4, 6, 8)], torch.float32)
    for _, sent, _ in results:
        assert sent == [0, 48]


def test_buckets_are_one_pair_each_and_overlap(pool):
    """While a bucket is computed the next one comes in and the last one goes out."""
    shapes = [(16, 16)] * 16
    # Four matrices a bucket, and every rank has one of each.
    results = pool.run(4, watch, ((4,), [S0]), shapes, torch.float32, bucket_mb=4 * 16 * 16 * 2 / 2**20)
    for events, sent, _ in results:
        assert len(sent) == 8
        computed = [index for index, (kind, _) in enumerate(events) if kind == "computed"]
        assert len(computed) == 4
        at = {event: index for index, event in enumerate(events)}
        # The order in which they are issued is gather 0, gather 1, then scatter k, gather k + 2.
        gathers, scatters = [0, 1, 3, 5], [2, 4, 6, 7]
        for bucket in range(4):
            assert at["waited", gathers[bucket]] < computed[bucket] < at["issued", scatters[bucket]]
            if bucket < 3:
                assert at["issued", gathers[bucket + 1]] < at["waited", gathers[bucket]]
                assert at["waited", scatters[bucket]] > at["issued", scatters[bucket + 1]]
