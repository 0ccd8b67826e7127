"""Verdicts for hand-made parts, against step times calculated by hand."""

import dataclasses

import pytest

from tests.support.planning import FREE, HEAVY, ROUND, config_of, heavy, light, make_parts
from titan_async.errors import UserError
from titan_async.planning.config_variants import world_size_of
from titan_async.planning.layout import layout_of
from titan_async.planning.measured_times import AS_ASSUMED
from titan_async.planning.step_time import step_time
from titan_async.planning.suggest import Searcher, Suggestion
from titan_async.planning.verdict import verdict_of

EACH = 0.02
"""Seconds of 1 TFLOP in float32."""


def evenly(config):
    """With the same number of layers on all stages."""
    even = {f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
    return dataclasses.replace(config, parallelism=dataclasses.replace(config.parallelism, **even))


def judge(config, *, fits=lambda *_: True, suggested=None, searches=True, cluster=FREE, parts_of=light):
    def time(changed):
        layout = layout_of(changed, world_size_of(changed))
        try:
            return step_time(changed, layout, parts_of(changed), cluster)
        except ValueError as error:
            raise UserError(str(error)) from error

    searcher = Searcher(cluster, AS_ASSUMED, parts_of, fits)
    found = None if suggested is None else Suggestion({}, time(suggested), 0.0, suggested)
    return verdict_of(config, searcher, time, found, searches=searches)


def under(*schedules):
    return lambda _, layout, __: layout.schedule in ("Async2BW", *schedules) and layout.pp > 1


@pytest.mark.parametrize(
    ("schedules", "bubble"),
    [
        (["1F1B"], 2 / 6),
        (["1F1B", "Interleaved1F1B"], 2 / 12),  # two stages per rank halve the bubble
        (["1F1B", "Interleaved1F1B", "ZBVZeroBubble"], 2 / 36),  # split backwards leave a third of that
    ],
)
@pytest.mark.parametrize("own", ["Async2BW", "1F1B"])
def test_gain_is_the_smallest_bubble_of_the_synchronous_schedules(own, schedules, bubble):
    """Three stages, six microbatches; 1F1B's bubble is (d - 1) / m of the computation."""
    verdict = judge(evenly(config_of(3, 1, sequences=12, schedule=own)), fits=under(*schedules))
    assert verdict.outcome == "pays"
    assert verdict.gain == pytest.approx(bubble, abs=2e-3)
    assert verdict.synchronous.layout.schedule == schedules[-1]
    assert verdict.asynchronous.layout.schedule == "Async2BW"
    seconds = 6 * 2 * 3 * EACH  # microbatches, layers, a forward and two halves of a backward
    assert verdict.asynchronous.step_seconds == pytest.approx(seconds, rel=2e-3)
    start = f"Async2BW pays: 720 ms per step (3 stages) against {720 * (1 + bubble):.0f} ms for the fastest"
    assert verdict.sentence.startswith(start)
    assert f"({schedules[-1]} on 3 stages" in verdict.sentence
    cost = "at the cost of one update of delay and up to 0.049 MB per rank"
    assert f", {bubble:.0%} faster, {cost}" in verdict.sentence


def test_one_stage_is_faster_than_uneven_stages():
    """Of four stages with six layers two have two layers, which take 4/3 of the time of four shards."""
    verdict = judge(evenly(config_of(4, 1, sequences=64)), fits=lambda _, layout, __: layout.pp in (1, 4))
    assert verdict.outcome == "does not pay"
    assert 1 / (1 + verdict.gain) == pytest.approx(4 / 3, rel=1e-3)
    assert verdict.synchronous.layout.pp == 1 and verdict.synchronous.layout.world_size == 4
    assert verdict.sentence == (
        f"No pipeline pays: {verdict.synchronous} takes 2.88 s per step, Async2BW 3.84 s (4 stages)."
    )


def test_async2bw_makes_no_difference_without_a_bubble():
    verdict = judge(config_of(2, 2, sequences=64))
    assert verdict.outcome == "no difference"
    assert verdict.gain == pytest.approx(0, abs=1e-3)
    assert verdict.sentence.endswith(", within the plan's 2% error.")


@pytest.mark.parametrize(("slower", "outcome"), [(1.015, "no difference"), (1.03, "does not pay")])
def test_small_losses_make_no_difference(slower, outcome):
    """Two stages and one; the parts of the pipeline are slower by a factor."""

    def parts_of(config):
        return make_parts(6, tflops=slower if config.parallelism.pipeline_parallel_degree > 1 else 1.0)

    verdict = judge(
        config_of(2, 1, sequences=64),
        parts_of=parts_of,
        fits=lambda _, layout, __: layout.delayed or (layout.pp == 1 and layout.microbatch_size == 2),
    )
    assert verdict.outcome == outcome


def test_synchronous_pipeline_is_faster_if_messages_occupy_processors():
    config = config_of(2, 1, sequences=64)
    config = dataclasses.replace(
        config, pipeline=dataclasses.replace(config.pipeline, early_receives="always")
    )
    occupied = dataclasses.replace(FREE, link_blocks=30)  # of 100
    verdict = judge(config, cluster=occupied, fits=under("1F1B"))
    assert verdict.outcome == "does not pay"
    assert verdict.sentence.startswith("Async2BW does not pay: 1F1B on 2 stages takes")


def test_verdict_of_one_stage_includes_async2bw():
    """Four shards gather large weights over a slow network; four stages send little."""
    slow = dataclasses.replace(ROUND, link_bandwidth=1e9)
    one = config_of(1, 4, sequences=32, schedule="1F1B")
    one = dataclasses.replace(one, training=dataclasses.replace(one.training, local_batch_size=2))
    verdict = judge(one, cluster=slow, parts_of=heavy)
    assert verdict.outcome == "pays" and verdict.synchronous.layout.pp == 1
    assert verdict.asynchronous.layout.pp > 1 and verdict.asynchronous.layout.world_size == 4
    assert verdict.asynchronous.layout.tokens_per_step == layout_of(one, 4).tokens_per_step
    alone = judge(one, cluster=slow, parts_of=heavy, searches=False)
    assert alone.outcome == "only synchronous"
    assert alone.sentence == (
        "Async2BW cannot be faster on one stage, which has no bubble; other layouts were not searched "
        "(--no-suggest)."
    )


def test_second_version_is_that_of_a_stage():
    """Three layers and the embedding, in float32; the last stage has none."""
    verdict = judge(config_of(2, 1, sequences=4), parts_of=heavy, fits=under("1F1B"))
    assert verdict.second_version == 4 * (3 * HEAVY[0] * HEAVY[1] + 64 * 64)
    assert "up to 0.8 GB per rank for a second weight version" in verdict.sentence


def test_suggested_layout_is_compared_under_every_schedule():
    """Six stages are planned, and three suggested, where 1F1B has a bubble as well."""
    own, suggested = evenly(config_of(6, 1, sequences=12)), evenly(config_of(3, 2, sequences=12))
    verdict = judge(own, suggested=suggested, fits=under("1F1B"))
    assert verdict.synchronous.layout.pp == 3
    # Six microbatches of one layer; three microbatches of two layers, and a bubble of two of these.
    assert verdict.gain == pytest.approx((3 + 2) * 2 / 6 - 1, abs=2e-3)


def test_synchronous_alternative_has_one_pass_per_batch():
    config = evenly(config_of(3, 1, sequences=12, schedule="1F1B"))
    twice = dataclasses.replace(config, training=dataclasses.replace(config.training, local_batch_size=6))
    assert layout_of(twice, 3).passes == 2
    assert judge(twice, fits=under("1F1B")).gain == pytest.approx(2 / 6, abs=2e-3)


def test_layouts_that_do_not_fit_are_not_compared():
    config = config_of(2, 2, sequences=64)
    nothing = judge(config, fits=lambda *_: False)
    assert (nothing.outcome, nothing.gain) == ("nothing", None)
    assert nothing.sentence == "No layout fits, neither under Async2BW nor without a delay."
    alone = judge(config, fits=lambda _, layout, __: layout.delayed)
    assert alone.outcome == "only Async2BW"
    assert alone.sentence.startswith(
        "Only Async2BW runs and fits: 2.88 s per step (2 stages x 2 shards), at the cost of one"
    )
    without = judge(config, fits=lambda _, layout, __: layout.pp == 1)
    assert without.outcome == "only synchronous"
    assert without.sentence == (
        f"No layout under Async2BW runs and fits: {without.synchronous} takes 2.88 s per step."
    )


def test_verdict_of_one_rank():
    verdict = judge(config_of(1, 1, sequences=2))
    assert verdict.sentence == "Async2BW cannot be faster on one rank, which has no pipeline."


def test_sentence_states_if_layouts_were_not_searched():
    verdict = judge(config_of(2, 2, sequences=64), searches=False)
    assert verdict.synchronous.layout.pp == 2
    assert verdict.sentence.endswith("; other layouts were not searched (--no-suggest).")
    assert "searched" not in judge(config_of(2, 2, sequences=64)).sentence
