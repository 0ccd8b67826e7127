"""The recurrence with drawn shapes, lookahead, drains, evaluations and synchronous starts."""

from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.pipelining.test_recurrence import difference, expected, pipeline
from tests.support.processes import Pools, WorkerPool


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(4)


class Run(NamedTuple):
    stages: int
    microbatches: int
    lookahead: int
    batches: int
    drain_after: tuple[int, ...]
    evaluate_after: tuple[int, ...]
    synchronous: range


@st.composite
def runs(draw):
    d = draw(st.integers(1, 4))
    m = draw(st.integers(d, d + 4))
    batches = draw(st.integers(2, 6))  # one alone has no delay
    some = st.lists(st.integers(0, batches - 1), max_size=3, unique=True).map(tuple)
    start = range(draw(st.integers(0, batches - 2)))
    return Run(d, m, draw(st.integers(0, m - d)), batches, draw(some), draw(some), start)


failed: dict[Run, RuntimeError] = {}


def train(pool, run):
    """Train only once: after a failure the processes may be dead, and hypothesis runs the example again."""
    if run in failed:
        raise failed[run]
    arguments = run._asdict()
    d, m = arguments.pop("stages"), arguments.pop("microbatches")
    try:
        return pool.run(d, pipeline, "adamw", m, **arguments)
    except RuntimeError as error:
        failed[run] = error
        raise


def drawn(examples):
    """Not shrunk, for the same reason."""
    return settings(max_examples=examples, derandomize=True, phases=[Phase.generate])


def assert_follows(pool, run):
    """Compare with the recurrence, and with synchronous training, from which it must differ."""
    d, m, batches = run.stages, run.microbatches, run.batches
    results = train(pool, run)
    assert difference(results, expected(d, m, "adamw", batches, synchronous=run.synchronous)) < 1e-12
    assert difference(results, expected(d, m, "adamw", batches, delay=0)) > 1e-4


@given(run=runs())
@drawn(5)
def test_weights_and_losses_equal_the_recurrence(pool, run):
    assert_follows(pool, run)


@pytest.mark.slow
@given(run=runs())
@drawn(12)
def test_weights_and_losses_of_more_runs_equal_the_recurrence(pool, run):
    assert_follows(pool, run)
