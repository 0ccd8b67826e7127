"""The recurrence at drawn numbers of stages, microbatches, lookahead and batches, drains and evaluations."""

from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.pipelining.test_recurrence import difference, expected, pipeline
from tests.support.processes import WorkerPool


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(4)
    yield pool
    pool.close()


class Run(NamedTuple):
    stages: int
    microbatches: int
    lookahead: int
    batches: int
    drain_after: tuple[int, ...]
    evaluate_after: tuple[int, ...]


@st.composite
def runs(draw):
    d = draw(st.integers(1, 4))
    m = draw(st.integers(d, d + 4))
    batches = draw(st.integers(2, 6))  # one alone has no delay
    some = st.lists(st.integers(0, batches - 1), max_size=3, unique=True).map(tuple)
    return Run(d, m, draw(st.integers(0, m - d)), batches, draw(some), draw(some))


@given(run=runs())
# Not shrunk: processes that hang are gone after the first failure.
@settings(max_examples=12, derandomize=True, phases=[Phase.generate])
def test_weights_and_losses_equal_the_recurrence(pool, run):
    """And differ from synchronous training, so that the comparison can tell the two apart."""
    d, m, lookahead, batches, drains, evaluations = run
    results = pool.run(
        d,
        pipeline,
        "adamw",
        m,
        batches=batches,
        lookahead=lookahead,
        drain_after=drains,
        evaluate_after=evaluations,
    )
    assert difference(results, expected(d, m, "adamw", batches)) < 1e-12
    assert difference(results, expected(d, m, "adamw", batches, delay=0)) > 1e-4
