"""Fits recover the constants that timings were made from."""

import math

import pytest

from titan_async.planning.rate_fit import fit_attention, fit_products, fit_terms

SHAPES = [(8, 4096, 4096), (64, 4096, 4096), (512, 192, 192), (512, 4096, 4096), (8192, 4096, 4096)]


def seconds_of(m, n, k, rate, bandwidth):
    """Of bfloat16, written out again."""
    return 2 * m * n * k / rate + (2 * m * k + 2 * k * n + 2 * m * n) / bandwidth


@pytest.mark.parametrize(("rate", "bandwidth"), [(100e9, 5e9), (600e12, 3e12), (1e12, 1e9)])
def test_rate_and_bandwidth_of_products_are_recovered(rate, bandwidth):
    fit = fit_products(SHAPES, 2, [seconds_of(*shape, rate, bandwidth) for shape in SHAPES])
    operation, moved = fit.costs
    assert (1 / operation, 1 / moved) == pytest.approx((rate, bandwidth), rel=1e-6)
    assert (fit.mean_error, fit.worst_error) == pytest.approx((1, 1))


def test_errors_are_factors_and_short_timings_count_as_much_as_long_ones():
    seconds = [seconds_of(*shape, 600e12, 3e12) for shape in SHAPES]
    # All of one shape, timed off by a fifth each way: nothing fits better than the middle.
    many = [shape for shape in SHAPES for _ in range(2)]
    off = [value * factor for value in seconds for factor in (1.2, 1 / 1.2)]
    fit = fit_products(many, 2, off)
    assert (1 / fit.costs[0], 1 / fit.costs[1]) == pytest.approx((600e12, 3e12), rel=1e-6)
    assert (fit.mean_error, fit.worst_error) == pytest.approx((1.2, 1.2))


def test_where_no_timing_shows_a_term_its_rate_is_finite_and_does_not_count():
    large = [(8192, 8192, 8192), (4096, 8192, 8192), (8192, 8192, 4096)]
    fit = fit_products(large, 2, [2 * m * n * k / 1e12 for m, n, k in large])
    assert 1 / fit.costs[0] == pytest.approx(1e12, rel=1e-3)
    assert math.isfinite(1 / fit.costs[1]) and fit.worst_error < 1.001


def test_attention_over_long_sequences_and_the_length_that_reaches_half_of_it():
    lengths, rate, ramp = [512, 1024, 2048, 8192], 300e12, 350
    operations = [1e12, 2e12, 3e12, 4e12]
    seconds = [o / rate * (1 + ramp / length) for length, o in zip(lengths, operations, strict=True)]
    attended, first = fit_attention(lengths, operations, seconds).costs
    assert (1 / attended, first / attended) == pytest.approx((rate, ramp), rel=1e-6)


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 0.0], [1.0, math.nan]])
def test_too_few_or_senseless_timings_are_refused(seconds):
    with pytest.raises(ValueError, match="at least two timings"):
        fit_terms([(1.0, 1.0)] * len(seconds), seconds)
