"""Quantiles of latencies in constant memory."""

import random

import pytest

from octavo.core.stats import Histogram


def test_nothing_recorded_is_zero():
    assert Histogram().quantile(0.99) == 0.0


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_upper_bounds_within_a_fifth(share):
    source, histogram = random.Random(1), Histogram()
    values = sorted(source.lognormvariate(-12, 2) for _ in range(5000))
    for value in values:
        histogram.add(value)
    exact = values[max(0, int(share * len(values)) - 1)]
    assert exact <= histogram.quantile(share) <= exact * 1.2
    assert histogram.count == 5000
    assert histogram.total == pytest.approx(sum(values))


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-30, 1e30])
def test_values_out_of_range_are_counted_in_the_outermost_buckets(value):
    histogram = Histogram()
    histogram.add(value)
    assert histogram.count == 1
    assert histogram.quantile(0.5) < 1e-11 if value < 1 else histogram.quantile(0.5) > 1e6
