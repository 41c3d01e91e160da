"""Each rule on both sides of its limit; the prediction against a count; no two lines that contradict each other."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.advice import BLOCK_SIZES, advise, predict_fragmentation
from octavo.core.stats import BlockStats, Record, Sample, Stats

GIB = 2**30
BLOCK_BYTES = 2**20


def make_stats(total=1000, ceiling=None, cached=0, used=0, peak_used=0, **figures):
    blocks = BlockStats(total, total - cached - used, cached, used, total if ceiling is None else ceiling, peak_used)
    return Stats(**{f.name: 0 for f in fields(Stats)} | {"blocks": blocks, "finished": {}, "seconds": {}} | figures)


def make_sample(time=0.0, total=1000, cached=0, used=750, empty=0.1, running=10, waiting=0, preemptions=0, block_size=16):
    return Sample(time, total, cached, used, round(empty * used * block_size), running, waiting, preemptions)


def make_record(*samples, block_size=16, lengths=((1000, 100),), prealloc_blocks=64, max_batch_size=32, longest=2048, **figures):
    return Record(
        block_size, BLOCK_BYTES, prealloc_blocks, max_batch_size, longest, make_stats(**figures), list(samples), [tuple(x) for x in lengths]
    )


def line(record, figure):
    (found,) = (advice for advice in advise(record) if advice.figure.startswith(figure))
    return found


def said(advice):
    return advice.setting, advice.value, advice.severity


FINE = (None, None, "fine")


class TestPrediction:
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("lengths", [[(1, 1)], [(16, 1)], [(5, 40), (130, 7)], [(3, 0)], [(0, 9)], [(999, 300), (20, 20), (64, 64)]])
    def test_is_what_counting_gives(self, lengths, block_size):
        held = [length for prompt, generated in lengths for length in range(prompt, prompt + max(1, generated))]
        slots = sum(math.ceil(length / block_size) * block_size for length in held)
        unused = sum(-length % block_size for length in held)
        assert predict_fragmentation(lengths, block_size) == pytest.approx(unused / slots)

    @pytest.mark.parametrize("lengths", [[], [(0, 0)]])
    def test_of_nothing_is_nothing(self, lengths):
        assert predict_fragmentation(lengths, 16) == 0.0

    @given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), min_size=1))
    def test_larger_blocks_never_waste_less(self, lengths):
        predictions = [predict_fragmentation(lengths, size) for size in BLOCK_SIZES]
        assert predictions == sorted(predictions)
        assert predictions[0] == 0.0


class TestNothingToJudge:
    @pytest.mark.parametrize("samples", [(), (make_sample(used=0, running=0), make_sample(1.0, used=0, running=0))])
    def test_an_idle_engine(self, samples):
        (only,) = advise(make_record(*samples, lengths=()))
        assert said(only) == FINE
        assert "nothing to judge" in only.reason

    def test_an_engine_without_a_pool(self):
        assert len(advise(make_record(lengths=(), total=0))) == 1

    def test_without_samples_the_snapshot_is_judged(self):
        record = make_record(used=900, running=10, internal_fragmentation=0.3, lengths=[(20, 20)])
        assert line(record, "utilization 90%").severity == "change"
        assert line(record, "internal fragmentation 30%").setting == "block_size"

    def test_answers_alone_are_judged_by_prediction(self):
        record = make_record(lengths=[(20, 2)], block_size=64)
        advice = line(record, "internal fragmentation 68% (predicted)")
        assert said(advice) == ("block_size", 4, "consider")
        assert said(line(record, "utilization")) == FINE
        assert "nothing" in line(record, "utilization").reason.lower()


def test_every_figure_has_a_line_when_all_is_well():
    advice = advise(make_record(make_sample(), block_table_ratio=0.002, allocation_p99_s=0.0001, prompt_tokens=100, cached_tokens=30))
    assert [each.figure for each in advice] == [
        "utilization 75%",
        "internal fragmentation 10%",
        "allocation P99 0.1 ms",
        "mapping memory 0.2%",
        "preemptions 0",
        "prefix hits 30%",
        "next GiB 1,024 blocks",
    ]
    assert {said(each) for each in advice} == {FINE}


class TestTheWindow:
    def test_a_sample_holds_until_the_next(self):
        samples = [make_sample(0.0, used=900), make_sample(1.0, used=700), make_sample(4.0, used=100)]
        line(make_record(*samples), "utilization 75%")

    def test_idle_times_do_not_count(self):
        samples = [make_sample(0.0, used=800), make_sample(1.0, used=0, running=0), make_sample(100.0, used=800)]
        line(make_record(*samples), "utilization 80%")

    def test_one_sample_is_a_window(self):
        line(make_record(make_sample(used=800)), "utilization 80%")

    @pytest.mark.parametrize("times", [(5.0, 5.0), (5.0, 3.0)])
    def test_times_that_do_not_pass(self, times):
        samples = [make_sample(time, used=used) for time, used in zip(times, (700, 800), strict=True)]
        line(make_record(*samples), "utilization 75%")

    def test_a_moment_of_fragmentation_is_not_lasting(self):
        samples = [make_sample(0.0, empty=0.9), make_sample(1.0, empty=0.05), make_sample(60.0)]
        assert said(line(make_record(*samples), "internal fragmentation")) == FINE


class TestFragmentation:
    SHORT = ((20, 20),)

    @pytest.mark.parametrize(("empty", "severity"), [(0.20, "fine"), (0.201, "change")])
    def test_above_a_fifth_the_block_size_is_wrong(self, empty, severity):
        assert line(make_record(make_sample(empty=empty), lengths=self.SHORT), "internal").severity == severity

    @pytest.mark.parametrize(("lengths", "block_size"), [([(20, 20)], 32), ([(100, 50), (30, 400)], 128), ([(2, 3)], 16)])
    def test_the_largest_size_that_wastes_less_than_a_tenth(self, lengths, block_size):
        present = predict_fragmentation(lengths, block_size)
        record = make_record(make_sample(empty=present, block_size=block_size), block_size=block_size, lengths=lengths)
        advice = line(record, "internal")
        assert said(advice) == (
            "block_size",
            max(size for size in BLOCK_SIZES if predict_fragmentation(lengths, size) < 0.1),
            "change",
        )
        assert f"{100 * present:.3g}% at {block_size} and {100 * predict_fragmentation(lengths, advice.value):.3g}% at" in advice.reason
        assert "scaled" not in advice.reason

    def test_shared_prefixes_scale_the_prediction(self):
        """2000 shared tokens and 32 tails: what 16 wastes of so few blocks, and 8 and 4, is counted here."""
        lengths, tails = [(2000 + tail, 1) for tail in range(1, 65)], range(1, 65)

        def empty(size):
            slots = sum(math.ceil(tail / size) * size for tail in tails) + 2000
            return sum(-tail % size for tail in tails) / slots

        used = 1000
        record = make_record(
            make_sample(used=used, empty=empty(128), block_size=128), block_size=128, lengths=lengths, block_table_ratio=0.001
        )
        advice = line(record, "internal")
        assert empty(128) > 0.2
        assert predict_fragmentation(lengths, 128) < 0.1
        assert "scaled to the" in advice.reason
        assert empty(advice.value) < 0.1 < empty(2 * advice.value)

    def test_without_answers_the_mean_length_stands_for_them(self):
        record = make_record(make_sample(used=20, running=10, empty=0.25), lengths=())
        advice = line(record, "internal")
        assert said(advice) == ("block_size", 4, "change")
        assert advice.reason.startswith("The mean length predicts 23.8% at 16")

    def test_the_price_of_small_blocks_is_named(self):
        reason = line(make_record(make_sample(empty=0.3), lengths=self.SHORT, block_table_ratio=0.004), "internal").reason
        assert "Mapping memory goes from 0.4% to 1.6%" in reason
        assert "max_blocks_per_seq, where set, count blocks: times 4" in reason

    def test_preallocation_keeps_its_memory(self):
        record = make_record(make_sample(empty=0.3), lengths=self.SHORT, prealloc_blocks=100)
        assert line(record, "internal").value == 4
        assert said(line(record, "allocation")) == ("prealloc_blocks", 400, "change")


class TestMapping:
    LONG = ((2000, 500),)

    @pytest.mark.parametrize(("ratio", "severity"), [(0.01, "fine"), (0.0101, "change")])
    def test_above_a_hundredth_the_blocks_are_too_small(self, ratio, severity):
        record = make_record(make_sample(empty=0.02), lengths=self.LONG, block_table_ratio=ratio)
        assert line(record, "mapping").severity == severity

    @pytest.mark.parametrize(("ratio", "block_size", "wanted"), [(0.015, 16, 32), (0.03, 4, 16), (0.04, 16, 64), (0.5, 16, 256)])
    def test_the_smallest_size_that_heals_it(self, ratio, block_size, wanted):
        record = make_record(make_sample(empty=0.0), block_size=block_size, lengths=[(6000, 2000)], block_table_ratio=ratio)
        advice = line(record, "mapping")
        assert said(advice) == ("block_size", wanted, "change")
        assert f"{100 * ratio * block_size / wanted:.3g}%" in advice.reason
        assert ("still above 1%" in advice.reason) == (ratio * block_size / wanted > 0.01)
        assert said(line(record, "internal")) == FINE

    def test_not_at_the_price_of_fragmentation(self):
        advice = line(make_record(make_sample(empty=0.07), lengths=[(100, 20)], block_table_ratio=0.02), "mapping")
        assert said(advice) == (None, None, "consider")
        assert f"{100 * predict_fragmentation([(100, 20)], 32):.3g}% at 32" in advice.reason

    def test_fragmentation_goes_first(self):
        record = make_record(make_sample(empty=0.3), lengths=[(20, 20)], block_table_ratio=0.02)
        assert said(line(record, "mapping")) == (None, None, "consider")
        assert line(record, "internal").value == 4

    def test_the_largest_blocks_there_are(self):
        record = make_record(make_sample(empty=0.01, block_size=256), block_size=256, lengths=[(9000, 9000)], block_table_ratio=0.02)
        assert "as large as they can be" in line(record, "mapping").reason


class TestAllocation:
    @pytest.mark.parametrize(("seconds", "severity"), [(0.001, "fine"), (0.0011, "change")])
    def test_above_a_millisecond(self, seconds, severity):
        assert line(make_record(make_sample(), allocation_p99_s=seconds), "allocation").severity == severity

    @pytest.mark.parametrize(("used", "cached", "wanted"), [(300, 20, 320), (300, 21, 384), (900, 100, 1000)])
    def test_the_peak_is_committed_at_start(self, used, cached, wanted):
        samples = [make_sample(0.0, used=used, cached=cached), make_sample(1.0, used=100)]
        assert line(make_record(*samples, allocation_p99_s=0.01), "allocation").value == wanted

    def test_growth_is_not_to_blame_where_there_was_none(self):
        advice = line(make_record(make_sample(), allocation_p99_s=0.01, prealloc_blocks=1000), "allocation")
        assert said(advice) == (None, None, "consider")
        assert "busy machine" in advice.reason

    def test_in_blocks_of_the_new_size(self):
        record = make_record(make_sample(empty=0.3), lengths=[(20, 20)], allocation_p99_s=0.01)
        assert line(record, "internal").value == 4
        assert said(line(record, "allocation")) == ("prealloc_blocks", 3008, "change")


class TestUtilization:
    @pytest.mark.parametrize(("used", "severity"), [(850, "fine"), (851, "change")])
    def test_above_85_percent_memory_is_the_limit(self, used, severity):
        assert line(make_record(make_sample(used=used)), "utilization").severity == severity

    def test_memory_to_bring_the_mean_to_80_percent(self):
        advice = line(make_record(make_sample(used=960, running=32)), "utilization 96%")
        assert said(advice) == ("kv_cache_memory", "1200MiB", "change")
        assert "1200MiB" in advice.reason
        assert "max_batch_size 26" in advice.reason

    def test_smaller_blocks_may_be_all_it_takes(self):
        advice = line(make_record(make_sample(used=900, empty=0.3), lengths=[(20, 20)]), "utilization")
        assert said(advice) == ("block_size", 4, "change")

    def test_a_pool_that_can_grow_is_judged_by_its_ceiling(self):
        record = make_record(make_sample(total=1000, used=960), ceiling=1300)
        assert said(line(record, "utilization 96% (73.8% of the ceiling)")) == FINE

    @pytest.mark.parametrize(("used", "severity"), [(700, "fine"), (699, "change")])
    def test_below_70_percent_with_a_queue_the_batch_is_the_limit(self, used, severity):
        assert line(make_record(make_sample(used=used, running=32, waiting=50)), "utilization").severity == severity

    def test_a_batch_to_bring_the_mean_to_80_percent(self):
        advice = line(make_record(make_sample(used=320, running=32, waiting=500)), "utilization")
        assert said(advice) == ("max_batch_size", 80, "change")
        assert "10.0 blocks" in advice.reason

    def test_a_batch_no_larger_than_the_demand(self):
        assert said(line(make_record(make_sample(used=320, running=32, waiting=3)), "utilization"))[:2] == ("max_batch_size", 35)

    def test_a_busy_pool_that_can_grow_holds_a_larger_batch(self):
        record = make_record(make_sample(used=800, running=32, waiting=500), ceiling=4000)
        assert said(line(record, "utilization")) == ("max_batch_size", 128, "consider")

    @pytest.mark.parametrize(("queued", "setting"), [(9.0, None), (11.0, "max_batch_size")])
    def test_a_moments_queue_is_no_reason(self, queued, setting):
        samples = [make_sample(0.0, used=400, running=32, waiting=20), make_sample(queued, used=125), make_sample(100.0)]
        assert line(make_record(*samples), "utilization").setting == setting

    def test_a_queue_before_a_batch_that_is_not_full(self):
        assert said(line(make_record(make_sample(used=400, running=5, waiting=5)), "utilization")) == FINE

    def test_no_larger_batch_where_blocks_ran_out(self):
        samples = [make_sample(0.0, used=400, running=32, waiting=20), make_sample(9.0, used=400, preemptions=1)]
        record = make_record(*samples, preemptions=1)
        assert said(line(record, "utilization")) == (None, None, "consider")
        assert line(record, "preemptions").setting == "kv_cache_memory"

    @pytest.mark.parametrize(("peak", "severity"), [(249, "consider"), (250, "fine")])
    def test_a_ceiling_above_four_times_the_peak(self, peak, severity):
        assert line(make_record(make_sample(used=200), peak_used=peak), "utilization").severity == severity

    def test_less_memory_still_holds_the_longest_sequence(self):
        assert line(make_record(make_sample(used=40)), "utilization").value == "128MiB"
        assert line(make_record(make_sample(used=100)), "utilization").value == "200MiB"
        assert line(make_record(make_sample(used=100), longest=16000), "utilization").setting is None

    def test_cached_blocks_are_kept_where_they_are_hit(self):
        assert line(make_record(make_sample(used=100, cached=800), prompt_tokens=10), "utilization").value == "200MiB"
        hit = make_record(make_sample(used=100, cached=800), prompt_tokens=10, cached_tokens=5)
        assert line(hit, "utilization").setting is None


class TestMoreMemory:
    def test_preemptions_ask_for_the_next_gib(self):
        samples = [make_sample(0.0), make_sample(1.0, preemptions=3)]
        record = make_record(*samples, preemptions=3, swap_outs=1, recomputed_tokens=5000, prefill_rate=1000.0)
        advice = line(record, "preemptions 3")
        assert said(advice) == ("kv_cache_memory", "2024MiB", "change")
        assert "5,000 tokens were computed again, 5 s of prefill at 1,000 tokens/s" in advice.reason

    def test_preemptions_before_the_window(self):
        samples = [make_sample(0.0, preemptions=3), make_sample(1.0, preemptions=3)]
        assert said(line(make_record(*samples, preemptions=3), "preemptions")) == ("kv_cache_memory", "2024MiB", "consider")

    @pytest.mark.parametrize(("missed", "severity"), [(50, "fine"), (51, "change")])
    def test_prompts_that_had_to_be_computed_again(self, missed, severity):
        record = make_record(make_sample(), prompt_tokens=1000, cached_tokens=200, missed_tokens=missed, prefill_rate=10.0)
        advice = line(record, "prefix hits 20%")
        assert advice.severity == severity
        assert f"another {missed}, {missed / 10:.3g} s of prefill" in advice.reason

    def test_what_the_next_gib_buys(self):
        record = make_record(make_sample(used=800, running=20), missed_tokens=600, recomputed_tokens=400, prefill_rate=100.0)
        advice = line(record, "next GiB 1,024 blocks")
        assert "16,384 tokens more, or 26 more sequences" in advice.reason
        assert "up to 1,000 tokens, 10 s of prefill" in advice.reason
        assert said(advice) == FINE

    def test_rates_that_were_never_measured(self):
        record = make_record(make_sample(), preemptions=1, recomputed_tokens=400, missed_tokens=60, prompt_tokens=100)
        assert not [advice for advice in advise(record) if " s of prefill" in advice.reason or advice.figure.startswith("recomputation")]

    @pytest.mark.parametrize(("prefill_rate", "severity"), [(1000.0, "fine"), (999.0, "consider")])
    def test_swap_where_copying_is_cheaper_than_computing(self, prefill_rate, severity):
        """1000 tokens are 62.5 MiB; both ways at 125 MiB/s they take a second."""
        record = make_record(make_sample(), preemptions=4, recomputed_tokens=1000, prefill_rate=prefill_rate, copy_rate=125.0 * BLOCK_BYTES)
        advice = line(record, "recomputation")
        assert advice.severity == severity
        assert "assumed" not in advice.reason

    def test_swap_space_for_those_preempted_at_once(self):
        record = make_record(make_sample(waiting=2), preemptions=5, swap_outs=1, recomputed_tokens=16000, prefill_rate=100.0)
        advice = line(record, "recomputation 160 s")
        assert said(advice) == ("swap_space", "500MiB", "consider")
        assert "4 GB/s (assumed" in advice.reason

    def test_swap_space_that_suffices(self):
        record = make_record(make_sample(), preemptions=1, recomputed_tokens=1600, prefill_rate=100.0)
        stats = replace(record.stats, blocks=replace(record.stats.blocks, swap_total=100))
        assert said(line(replace(record, stats=stats), "recomputation")) == FINE

    def test_all_who_ask_for_memory_ask_for_the_same(self):
        record = make_record(make_sample(used=960), preemptions=1, prompt_tokens=100, missed_tokens=90)
        values = [advice.value for advice in advise(record) if advice.setting == "kv_cache_memory"]
        assert values == ["2024MiB"] * 3

    @pytest.mark.parametrize("figures", [{"preemptions": 1}, {"prompt_tokens": 100, "missed_tokens": 6}])
    def test_none_asks_for_less_where_others_ask_for_more(self, figures):
        assert said(line(make_record(make_sample(used=10), **figures), "utilization")) == FINE


counts = st.integers(0, 5000)
shares = st.floats(0, 1)


@st.composite
def records(draw):
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    samples = [
        Sample(
            draw(st.floats(0, 1e6)),
            total := draw(counts),
            draw(counts),
            draw(st.integers(0, total)),
            draw(st.integers(0, 100000)),
            *(draw(st.integers(0, 100)) for _ in range(3)),
        )
        for _ in range(draw(st.integers(0, 4)))
    ]
    figures = {name: draw(st.integers(0, 10000)) for name in ("preemptions", "prompt_tokens", "missed_tokens", "recomputed_tokens")}
    rates = {name: draw(st.sampled_from([0.0, 1e-3, 900.0, 1e12])) for name in ("prefill_rate", "copy_rate")}
    lengths = draw(st.lists(st.tuples(counts, counts), max_size=5))
    return make_record(
        *samples,
        block_size=block_size,
        lengths=lengths,
        prealloc_blocks=draw(counts),
        longest=draw(counts),
        total=draw(counts),
        ceiling=draw(counts),
        running=draw(st.integers(0, 3)),
        internal_fragmentation=draw(shares),
        block_table_ratio=draw(st.sampled_from([0.0, 0.01, 0.011, 0.3, 50.0])),
        allocation_p99_s=draw(st.sampled_from([0.0, 0.001, 0.0011, 7.0])),
        **figures,
        **rates,
    )


@given(records())
def test_advice_is_never_at_odds_with_itself(record):
    values = {}
    for advice in advise(record):
        assert (advice.setting is None) == (advice.value is None)
        assert (advice.severity, advice.setting) != ("change", None)
        assert advice.severity != "fine" or advice.setting is None
        assert values.setdefault(advice.setting, advice.value) == advice.value
        assert "nan" not in advice.figure + advice.reason
    sizes = {advice.figure.split()[0]: advice.value for advice in advise(record) if advice.setting == "block_size"}
    assert not {"internal", "mapping"} <= set(sizes)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 1000)), min_size=1, max_size=8), st.sampled_from(BLOCK_SIZES), st.floats(0, 0.2)
)
def test_a_block_size_once_followed_is_kept(lengths, block_size, ratio):
    def advised(size):
        sample = make_sample(used=10**6, total=2 * 10**6, empty=predict_fragmentation(lengths, size), block_size=size)
        record = make_record(sample, block_size=size, lengths=lengths, block_table_ratio=ratio * block_size / size, total=2 * 10**6)
        return [advice.value for advice in advise(record) if advice.setting == "block_size"]

    if wanted := advised(block_size):
        assert wanted != [block_size]
        assert advised(wanted[0]) == []
