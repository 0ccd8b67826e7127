"""QK-clip against attention computed with the clipped weights: plain, and sharded on four gloo processes."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.processes import Pools, WorkerPool
from titan_async.optim import ErrorFeedback, Muon, QKClip, QueryKey

INPUTS, HEAD = 12, 4
TAU = 3.0


def tensors(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def logits(query, key, heads, key_heads, biases=(0.0, 0.0)):
    """Logits [heads, tokens, tokens] of attention over the same tokens, head by head, group by group."""
    (x,) = tensors((20, INPUTS), seed=7)
    q, k = x @ query.T.double() + biases[0], x @ key.T.double() + biases[1]
    of_heads = []
    for head in range(heads):
        shared = head // (heads // key_heads)
        columns = slice(head * HEAD, (head + 1) * HEAD), slice(shared * HEAD, (shared + 1) * HEAD)
        of_heads.append(q[:, columns[0]] @ k[:, columns[1]].T / HEAD**0.5)
    return torch.stack(of_heads)


def largest(*args, **kwargs):
    return logits(*args, **kwargs).amax(dim=(1, 2))


def clip(layer, maxima, tau=TAU):
    QKClip([layer], lambda: [maxima], tau).clip()


@pytest.mark.parametrize(("heads", "key_heads"), [(6, 6), (6, 2), (6, 1), (1, 1)])
def test_logits_of_each_head_scale_by_its_own_factor(heads, key_heads):
    query, key = tensors((heads * HEAD, INPUTS), (key_heads * HEAD, INPUTS))
    query[:HEAD] *= 5
    if heads > 1:
        query[-HEAD:] *= 0.01  # not clipped, but shares its key head with a clipped head
    before = logits(query, key, heads, key_heads)
    maxima = before.amax(dim=(1, 2))
    factors = (TAU / maxima).clamp(max=1)
    assert factors.min() < 1 and (heads == 1 or factors.max() == 1)
    clip(QueryKey(query, key, heads, key_heads), maxima)
    after = logits(query, key, heads, key_heads)
    torch.testing.assert_close(after, before * factors[:, None, None], rtol=1e-12, atol=1e-12)
    assert after.amax() <= TAU * (1 + 1e-12)


def test_queries_and_keys_without_grouping_are_scaled_by_the_root():
    query, key = tensors((2 * HEAD, INPUTS), (2 * HEAD, INPUTS))
    old_query, old_key = query.clone(), key.clone()
    clip(QueryKey(query, key, 2), torch.tensor([4 * TAU, TAU], dtype=torch.float64))
    assert torch.equal(query[:HEAD], old_query[:HEAD] / 2) and torch.equal(key[:HEAD], old_key[:HEAD] / 2)
    assert torch.equal(query[HEAD:], old_query[HEAD:]) and torch.equal(key[HEAD:], old_key[HEAD:])


def test_shared_key_head_is_scaled_by_the_root_of_the_smallest_factor():
    query, key = tensors((3 * HEAD, INPUTS), (HEAD, INPUTS))
    old_query, old_key = query.clone(), key.clone()
    clip(QueryKey(query, key, 3, 1), torch.tensor([4 * TAU, TAU, 2 * TAU], dtype=torch.float64))
    assert torch.equal(key, old_key / 2)
    factors = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64).repeat_interleave(HEAD)
    assert torch.equal(query, old_query * factors[:, None])


def test_biases_are_scaled_with_their_weights():
    query, key, query_bias, key_bias = tensors((16, INPUTS), (8, INPUTS), (16,), (8,))
    before = logits(query, key, 4, 2, (query_bias, key_bias))
    maxima = before.amax(dim=(1, 2))
    clip(QueryKey((query, query_bias), [key, key_bias], 4, 2), maxima)
    after = logits(query, key, 4, 2, (query_bias, key_bias))
    torch.testing.assert_close(after, before * (TAU / maxima).clamp(max=1)[:, None, None])


INTERLEAVED = {  # two groups of two query heads, a key head and a value head
    "query_rows": [(0, 4), (4, 8), (16, 20), (20, 24)],
    "key_rows": [(8, 12), (24, 28)],
}


def unfused(fused):
    query = torch.cat([fused[start:stop] for start, stop in INTERLEAVED["query_rows"]])
    key = torch.cat([fused[start:stop] for start, stop in INTERLEAVED["key_rows"]])
    return query, key


def test_fused_projections():
    (fused,) = tensors((32, INPUTS))
    before, values = logits(*unfused(fused), 4, 2), fused[12:16].clone()
    maxima = before.amax(dim=(1, 2))
    clip(QueryKey(fused, fused, 4, 2, **INTERLEAVED), maxima)
    after = logits(*unfused(fused), 4, 2)
    torch.testing.assert_close(after, before * (TAU / maxima).clamp(max=1)[:, None, None])
    assert torch.equal(fused[12:16], values)


@pytest.mark.parametrize("odd", [float("inf"), float("nan"), -float("inf"), -2.0, 0.0, TAU])
def test_heads_below_the_threshold_do_not_change(odd):
    query, key = tensors((2 * HEAD, INPUTS), (HEAD, INPUTS), dtype=torch.bfloat16)
    old = query.clone(), key.clone()
    clip(QueryKey(query, key, 2, 1), torch.tensor([odd, 1.0]))
    assert torch.equal(query, old[0]) and torch.equal(key, old[1])


def test_bfloat16_weights_and_float32_factors():
    query, key = tensors((2 * HEAD, INPUTS), (2 * HEAD, INPUTS), dtype=torch.bfloat16)
    # bfloat16 cannot represent 0.7; the rounded factor gives other products.
    factor, rounded = torch.tensor(0.7), torch.tensor(0.7).bfloat16()
    expected, other = (query[:HEAD].float() * factor).bfloat16(), query[:HEAD] * rounded
    clip(QueryKey(query, key, 2), torch.tensor([TAU / 0.49, 1.0]))
    assert query.dtype == torch.bfloat16
    # The square root may round differently.
    assert (query[:HEAD] != expected).sum() <= 1 < (query[:HEAD] != other).sum()


def parameters():
    return [torch.nn.Parameter(tensor) for tensor in tensors((8, INPUTS), (8, INPUTS))]


def step(optimizer, params, seed):
    for param, grad in zip(params, tensors((8, INPUTS), (8, INPUTS), seed=seed), strict=True):
        param.grad = grad
    optimizer.step()


@pytest.mark.parametrize("inside", [True, False])
def test_clip_is_not_in_the_history_of_updates(inside):
    """Updates are the same with and without clipping, because the history, and so the correction, is."""

    def build(params):
        options = {"lr": 0.1, "weight_decay": 0.0, "compute_dtype": "float64"}
        if inside:
            return Muon(params, error_feedback=1.0, **options)
        return ErrorFeedback(Muon(params, **options))

    plain, clipped = parameters(), parameters()
    optimizers = build(plain), build(clipped)
    maxima = torch.tensor([2 * TAU, 1.0], dtype=torch.float64)
    optimizers[1].register_step_post_hook(QKClip([QueryKey(*clipped, 2)], lambda: [maxima], TAU))
    factor, expected = 0.5**0.5, [param.detach().clone() for param in plain]
    for seed in (1, 2, 3):
        before = [param.detach().clone() for param in plain]
        step(optimizers[0], plain, seed)
        step(optimizers[1], clipped, seed)
        for index, (param, old) in enumerate(zip(plain, before, strict=True)):
            expected[index] = expected[index] + param.detach() - old
            expected[index][:HEAD] *= factor
            torch.testing.assert_close(clipped[index].detach(), expected[index], rtol=0, atol=1e-12)


def test_skipped_step_changes_nothing():
    params = parameters()
    old = [param.detach().clone() for param in params]
    maxima = torch.full((2,), 2 * TAU)
    for optimizer in (Muon(params), ErrorFeedback(Muon(params))):
        optimizer.register_step_post_hook(QKClip([QueryKey(*params, 2)], lambda: [maxima], TAU))
        for param in params:
            param.grad = torch.full_like(param, torch.nan)
        optimizer.step()
        assert optimizer.step_was_skipped
        assert all(torch.equal(param, before) for param, before in zip(params, old, strict=True))


INVALID = [
    ({"heads": 3}, "8 rows of the query are not divisible by 3: give query_rows"),
    ({"heads": 4, "key_heads": 3}, "key_heads must divide the 4 heads, but is 3"),
    ({"heads": 0}, "key_heads must divide the 0 heads"),
    ({"heads": 2, "query_rows": [(0, 4)]}, "query_rows must be one range for each of the 2 heads, not 1"),
    ({"heads": 2, "key_rows": [(0, 4), (4, 9)]}, "key_rows 4 to 9 are out of range for a key of 8 rows"),
    ({"heads": 2, "query_rows": [(0, 4), (3, 8)]}, "query_rows 3 to 8 overlap with those of another head"),
]


@pytest.mark.parametrize(("options", "sentence"), INVALID)
def test_invalid_layers_raise(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        QueryKey(*parameters(), **options)


def test_fused_projections_without_rows_raise():
    (fused,) = tensors((8, INPUTS))
    with pytest.raises(ValueError, match="key_rows 0 to 4 overlap with those of another head"):
        QueryKey(fused, fused, 2)


def test_invalid_logits_raise():
    layer = QueryKey(*parameters(), 2)
    with pytest.raises(ValueError, match="max_logits returned 2 tensors for 1 layers"):
        QKClip([layer], lambda: [torch.ones(2)] * 2).clip()
    with pytest.raises(ValueError, match=r"shape \[3\] for layer 0 of 2 heads"):
        QKClip([layer], lambda: [torch.ones(3)]).clip()
    for tau in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="tau must be a finite number above zero"):
            QKClip([layer], list, tau)


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(4)


STRIDED = [_StridedShard(0, split_factor=2), Shard(0)]
LAYOUTS = {
    "rows": ((4,), [Shard(0)], [Shard(0)]),
    "columns": ((4,), [Shard(1)], [Replicate()]),
    "replicated": ((4,), [Replicate()], [Replicate()]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)], [Replicate(), Shard(0)]),
    "fsdp of tp rows": ((2, 2), STRIDED, STRIDED),
    "fsdp of tp columns": ((2, 2), [Shard(0), Shard(1)], [Shard(0), Replicate()]),
}


def clip_sharded(rank, group, shape, placements, of_bias):
    mesh = init_device_mesh("cpu", shape)
    fused, bias = tensors((32, INPUTS), (32,))
    weight = distribute_tensor(fused, mesh, placements)
    bias = distribute_tensor(bias, mesh, of_bias)
    one_dim = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    few = distribute_tensor(tensors((3, INPUTS), seed=3)[0], mesh, one_dim)  # empty on the last of 4 ranks
    maxima = largest(*unfused(fused), 4, 2)
    clip(QueryKey((weight, bias), (weight, bias), 4, 2, **INTERLEAVED), maxima)
    clip(QueryKey(few, few, 1, query_rows=[(0, 2)], key_rows=[(2, 3)]), torch.tensor([4 * TAU]))
    return [tensor.full_tensor().numpy() for tensor in (weight, bias, few)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_weights_equal_unsharded_ones(pool, layout):
    fused, bias = tensors((32, INPUTS), (32,))
    (few,) = tensors((3, INPUTS), seed=3)
    maxima = largest(*unfused(fused), 4, 2)
    before = fused.clone()
    clip(QueryKey((fused, bias), (fused, bias), 4, 2, **INTERLEAVED), maxima)
    assert not torch.equal(fused, before)
    for found_weight, found_bias, found_few in pool.run(4, clip_sharded, *LAYOUTS[layout]):
        assert torch.equal(torch.from_numpy(found_weight), fused)
        assert torch.equal(torch.from_numpy(found_bias), bias)
        torch.testing.assert_close(torch.from_numpy(found_few), few / 2)
