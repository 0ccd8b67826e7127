"""Whether Async2BW pays, on hand-made parts for which that can be worked out on paper."""

import dataclasses

import pytest

from tests.support.planning import FREE, ROUND, config_of, light, make_parts
from titan_async.errors import UserError
from titan_async.planning.config_variants import world_size_of
from titan_async.planning.layout import layout_of
from titan_async.planning.measured_times import AS_ASSUMED
from titan_async.planning.step_time import step_time
from titan_async.planning.suggest import Searcher, Suggestion
from titan_async.planning.verdict import verdict_of

EACH = 0.02
"""Seconds of 1 TFLOP in float32."""

NUMBERS = (65_536, 1024)


def heavy(config):
    """Six layers of 67 M weights, each of which a slow network gathers in no time to speak of."""
    return make_parts(6, tflops=config.parallelism.pipeline_parallel_microbatch_size / 2, shape=NUMBERS)


def evenly(config):
    """As many layers on each stage, the embedding and the head beside them."""
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
        (["1F1B", "Interleaved1F1B"], 2 / 12),  # two stages a rank halve it
        (["1F1B", "Interleaved1F1B", "ZBVZeroBubble"], 2 / 36),  # and half backwards leave a third of that
    ],
)
@pytest.mark.parametrize("own", ["Async2BW", "1F1B"])
def test_async2bw_pays_by_the_smallest_bubble_that_the_others_leave(own, schedules, bubble):
    """Three stages, six microbatches; 1F1B's bubble is (d - 1) / m of the time that is computed."""
    verdict = judge(evenly(config_of(3, 1, sequences=12, schedule=own)), fits=under(*schedules))
    assert verdict.outcome == "pays"
    assert verdict.gain == pytest.approx(bubble, abs=2e-3)
    assert verdict.synchronous.layout.schedule == schedules[-1]
    assert verdict.asynchronous.layout.schedule == "Async2BW"
    seconds = 6 * 2 * 3 * EACH  # microbatches, layers, a forward and two halves of a backward
    assert verdict.asynchronous.step_seconds == pytest.approx(seconds, rel=2e-3)
    words = f"Async2BW pays: 720 ms a step (3 stages) against {720 * (1 + bubble):.0f} ms for the fastest"
    assert verdict.sentence.startswith(words)
    assert f"({schedules[-1]} on 3 stages" in verdict.sentence
    assert f", {bubble:.0%} faster, for one update of delay and up to 0.049 MB" in verdict.sentence


def test_one_stage_wins_where_stages_are_uneven():
    """Of six layers on four ranks two stages have two: they take four thirds of what four shards take."""
    verdict = judge(evenly(config_of(4, 1, sequences=64)), fits=lambda _, layout, __: layout.pp in (1, 4))
    assert verdict.outcome == "does not pay"
    assert 1 / (1 + verdict.gain) == pytest.approx(4 / 3, rel=1e-3)
    assert verdict.synchronous.layout.pp == 1 and verdict.synchronous.layout.world_size == 4
    assert verdict.sentence == (
        f"No pipeline pays here: {verdict.synchronous} takes 2.88 s a step, Async2BW 3.84 s (4 stages)."
    )


def test_without_a_bubble_it_makes_no_difference():
    verdict = judge(config_of(2, 2, sequences=64))
    assert verdict.outcome == "no difference"
    assert verdict.gain == pytest.approx(0, abs=1e-3)
    assert "within the 2% that plans do not know" in verdict.sentence


@pytest.mark.parametrize(("slower", "outcome"), [(1.015, "no difference"), (1.03, "does not pay")])
def test_what_plans_do_not_know_counts_either_way(slower, outcome):
    """Two stages and one; the parts of the pipeline are that much slower."""

    def parts_of(config):
        return make_parts(6, tflops=slower if config.parallelism.pipeline_parallel_degree > 1 else 1.0)

    verdict = judge(
        config_of(2, 1, sequences=64),
        parts_of=parts_of,
        fits=lambda _, layout, __: layout.delayed or (layout.pp == 1 and layout.microbatch_size == 2),
    )
    assert verdict.outcome == outcome


def test_another_pipeline_wins_where_messages_hold_processors():
    config = config_of(2, 1, sequences=64)
    config = dataclasses.replace(
        config, pipeline=dataclasses.replace(config.pipeline, early_receives="always")
    )
    held = dataclasses.replace(FREE, link_blocks=30)  # of 100
    verdict = judge(config, cluster=held, fits=under("1F1B"))
    assert verdict.outcome == "does not pay"
    assert verdict.sentence.startswith("Async2BW does not pay here: 1F1B on 2 stages takes")


def test_the_verdict_of_one_stage_includes_async2bw():
    """Four ranks gather 27 shards' worth of weights over a slow network; four stages send next to nothing."""
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
        "One stage has no bubble for Async2BW to take away; other layouts were not looked for (--no-suggest)."
    )


def test_the_second_version_is_that_of_a_stage():
    """Three layers and the embedding, in float32; the last stage has none."""
    verdict = judge(config_of(2, 1, sequences=4), parts_of=heavy, fits=under("1F1B"))
    assert verdict.second_version == 4 * (3 * NUMBERS[0] * NUMBERS[1] + 64 * 64)
    assert "up to 0.8 GB a rank for a second version of the weights" in verdict.sentence


def test_a_suggested_layout_counts_under_every_schedule():
    """Six ranks: three stages are suggested, on which 1F1B has its bubble too, and six are planned."""
    own, suggested = evenly(config_of(6, 1, sequences=12)), evenly(config_of(3, 2, sequences=12))
    verdict = judge(own, suggested=suggested, fits=under("1F1B"))
    assert verdict.synchronous.layout.pp == 3
    # Six microbatches of one layer; three of two layers, and a bubble of two of them.
    assert verdict.gain == pytest.approx((3 + 2) * 2 / 6 - 1, abs=2e-3)


def test_a_synchronous_alternative_has_its_batch_in_one_pass():
    config = evenly(config_of(3, 1, sequences=12, schedule="1F1B"))
    twice = dataclasses.replace(config, training=dataclasses.replace(config.training, local_batch_size=6))
    assert layout_of(twice, 3).passes == 2
    assert judge(twice, fits=under("1F1B")).gain == pytest.approx(2 / 6, abs=2e-3)


def test_what_does_not_fit_does_not_count():
    config = config_of(2, 2, sequences=64)
    nothing = judge(config, fits=lambda *_: False)
    assert (nothing.outcome, nothing.gain) == ("nothing", None)
    assert nothing.sentence == "Nothing fits here, neither under Async2BW nor without a delay."
    alone = judge(config, fits=lambda _, layout, __: layout.delayed)
    assert alone.outcome == "only Async2BW"
    assert alone.sentence.startswith(
        "Async2BW alone runs and fits here: 2.88 s a step (2 stages x 2 shards), for one"
    )
    without = judge(config, fits=lambda _, layout, __: layout.pp == 1)
    assert without.outcome == "only synchronous"
    assert without.sentence == (
        f"Async2BW has no layout here that runs and fits: {without.synchronous} takes 2.88 s a step."
    )


def test_one_rank_has_nothing_to_win():
    verdict = judge(config_of(1, 1, sequences=2))
    assert verdict.sentence == "On one rank there is no pipeline, and nothing for Async2BW to win."


def test_the_sentence_says_that_layouts_were_not_searched():
    verdict = judge(config_of(2, 2, sequences=64), searches=False)
    assert verdict.synchronous.layout.pp == 2
    assert verdict.sentence.endswith("; other layouts were not looked for (--no-suggest).")
    assert judge(config_of(2, 2, sequences=64)).sentence.endswith("do not know.")
