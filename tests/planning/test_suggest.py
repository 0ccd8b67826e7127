"""Suggestions for the laptop recipe with hand-made parts, on hardware with one scarce resource."""

import dataclasses
from types import SimpleNamespace

import pytest

from tests.support.planning import FREE, ROUND, config_of, heavy, light, make_parts
from titan_async.config.recipe_file import resolve
from titan_async.errors import UserError
from titan_async.planning.config_variants import (
    Degrees,
    at_degrees,
    on_nodes,
    on_own_ranks,
    with_schedule,
    world_size_of,
)
from titan_async.planning.layout import layout_of
from titan_async.planning.measured_times import AS_ASSUMED
from titan_async.planning.plan import Planner
from titan_async.planning.report import _suggestion
from titan_async.planning.step_time import step_time
from titan_async.planning.suggest import LEAST_GAIN, Searcher

SPREAD = (
    *("debug_moe_cpu.toml", "--parallelism.data_parallel_shard_degree", "2"),
    *("--parallelism.expert_parallel_degree", "2", "--training.local_batch_size", "16"),
    *("--training.global_batch_size", "32"),
)
"""Two stages, each with experts over two ranks; eight microbatches of two sequences."""


def with_experts(config):
    """Six layers of eight experts, whose all-to-alls take as long as the forward's computation. Each layer
    saves 1 GB per sequence."""
    size = config.parallelism.pipeline_parallel_microbatch_size
    sizes = {"dispatched_bytes": size * 4 * 10**8, "message_bytes": size * 10**6, "saved_bytes": size * 10**9}
    return make_parts(6, tflops=size / 2, shape=(8, 64, 64), expert=True, **sizes)


def suggest(config, parts_of, cluster=ROUND, fits=lambda *_: True):
    world_size = world_size_of(config)
    now = step_time(config, layout_of(config, world_size), parts_of(config), cluster)
    return Searcher(cluster, AS_ASSUMED, parts_of, fits).suggest(config, now), now


SLOW = dataclasses.replace(ROUND, link_bandwidth=2e9, network_bandwidth=1e9)


def test_variants_keep_the_batch():
    config = config_of(2, 2)
    before = layout_of(config, 4)
    for changed in (
        at_degrees(config, Degrees(pp=4, dp_replicate=1, dp_shard=1, ep=1, microbatch_size=4, lookahead=2)),
        at_degrees(config, Degrees(pp=1, dp_replicate=2, dp_shard=2, ep=1, microbatch_size=4, lookahead=0)),
        with_schedule(config, "1F1B"),
        on_nodes(config, 1, 8),
    ):
        layout = layout_of(changed, world_size_of(changed))
        assert layout.tokens_per_step == before.tokens_per_step
        assert layout.passes == 1 or layout.pp == 1
    assert world_size_of(on_nodes(config, 2, 8)) == 16


def test_open_shard_degree_fills_a_node():
    config = dataclasses.replace(
        config_of(2, 1),
        parallelism=dataclasses.replace(config_of(2, 1).parallelism, data_parallel_shard_degree=-1),
    )
    assert world_size_of(on_own_ranks(config, 8)) == 8
    assert on_own_ranks(config_of(2, 2), 8).parallelism.data_parallel_shard_degree == 2


def test_slow_network_reduces_the_shards_of_a_stage():
    found, now = suggest(config_of(2, 2), heavy, SLOW)
    assert found is not None and found.gain > LEAST_GAIN
    assert found.time.step_seconds == pytest.approx(now.step_seconds / (1 + found.gain))
    assert found.changes["parallelism.data_parallel_shard_degree"] == (2, 1)
    assert found.changes["parallelism.pipeline_parallel_degree"] == (2, 4)
    assert found.time.world_size == 4


def test_suggestion_fits_into_memory():
    unlimited, _ = suggest(config_of(2, 2), heavy, SLOW)
    checked = []

    def fits(config, layout, parts):
        checked.append(layout)
        return layout.pp < 4

    limited, _ = suggest(config_of(2, 2), heavy, SLOW, fits)
    assert checked[0].pp == 4  # the lowest bound first
    assert limited is None or limited.time.step_seconds > unlimited.time.step_seconds
    assert suggest(config_of(2, 2), heavy, SLOW, lambda *_: False)[0] is None


def test_there_is_no_suggestion_without_a_gain():
    found, now = suggest(config_of(2, 1, sequences=64), light, FREE)
    assert now.utilization == pytest.approx(1, abs=0.01)
    assert found is None


def test_layout_with_a_smaller_bubble_is_suggested():
    found, now = suggest(config_of(2, 1, sequences=8, schedule="1F1B"), light, FREE)
    assert now.bubble == pytest.approx(1 / 5, abs=0.01)
    assert found is not None and found.time.bubble < now.bubble


@pytest.mark.parametrize(
    ("per_node", "blocks", "suggested"),
    [
        (8, 0, True),
        (8, 4, False),  # late receives expose messages with lookahead too, and occupy the sender's processors
        (1, 4, False),  # between nodes receives of activations are early, but those of gradients late
    ],
)
def test_lookahead_is_suggested_if_it_hides_messages(per_node, blocks, suggested):
    cluster = dataclasses.replace(
        FREE,
        per_node=per_node,
        link_latency=0.005,
        network_latency=0.005,
        link_blocks=blocks,
        network_blocks=blocks,
    )
    found, _ = suggest(
        config_of(2, 1, sequences=64),
        light,
        cluster,
        lambda _, layout, __: (layout.pp, layout.microbatch_size) == (2, 2),
    )
    assert (found is not None) == suggested
    assert not suggested or found.changes == {"pipeline.lookahead": (0, 1)}


def of_two_stages(_, layout, __):
    return (layout.pp, layout.dp_shard, layout.microbatch_size, layout.lookahead) == (2, 2, 2, 0)


def of_spread_experts(_, layout, __):
    return of_two_stages(_, layout, __) and layout.ep == 2


def test_overlapped_pairs_are_suggested_with_all_to_alls():
    config = resolve([*SPREAD])
    found, now = suggest(config, with_experts, fits=of_spread_experts)
    assert found is not None and found.changes == {"pipeline.overlap": (False, True)}
    assert found.gain > 0.2 and found.time.bubble < 0.01
    again, now = suggest(found.config, with_experts, fits=of_spread_experts)
    assert now.step_seconds == found.time.step_seconds and again is None


def test_pairs_that_do_not_fit_are_not_suggested():
    """The first of two stages holds two microbatches of 6 GB, or four with pairs."""
    config = resolve([*SPREAD])
    for memory, suggested in ((30e9, True), (20e9, False)):
        cluster = dataclasses.replace(
            ROUND, accelerator=dataclasses.replace(ROUND.accelerator, memory=int(memory))
        )
        planner = Planner(cluster)
        found, _ = suggest(
            config,
            with_experts,
            cluster,
            lambda *run, fits=planner._fits: of_spread_experts(*run) and fits(*run),
        )
        assert planner._fits(config, layout_of(config, 4), with_experts(config))
        assert (found is not None) == suggested


def test_overlap_is_dropped_without_all_to_alls():
    config = resolve([*SPREAD, "--pipeline.overlap"])
    slow = dataclasses.replace(ROUND, link_bandwidth=1e9)
    found, _ = suggest(config, with_experts, slow, of_two_stages)
    assert found is not None
    assert found.changes == {
        "parallelism.expert_parallel_degree": (2, 1),
        "pipeline.overlap": (True, False),
    }


@pytest.mark.parametrize("flags", [[], ["--pipeline.overlap"]])
def test_printed_flags_make_the_suggested_layout(flags):
    config = resolve([*SPREAD, *flags])
    cluster = dataclasses.replace(ROUND, link_bandwidth=1e9 if flags else 100e9)
    found, _ = suggest(config, with_experts, cluster, of_two_stages if flags else of_spread_experts)
    _, *lines = _suggestion(SimpleNamespace(suggestion=found))
    printed = [word for line in lines for word in line.partition("#")[0].split()]
    assert "overlap" in " ".join(printed)
    assert layout_of(resolve([*SPREAD, *flags, *printed]), 4) == layout_of(found.config, 4)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "Async2BW"])
def test_search_finds_the_fastest_layout(schedule):
    config = config_of(2, 2, sequences=16, microbatch=4, schedule=schedule)
    slower = dataclasses.replace(SLOW, link_latency=0.02)
    searcher = Searcher(slower, AS_ASSUMED, light, lambda config, layout, parts: layout.pp > 1)
    seconds = [
        (candidate.bound, step_time(candidate.config, candidate.layout, candidate.parts, slower).step_seconds)
        for candidate in searcher._candidates(config, 4)
        if candidate.layout.pp > 1
    ]
    assert all(bound <= time * (1 + 1e-9) for bound, time in seconds) and len(seconds) > 3
    if schedule == "Async2BW":  # the layout with the lowest bound is not the fastest
        assert min(seconds)[1] > min(time for _, time in seconds)
    found = searcher.fastest(config, 4)
    assert found is not None and found[0].step_seconds == min(time for _, time in seconds)


def test_pairs_are_not_faster_than_their_bound():
    config = resolve([*SPREAD])
    searcher = Searcher(ROUND, AS_ASSUMED, with_experts, lambda *_: True)
    paired = [candidate for candidate in searcher._candidates(config, 4) if candidate.layout.overlap]
    assert {candidate.layout.lookahead for candidate in paired} == {0, 1}
    for candidate in paired:
        time = step_time(candidate.config, candidate.layout, candidate.parts, ROUND)
        assert candidate.bound <= time.step_seconds * (1 + 1e-9)


def test_suggested_layout_has_no_further_suggestion():
    found, _ = suggest(config_of(2, 2), heavy, SLOW)
    again, now = suggest(found.config, heavy, SLOW)
    assert now.step_seconds == pytest.approx(found.time.step_seconds)
    assert again is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: on_nodes(config_of(3, 1), 1, 8), r"--nodes 1 makes 8 ranks .* does not divide"),
        (lambda: on_nodes(config_of(2, 1), 0, 8), "--nodes is 0"),
        (lambda: on_nodes(config_of(2, 1, sequences=6), 1, 8), "6 sequences cannot be divided evenly over 4"),
        (
            lambda: on_nodes(config_of(2, 2, sequences=8), 4, 8),
            "8 sequences cannot be divided evenly over 16",
        ),
    ],
)
def test_incompatible_numbers_are_rejected(change, words):
    with pytest.raises(UserError, match=words):
        change()
