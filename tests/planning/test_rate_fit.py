"""Fits recover the constants that timings were made from."""

import math

import pytest

from titan_async.planning.rate_fit import fit_attention, fit_products, fit_terms

SHAPES = [(8, 4096, 4096), (64, 4096, 4096), (512, 192, 192), (512, 4096, 4096), (8192, 4096, 4096)]


def seconds_of(m, n, k, rate, bandwidth):
    """Seconds of a product in bfloat16."""
    return 2 * m * n * k / rate + (2 * m * k + 2 * k * n + 2 * m * n) / bandwidth


@pytest.mark.parametrize(("rate", "bandwidth"), [(100e9, 5e9), (600e12, 3e12), (1e12, 1e9)])
def test_rate_and_bandwidth_of_products_are_recovered(rate, bandwidth):
    fit = fit_products(SHAPES, 2, [seconds_of(*shape, rate, bandwidth) for shape in SHAPES])
    operation, moved = fit.costs
    assert (1 / operation, 1 / moved) == pytest.approx((rate, bandwidth), rel=1e-6)
    assert (fit.mean_error, fit.worst_error) == pytest.approx((1, 1))


def test_errors_are_factors_and_timings_have_equal_weight():
    seconds = [seconds_of(*shape, 600e12, 3e12) for shape in SHAPES]
    # Each shape is timed 20 % too long and too short, so the best fit is in the middle.
    many = [shape for shape in SHAPES for _ in range(2)]
    off = [value * factor for value in seconds for factor in (1.2, 1 / 1.2)]
    fit = fit_products(many, 2, off)
    assert (1 / fit.costs[0], 1 / fit.costs[1]) == pytest.approx((600e12, 3e12), rel=1e-6)
    assert (fit.mean_error, fit.worst_error) == pytest.approx((1.2, 1.2))


def test_rate_of_a_term_without_effect_is_finite():
    large = [(8192, 8192, 8192), (4096, 8192, 8192), (8192, 8192, 4096)]
    fit = fit_products(large, 2, [2 * m * n * k / 1e12 for m, n, k in large])
    assert 1 / fit.costs[0] == pytest.approx(1e12, rel=1e-3)
    assert math.isfinite(1 / fit.costs[1]) and fit.worst_error < 1.001


def test_rate_and_ramp_of_attention_are_recovered():
    lengths, rate, ramp = [512, 1024, 2048, 8192], 300e12, 350
    operations = [1e12, 2e12, 3e12, 4e12]
    seconds = [o / rate * (1 + ramp / length) for length, o in zip(lengths, operations, strict=True)]
    attended, first = fit_attention(lengths, operations, seconds).costs
    assert (1 / attended, first / attended) == pytest.approx((rate, ramp), rel=1e-6)


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 0.0], [1.0, math.nan]])
def test_too_few_or_invalid_timings_are_rejected(seconds):
    with pytest.raises(ValueError, match="at least two timings"):
        fit_terms([(1.0, 1.0)] * len(seconds), seconds)
