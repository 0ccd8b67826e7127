"""Step times of hand-made models on hardware with round numbers, against closed forms."""

import dataclasses
from collections import Counter

import pytest

from tests.support.planning import ROUND, make_layout, make_part, make_parts
from titan_async.optim.coefficients import resolve_coefficients
from titan_async.optim.orthogonalization import orthogonalization_cost
from titan_async.pipelining._order_internals import torch_order
from titan_async.pipelining.programs import schedule_programs
from titan_async.pipelining.simulation import simulate
from titan_async.planning.hardware import ACHIEVABLE_BANDWIDTH
from titan_async.planning.network import Network
from titan_async.planning.optimizer_cost import update_cost
from titan_async.planning.stage_cost import message_bytes, stage_cost
from titan_async.planning.step_time import seconds_by_receives, stage_costs, step_time, timing_of

EACH = 0.01
"""Seconds of the forward of a part of 1 TFLOP, and of each half of its backward."""
IDLE_NETWORK = dataclasses.replace(ROUND, link_bandwidth=1e30, network_bandwidth=1e30)


def time_of(config, layout, parts, cluster=IDLE_NETWORK):
    return step_time(config, layout, parts, cluster)


@pytest.mark.parametrize(("d", "m"), [(2, 2), (4, 8)])
def test_1f1b_has_the_bubble_of_its_closed_form(config, d, m):
    time = time_of(config, make_layout(d, microbatches=m), make_parts(d))
    assert time.step_seconds == pytest.approx((m + d - 1) * 3 * EACH, rel=1e-4)
    assert time.bubble == pytest.approx((d - 1) / (m + d - 1), abs=1e-4)
    assert time.utilization == pytest.approx(m / (m + d - 1), abs=1e-4)


def test_figures_derived_from_the_step_time(config):
    layout = make_layout(4, microbatches=8, dp_shard=2, schedule="Async2BW")
    time = time_of(config, layout, make_parts(4))
    assert time.step_seconds == pytest.approx(8 * 3 * EACH, rel=1e-4)
    assert time.utilization == pytest.approx(1, abs=1e-4) and time.bubble < 1e-4
    assert time.mfu == pytest.approx(ROUND.accelerator.achievable, rel=1e-4)
    assert time.tokens_per_second == pytest.approx(2 * 8 * 1024 / (8 * 3 * EACH), rel=1e-4)
    assert time.days == pytest.approx(10 * time.step_seconds / 86_400)
    assert time.accelerator_hours == pytest.approx(time.days * 24 * 8)


@pytest.mark.parametrize(("d", "m", "lookahead"), [(4, 8, 0), (4, 8, 3), (2, 64, 0)])
def test_synchronous_start_has_the_bubble_of_1f1b(config, d, m, lookahead):
    """Four of ten steps; lookahead does not reduce the bubble of a drain."""
    layout = make_layout(d, microbatches=m, lookahead=lookahead, schedule="Async2BW", synchronous_steps=4)
    time = time_of(config, layout, make_parts(d))
    assert time.step_seconds == pytest.approx(m * 3 * EACH, rel=1e-4)
    assert time.synchronous_step_seconds == pytest.approx((m + d - 1) * 3 * EACH, rel=1e-4)
    assert time.days * 86_400 == pytest.approx((6 * m + 4 * (m + d - 1)) * 3 * EACH, rel=1e-4)
    assert time.accelerator_hours == pytest.approx(time.days * 24 * d)


@pytest.mark.parametrize(("per_node", "share"), [(8, 0.04), (1, 0.08)])
def test_pending_receive_slows_its_rank_down(config, per_node, share):
    """Two equal stages exchange messages at the same times, so an early receive is pending all the time. The
    last pair of a batch has none for activations, and the last stage is not slowed down there."""
    cluster = dataclasses.replace(IDLE_NETWORK, per_node=per_node, link_blocks=4, network_blocks=8)
    m, layout, parts = 4, make_layout(2, microbatches=4, schedule="Async2BW"), make_parts(2)
    costs = stage_costs(config, layout, parts, cluster)
    # Both stages are slowed down during all pairs except a batch's last one, when only the first stage is,
    # until it receives its gradient after a pair; the last stage then waits for the time lost.
    always = ((m - 1) / (1 - share) + 1 + share) * 3 * EACH
    seconds = seconds_by_receives(config, layout, costs, cluster)
    assert seconds == {
        "never": pytest.approx(m * 3 * EACH, rel=1e-4),
        "always": pytest.approx(always, rel=1e-4),
        "auto": pytest.approx(m * 3 * EACH, rel=1e-4),
    }
    for early in seconds:
        pipeline = dataclasses.replace(config.pipeline, early_receives=early)
        changed = dataclasses.replace(config, pipeline=pipeline)
        assert step_time(changed, layout, parts, cluster).step_seconds == seconds[early]
    time = step_time(config, layout, parts, cluster)
    assert time.bubble == pytest.approx(1 - m * 3 * EACH / seconds["auto"], abs=1e-4)
    ahead = seconds_by_receives(config, dataclasses.replace(layout, lookahead=1), costs, cluster)
    assert (ahead["auto"] == ahead["never"]) == (per_node == 8) and ahead["auto"] != ahead["always"]
    for free in (dataclasses.replace(layout, schedule="1F1B"), make_layout(1, pp=1, schedule="Async2BW")):
        assert seconds_by_receives(config, free, costs[: free.pp], cluster) == {}


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_two_stages_per_rank(config, schedule):
    d, m = 4, 8
    time = time_of(
        config, make_layout(8, pp=d, stages_of=8, microbatches=m, schedule=schedule), make_parts(8)
    )
    bubble = (d - 1) * (3 if schedule == "Interleaved1F1B" else 1) * EACH
    assert time.step_seconds == pytest.approx(2 * m * 3 * EACH + bubble, rel=1e-4)


def test_each_pass_flushes_the_pipeline(config):
    whole = time_of(config, make_layout(4, microbatches=16), make_parts(4))
    halves = time_of(config, make_layout(4, microbatches=16, passes=2), make_parts(4))
    assert halves.step_seconds - whole.step_seconds == pytest.approx(3 * 3 * EACH, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "lookahead"), [("Async2BW", 0), ("Async2BW", 3), ("1F1B", 0), ("ZBVZeroBubble", 0)]
)
def test_extrapolation_equals_the_simulation_of_many_microbatches(config, schedule, lookahead):
    each = 1 if schedule in ("Async2BW", "1F1B") else 2
    layout = make_layout(
        4 * each,
        pp=4,
        stages_of=4 * each,
        schedule=schedule,
        lookahead=lookahead,
        dp_shard=2,
        microbatches=96,
    )
    parts = make_parts(4 * each, shape=(1024, 1024))
    parts["layers.2"] = make_part("layers.2", tflops=1.3)
    costs = stage_costs(config, layout, parts, ROUND)
    programs = schedule_programs(schedule, 4, 96, 6, lookahead)
    run = simulate(programs, timing_of(config, layout, costs, ROUND))
    time = step_time(config, layout, parts, ROUND)
    assert time.step_seconds == pytest.approx(run.step_seconds, rel=1e-3)
    assert time.utilization == pytest.approx(run.utilization, abs=2e-3)


@pytest.mark.parametrize(("per_node", "exchange"), [(8, 0.1 * EACH), (1, 1.5 * EACH)])
@pytest.mark.parametrize("repeats", [1, 2])
def test_overlapped_pairs_hide_all_to_alls(config, repeats, per_node, exchange):
    """Three layers per stage, whose dispatch and combine each take 0.1 or 1.5 times a layer's forward; with
    activation checkpointing the backward repeats both, and the computation."""
    even = dataclasses.replace(config.debug, moe_force_load_balance=True)
    config = dataclasses.replace(config, debug=even)
    bandwidth = ROUND.link_bandwidth if per_node == 8 else ROUND.network_bandwidth
    size = exchange * bandwidth * ACHIEVABLE_BANDWIDTH * 2
    parts = make_parts(6, dispatched_bytes=size, recompute_flops=(repeats - 1) * 1e12)
    layout = make_layout(6, pp=2, microbatches=4, dp_shard=2, ep=2, schedule="Async2BW")
    cluster = dataclasses.replace(ROUND, per_node=per_node)
    costs = stage_costs(config, layout, parts, cluster)
    forward, backward = 6 * (EACH / 2 + exchange), 3 * (1 + repeats) * EACH + 6 * repeats * exchange
    overlapped = dataclasses.replace(layout, overlap=True)
    # Each half has six all-to-alls, or the backward twelve, of which six overlap with the forward.
    hidden = min(EACH / 2, exchange) + min((1 + repeats) * EACH / 2 / repeats, exchange)
    for each, pair in ((layout, forward + backward), (overlapped, forward + backward - 6 * hidden)):
        time = step_time(config, each, parts, cluster, costs=costs)
        rest = sum(cost.gather + cost.reduction + cost.update for cost in costs) / 2
        assert time.step_seconds == pytest.approx(4 * pair + rest, rel=0.02)
        assert time.utilization == pytest.approx(4 * pair / time.step_seconds, rel=1e-3)
        assert time.sent_bytes["experts"] == pytest.approx(4 * 4 * (1 + repeats) * 6 * size / 2)


def test_two_shards_of_one_stage_by_hand(config):
    """A layer of 2^20 elements, gathered in bfloat16 and reduced in float32."""
    numbers = 2**20
    parts = make_parts(1, tflops=1.0, shape=(1024, 1024))
    layout = make_layout(1, pp=1, dp_shard=2, microbatches=4, schedule="1F1B")
    cost = stage_costs(config, layout, parts, ROUND)[0]
    own = [parts["tok_embeddings"], parts["layers.0"], parts["head"]]
    sizes = [part.dense for part in own]
    assert sizes == [4096, numbers, 4096]
    # Each rank sends half of a weight per forward and per backward, and then half of a gradient; the head is
    # not freed in between.
    assert cost.sent["weights"] == pytest.approx(4 * (2 * sum(sizes) - sizes[-1]) * 2 / 2)
    assert cost.sent["gradients"] == pytest.approx(4 * sum(sizes) * 4 / 2)
    assert cost.gather == pytest.approx(4096 * 2 / 2 / 80e9)
    assert cost.reduction == pytest.approx(4096 * 4 / 2 / 80e9)
    assert cost.forward == pytest.approx(EACH + 2 * 4096 / 80e9, rel=1e-6)
    # Muon sends half of the matrix to its owner and half of the update back, in bfloat16; mean of two ranks.
    assert cost.sent["Muon"] == pytest.approx(2 * (numbers * 2 / 2) / 2)


def test_pipelines_gather_weights_once_per_batch(config):
    parts = make_parts(4, shape=(4096, 4096))
    layout = make_layout(4, dp_shard=2, microbatches=8)
    sent = {schedule: [] for schedule in ("1F1B", "Async2BW")}
    for schedule in sent:
        costs = stage_costs(config, dataclasses.replace(layout, schedule=schedule), parts, ROUND)
        sent[schedule] = [cost.sent for cost in costs]
        size = 4096**2 * 2 / 2
        assert costs[1].sent["weights"] == pytest.approx(size)
        assert costs[1].sent["gradients"] == pytest.approx(2 * size)
        # The gather of a stage's first part is exposed.
        assert costs[1].gather == pytest.approx(size / 80e9)
        assert costs[1].reduction == pytest.approx(2 * size / 80e9)
    assert sent["1F1B"] == sent["Async2BW"]
    parts = make_parts(8, shape=(4096, 4096))
    for schedule in sent:
        layout = make_layout(8, pp=4, dp_shard=2, microbatches=8, schedule=schedule)
        assert stage_costs(config, layout, parts, ROUND)[1].gather == pytest.approx(size / 80e9)


@pytest.mark.parametrize("slower", [0.1, 20])
def test_four_stages_per_rank_gather_freed_weights_again(config, slower):
    """LoopedBFS runs all forwards stage by stage, and backwards in reverse order. Three stages stay gathered
    in between, and the first is gathered again during the backwards of two others. A gather takes 0.1 or 20
    times a stage's two forwards."""
    d, m = 2, 2
    gather = slower * m * EACH
    size = gather * 80e9 / (7 / 8)
    shape = (1024, round(size / 2 / 1024))
    layout = make_layout(8, pp=d, stages_of=8, dp_shard=8, microbatches=m, schedule="LoopedBFS")
    cluster = dataclasses.replace(ROUND, per_node=8 * d)
    costs = stage_costs(config, layout, make_parts(8, shape=shape), cluster)
    once = costs[3].sent["weights"]
    assert once == pytest.approx(size * 7 / 8, rel=1e-3)
    for rank in range(d):
        first, *others = (costs[stage] for stage in layout.stages_of(rank))
        assert first.sent["weights"] == pytest.approx(2 * once, rel=0.01)
        assert [cost.sent["weights"] for cost in others] == pytest.approx([once] * 3, rel=0.01)
        waits = max(gather - m * first.forward, 0)
        again = max(gather - m * (others[0].backward + others[1].backward), 0)
        assert first.gather == pytest.approx(gather + again, rel=0.02)
        assert [cost.gather for cost in others] == pytest.approx([waits] * 3, rel=0.02, abs=1e-5)
    # Each pass repeats all gathers; with three stages per rank each stage is gathered once per pass.
    twice = dataclasses.replace(layout, passes=2, microbatches=2 * m)
    assert stage_costs(config, twice, make_parts(8, shape=shape), cluster)[0].sent[
        "weights"
    ] == pytest.approx(2 * costs[0].sent["weights"])
    three = make_layout(6, pp=d, stages_of=6, dp_shard=8, microbatches=m, schedule="LoopedBFS")
    sent = [cost.sent["weights"] for cost in stage_costs(config, three, make_parts(6, shape=shape), cluster)]
    assert sent == pytest.approx([once] * 6, rel=0.01)


def test_gathers_of_many_microbatches_match_torchs_order(config):
    layout = make_layout(16, pp=4, stages_of=16, dp_shard=8, microbatches=96, schedule="Interleaved1F1B")
    costs = stage_costs(config, layout, make_parts(16, shape=(1024, 1024)), ROUND)
    stages = [list(layout.stages_of(rank)) for rank in range(4)]
    order = torch_order("Interleaved1F1B", stages, 96, gathers=True)
    gathers = Counter(action.stage for actions in order for action in actions if action.kind == "G")
    assert max(gathers.values()) > 10
    for stage in range(1, 15):
        assert costs[stage].sent["weights"] == pytest.approx(gathers[stage] * 2**21 * 7 / 8)


def test_messages_are_hidden_states(config):
    layout = make_layout(2, dp_shard=8, microbatches=4)
    size = 1024 * config.model_spec.model.dim * 2
    timing = timing_of(config, layout, stage_costs(config, layout, make_parts(2), ROUND), ROUND)
    assert timing.latency == [pytest.approx(size / 8e9)]
    sent = step_time(config, layout, make_parts(2), ROUND).sent_bytes
    assert sent["activations"] == pytest.approx(8 * 4 * 2 * size)  # per pipeline, in both directions


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_ranks_share_a_message(config, tp):
    layout = make_layout(2, tp=tp)
    assert message_bytes(config, layout) == 1024 * config.model_spec.model.dim * 2 / tp


def test_updates_do_not_count_as_bubble(config):
    layout, parts = make_layout(2, microbatches=4), make_parts(2)
    costs = stage_costs(config, layout, parts, IDLE_NETWORK)
    slow = [dataclasses.replace(cost, update=3 * EACH, gather=0.0, reduction=0.0) for cost in costs]
    time = step_time(config, layout, parts, IDLE_NETWORK, costs=slow)
    # Each rank idles for one of five pairs; an update as long as a pair follows.
    assert time.step_seconds == pytest.approx(6 * 3 * EACH, rel=1e-4)
    assert time.bubble == pytest.approx(1 / 6, abs=1e-4)


def test_expert_parallelism_exchanges_tokens_and_shards_experts(config):
    balanced = dataclasses.replace(config.debug, moe_force_load_balance=True)
    config = dataclasses.replace(config, debug=balanced)
    size = 16 * 10**9 // 1000
    parts = {"layers.0": make_part("layers.0", shape=(8, 64, 64), expert=True, dispatched_bytes=size)}
    parts |= {name: make_part(name, tflops=0.0) for name in ("tok_embeddings", "head")}
    apart, pairs, together = (
        stage_costs(config, make_layout(1, pp=1, dp_shard=8, ep=ep, microbatches=1), parts, ROUND)[0]
        for ep in (8, 4, 1)
    )
    once = size * 7 / 8 / 80e9
    assert apart.forward == pytest.approx(EACH + 2 * once, rel=1e-3)
    assert apart.input_gradient == pytest.approx(EACH + 2 * once, rel=1e-3)
    assert apart.sent["experts"] == pytest.approx(4 * size * 7 / 8)
    assert together.forward == pytest.approx(EACH, rel=1e-3) and together.sent["experts"] == 0
    # Each of eight ranks has its own expert, whose weights are not gathered.
    assert apart.sent["weights"] < together.sent["weights"]
    # Two ranks share two experts: each sends half of them, forward and backward, in bfloat16.
    assert pairs.sent["weights"] - apart.sent["weights"] == pytest.approx(2 * (2 * 64 * 64 * 2) / 2)
    assert apart.sent["Muon"] == 0


def test_part_without_products_is_limited_by_memory_bandwidth(config):
    slow = dataclasses.replace(
        ROUND, accelerator=dataclasses.replace(ROUND.accelerator, memory_bandwidth=1e9)
    )
    parts = {"tok_embeddings": make_part("tok_embeddings", tflops=0.0, passed_bytes=8 * 10**6)}
    layout = dataclasses.replace(make_layout(1, pp=1), stages=(("tok_embeddings",),))
    cost = stage_cost(config, layout, parts, Network(slow, layout), 0)
    assert cost.forward == pytest.approx(8e6 / (1e9 * ACHIEVABLE_BANDWIDTH))


def test_recomputation_does_not_count_for_mfu(config):
    layout = make_layout(2, microbatches=4, schedule="Async2BW")
    plain = time_of(config, layout, make_parts(2))
    again = time_of(config, layout, make_parts(2, recompute_flops=1e12))
    assert again.step_seconds == pytest.approx(4 / 3 * plain.step_seconds, rel=1e-4)
    assert again.mfu == pytest.approx(3 / 4 * plain.mfu, rel=1e-4)


def test_muons_matrices_are_distributed(config):
    cost = orthogonalization_cost(1024, 1024, resolve_coefficients("standard", 5), "auto")
    weights = [w for part in make_parts(8, shape=(1024, 1024)).values() for w in part.weights]
    hidden = [weight for weight in weights if weight.name.startswith("layers.")]
    for ranks, matrices in ((1, 8), (4, 2), (64, 1)):
        layout = make_layout(8, pp=1, dp_shard=ranks)
        found = update_cost(config, layout, Network(IDLE_NETWORK, layout), hidden)
        assert found.matrix_flops == pytest.approx(matrices * cost)
        passes = 8 * 2**20 / ranks * (32 + 12) / (1e18 * ACHIEVABLE_BANDWIDTH)
        assert found.seconds == pytest.approx(matrices * cost / 100e12 + passes, rel=1e-4)
    others = [weight for weight in weights if weight not in hidden]
    assert update_cost(config, layout, Network(IDLE_NETWORK, layout), others).matrix_flops == 0


@pytest.mark.parametrize("compile", [False, True])
def test_error_feedback_costs_time_only_with_delayed_gradients(config, compile):
    """With AdamW: 8 bytes in a compiled pass, 64 in separate passes (test_counted_traffic.py)."""
    feedback = dataclasses.replace(config.optimizer.error_feedback, compile=compile)
    optimizer = dataclasses.replace(config.optimizer, name="adamw", error_feedback=feedback)
    config = dataclasses.replace(config, optimizer=optimizer)
    weights = make_part("layers.0", shape=(1024, 1024)).weights
    layouts = [make_layout(2, schedule=schedule) for schedule in ("1F1B", "Async2BW")]
    synchronous, delayed = (update_cost(config, each, Network(ROUND, each), weights) for each in layouts)
    passes = 2**20 * (8 if compile else 64) / (1e18 * ACHIEVABLE_BANDWIDTH)
    assert delayed.seconds - synchronous.seconds == pytest.approx(passes, abs=1e-15)


@pytest.mark.parametrize("schedule", ["1F1B", "Async2BW"])
def test_step_time_is_monotonic(config, schedule):
    layout = make_layout(4, microbatches=8, dp_shard=4, schedule=schedule)

    def seconds(cluster=ROUND, tflops=1.0, **changes):
        parts = make_parts(4, tflops=tflops, shape=(2048, 2048))
        return step_time(config, dataclasses.replace(layout, **changes), parts, cluster).step_seconds

    base = seconds()
    assert seconds(tflops=1.1) > base
    assert seconds(microbatches=9) > base
    assert seconds(dataclasses.replace(ROUND, network_bandwidth=5e9)) > base
    assert seconds(ROUND.reaching(0.4)) > base > seconds(ROUND.reaching(0.6))
    assert seconds(dataclasses.replace(ROUND, network_latency=1e-3)) > base
    assert seconds(dp_replicate=2) > base  # an all-reduce, for twice the batch
