"""Quantiles of latencies in constant memory, rates as measured lately, and the rolling window."""

import dataclasses
import random

import msgspec
import pytest

from octavo.core.request import Request
from octavo.core.stats import CompactionReport, Histogram, History, Rate, Sample
from octavo.sampling_params import SamplingParams


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


def test_rate_is_assumed_until_it_is_measured():
    rate = Rate(1000.0)
    assert (rate.value, rate.measured) == (1000.0, 0.0)
    rate.add(10, 2.0)
    assert rate.value == rate.measured == 5.0


def test_rate_weighs_by_seconds_and_not_by_how_often_it_was_measured():
    rate = Rate(1.0)
    for _ in range(20):
        rate.add(1, 0.001)
        rate.add(100, 1.0)
    assert rate.value == pytest.approx(101 / 1.001, rel=0.01)


def test_rate_follows_what_was_measured_lately():
    rate = Rate(1.0)
    for _ in range(100):
        rate.add(100, 1.0)
    for _ in range(100):
        rate.add(300, 1.0)
    assert rate.value == pytest.approx(300, rel=0.01)


def make_sample(time, **values):
    return Sample(time, **{"total": 8, "cached": 0, "used": 0, "unused_slots": 0, "running": 0, "waiting": 0, "preemptions": 0} | values)


def test_history_is_due_at_first_and_then_once_an_interval():
    history = History()
    assert history.due <= 0.0
    history.add(make_sample(5.0))
    assert history.due == 5.0 + History.INTERVAL


def test_history_keeps_a_window():
    history = History()
    for moment in range(History.SAMPLES + 10):
        history.add(make_sample(float(moment)))
    assert len(history.samples) == History.SAMPLES
    assert history.samples[0].time == 10.0


@pytest.mark.parametrize(("reason", "kept"), [("stop", True), ("length", True), ("abort", False), ("timeout", False), ("error", False)])
def test_lengths_are_those_of_answers_that_came_to_their_end(reason, kept):
    history = History()
    (sequence,) = Request("a", [1, 2, 3], SamplingParams(), arrival=0.0, max_length=9).sequences
    sequence.tokens += [4, 5]
    sequence.finish(reason)
    history.ended(sequence)
    assert list(history.lengths) == [(3, 2)] * kept


def test_compaction_report_is_plain_data():
    report = CompactionReport(100, 60, 12, 12 * 1024, 40 * 1024)
    assert report.seconds == 0.0
    timed = dataclasses.replace(report, seconds=0.5)
    assert msgspec.json.decode(msgspec.json.encode(timed), type=CompactionReport) == timed
