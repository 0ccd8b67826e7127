"""Stages of a layout against torchtitan's, and schedules with more than two stages per rank."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules
from torchtitan.distributed import pipeline_parallel as titan

from tests.support.planning import ROUND, make_layout, make_parts
from titan_async.planning.config_variants import with_schedule
from titan_async.planning.layout import split_of
from titan_async.planning.memory import memory_of
from titan_async.planning.step_time import step_time
from titan_async.recipes.debug import debug

EACH = 0.01
"""Seconds of the forward of a part of 1 TFLOP, and of either half of its backward."""


@given(
    schedule=st.sampled_from(["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]),
    pp=st.sampled_from([2, 4]),
    layers=st.integers(4, 24),
    each=st.none() | st.integers(1, 8),
    first=st.integers(0, 2),
    last=st.integers(0, 2),
)
def test_stages_are_those_of_torchtitan(schedule, pp, layers, each, first, last):
    parallelism = dataclasses.replace(
        debug().parallelism,
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_layers_per_stage=each,
        pipeline_parallel_first_stage_less_layers=first,
        pipeline_parallel_last_stage_less_layers=last,
    )
    model = SimpleNamespace(layers=[None] * layers)
    try:
        numbers = titan._get_pipeline_metadata(SimpleNamespace(pp=pp), parallelism, model)
        modules = titan._generate_llm_fqn_per_model_part(*numbers)
    except ValueError:  # rejected by `check_layout` in a plan
        return
    wanted = [[name.replace("lm_head", "head") for name in stage if name != "norm"] for stage in modules]
    assert split_of(parallelism, layers) == tuple(map(tuple, wanted))


def interleaved(d, each, m, **changes):
    stages = d * each
    return make_layout(stages, pp=d, stages_of=stages, microbatches=m, schedule="Interleaved1F1B", **changes)


@pytest.mark.parametrize("each", [2, 3, 4])
def test_more_stages_per_rank_divide_the_bubble(config, each):
    d, m = 4, 8
    layout = interleaved(d, each, m)
    assert [layout.stages_of(rank) for rank in (0, 3)] == [
        tuple(range(0, d * each, d)),
        tuple(range(3, d * each, d)),
    ]
    cluster = dataclasses.replace(ROUND, link_bandwidth=1e30, network_bandwidth=1e30)
    time = step_time(config, layout, make_parts(d * each), cluster)
    assert time.step_seconds == pytest.approx((each * m + d - 1) * 3 * EACH, rel=1e-3)
    assert time.bubble == pytest.approx((d - 1) / (each * m + d - 1), abs=1e-3)


@pytest.mark.parametrize(("each", "gathered"), [(2, 2), (3, 3), (4, 3)])
def test_torch_keeps_three_stages_of_a_rank_gathered(config, each, gathered):
    """Compared with torch's own order of gathers and frees; all layers are equal."""
    layout = interleaved(2, each, 4, dp_shard=2)
    parts = make_parts(2 * each, shape=(1024, 1024))
    memory = memory_of(config, layout, parts, 1, on_cpu=True)
    assert memory.items["unsharded weights"] == pytest.approx(gathered * 2**20 * 2, rel=0.01)
    order = [
        schedules._Action(task.stage, getattr(schedules, _NAMES[task.kind]), task.microbatch)
        for task in layout.programs(4, 1)[1]
        if task.kind in _NAMES
    ]
    active, most = set(), 0
    for action in schedules._add_unshard_reshard(order):
        if action.computation_type is schedules.UNSHARD:
            active.add(action.stage_index)
        if action.computation_type is schedules.RESHARD:
            active.discard(action.stage_index)
        most = max(most, len(active))
    assert most == gathered


_NAMES = {"F": "FORWARD", "B": "FULL_BACKWARD"}


def test_split_is_adapted_to_another_schedule(config):
    """Only interleaved schedules take four stages per rank; 1F1B has one, ZBV two."""
    parallelism = dataclasses.replace(
        config.parallelism,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_layers_per_stage=1,
        data_parallel_shard_degree=1,
    )
    config = dataclasses.replace(config, parallelism=parallelism)
    stages = {
        name: len(split_of(with_schedule(config, name).parallelism, 6))
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "1F1B", "ZBVZeroBubble", "Async2BW")
    }
    assert stages == {
        "Interleaved1F1B": 8,
        "InterleavedZeroBubble": 8,
        "1F1B": 2,
        "ZBVZeroBubble": 4,
        "Async2BW": 2,
    }
