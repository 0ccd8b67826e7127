"""A synchronous start of the whole trainer, against a plain loop on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.selection import slow
from tests.support.trainer_loop import Trained, Trainers, arguments, distance, loop, merged
from tests.training.test_ema import DECAY, average_in, by_formula, keep_weights
from tests.training.test_tying import at_the_start, of_one_model
from titan_async.config.recipe_file import resolve
from titan_async.monitor.events import RankReader
from titan_async.monitor.run_folder import read_info, runs_in
from titan_async.pipelining.recording import BACKWARD_KINDS, Kind
from titan_async.training.pipeline.schedule import PipelineConfig

STEPS = "--pipeline.synchronous_steps"
SHARDED = ("--parallelism.data_parallel_shard_degree", 2)


def listen(trainer: Any, trained: Trained) -> None:
    """Keep the lines of the reporter, and the metrics of each logged step."""
    lines, figures = trained.extra.setdefault("lines", []), trained.extra.setdefault("figures", [])
    log_line, log = trainer.reporter.log, trainer.metrics_processor.log
    trainer.reporter.log = lambda line: (lines.append(line), log_line(line))[1]

    def logged(*args: Any, **kwargs: Any) -> None:
        figures.append(kwargs["extra_metrics"])
        log(*args, **kwargs)

    trainer.metrics_processor.log = logged


@pytest.fixture(scope="module")
def three(runs: Trainers, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Trained], Path]:
    """Three synchronous steps of six, with checkpoints after the even ones and a validation after step 3."""
    folder = tmp_path_factory.mktemp("three")
    argv = arguments(folder, "tiny_llama", "--pipeline.synchronous_ratio", 0.5, "--checkpoint.interval", 2)
    return argv, runs(2, argv, listen), folder


def test_it_follows_the_loop_and_feedback_begins_after_it(three: tuple) -> None:
    argv, results, _ = three
    before, after = merged([r.before for r in results]), merged([r.after for r in results])
    wanted = loop(argv, before, synchronous=3)
    assert distance(after, wanted.after) < 2e-6
    for other in ({"synchronous": 2}, {"synchronous": 4}, {"synchronous": 3, "strength": 0.0}):
        assert distance(after, loop(argv, before, **other).after) > 1e-4
    for result in results:
        assert result.losses == pytest.approx(wanted.losses, abs=1e-5)
    # Batches 3 and 5 are drained for checkpoints, and step 5 has no update then.
    norms = [wanted.norms[batch] for batch in (0, 1, 2, 3, 3, 5)]
    assert results[0].norms == pytest.approx(norms, rel=1e-4)


def test_it_is_reported(three: tuple) -> None:
    _, (first, *_), folder = three
    assert first.extra["lines"][0].endswith(
        "on 2 stages under Async2BW, synchronous up to step 3, for 6 steps"
    )
    line = "step 4: the synchronous start is over, updates are delayed from here on"
    assert first.extra["lines"].count(line) == 1
    delays = [figures["pipeline/delay"] for figures in first.extra["figures"]]
    assert delays == [0, 0, 0, 0, 0, 1]
    remembered = [figures["error_feedback/norm"] for figures in first.extra["figures"]]
    assert remembered[:3] == [0.0] * 3 and min(remembered[3:]) > 0
    [events] = runs_in(folder)
    assert read_info(events).synchronous_steps == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_synchronous_steps_finish_their_batches(three: tuple, rank: int) -> None:
    """All of a batch lies in its own step, and reads the weights of all updates before."""
    _, _, folder = three
    records = RankReader(runs_in(folder)[0], rank).new_records()
    for step in (1, 2, 3):
        [whole] = records[(records["kind"] == Kind.STEP) & (records["batch"] == step)]
        within = (records["start"] >= whole["start"]) & (records["end"] <= whole["end"])
        computed = records[within & np.isin(records["kind"], (Kind.FORWARD, *BACKWARD_KINDS))]
        assert len(computed) == 8 and set(computed["batch"]) == {step}
        assert set(computed["version"]) == {step - 1}


COMPOSED = [
    pytest.param(4, 2, "muon_llama", (*SHARDED, "--pipeline.lookahead", 2), id="Muon on shards, lookahead"),
    pytest.param(2, 1, "tied_llama", (), id="tied"),
    pytest.param(2, 1, "tiny_moe", ("--pipeline.overlap",), id="experts, overlapped"),
    slow(4, 2, "tiny_moe", SHARDED, id="experts on shards"),
]


@pytest.mark.parametrize(("ranks", "shares", "recipe", "flags"), COMPOSED)
def test_it_composes_with_other_features(
    runs: Trainers, tmp_path: Path, ranks: int, shares: int, recipe: str, flags: tuple
) -> None:
    argv = arguments(tmp_path, recipe, STEPS, 2, *flags)
    results = runs(ranks, argv)
    before, after = merged([r.before for r in results]), merged([r.after for r in results])
    if recipe == "tied_llama":  # the loop has one weight
        before, after = at_the_start(results), of_one_model(after)
    assert distance(after, loop(argv, before, shares=shares, synchronous=2).after) < 1e-5
    assert distance(after, loop(argv, before, shares=shares).after) > 1e-4


def test_an_update_that_is_skipped_and_an_average_of_the_weights(runs: Trainers, tmp_path: Path) -> None:
    argv = arguments(tmp_path, "tiny_llama", STEPS, 3, "--ema.decay", DECAY)
    results = runs(2, argv, keep_weights)  # which spoils the gradient of batch 1
    before, after = merged([r.before for r in results]), merged([r.after for r in results])
    assert distance(after, loop(argv, before, synchronous=3, skipped={1}).after) < 2e-6
    average = by_formula(results, before)
    assert distance(average_in(tmp_path, 6), average) < 1e-6


@pytest.mark.parametrize(
    ("fields", "steps", "resolved"),
    [
        ({}, 300, 0),
        ({"synchronous_ratio": 0.25}, 300, 75),
        ({"synchronous_ratio": 0.29}, 100, 29),  # of which floats make 28.999999999999996
        ({"synchronous_ratio": 0.5}, 1, 0),
        ({"synchronous_steps": 5, "synchronous_ratio": 0.5}, 300, 5),
        ({"synchronous_steps": 0, "synchronous_ratio": 0.5}, 300, 0),
        ({"synchronous_steps": 301}, 300, 300),
    ],
)
def test_a_number_or_a_share_of_the_steps(fields: dict[str, Any], steps: int, resolved: int) -> None:
    assert PipelineConfig(**fields).resolved_synchronous_steps(steps) == resolved


def test_flags_and_files_set_it(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('include = "debug_cpu.toml"\n[pipeline]\nsynchronous_steps = 7\n')
    assert resolve([str(file)]).pipeline.resolved_synchronous_steps(100) == 7
    config = resolve([str(file), STEPS, "none", "--pipeline.synchronous_ratio", "0.1"])
    assert config.pipeline.resolved_synchronous_steps(100) == 10
