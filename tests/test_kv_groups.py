"""How layers are cut into KV groups, and how many blocks a sequence holds in them."""

import itertools

import pytest

from octavo.kv_groups import MOST_PADDING, KVGroups, cut_layers
from octavo.plan import MAX_IN_FLIGHT


def by_period(layers, period, window):
    """Every `period`th layer sees everything, as in Gemma 3."""
    return tuple(None if (layer + 1) % period == 0 else window for layer in range(layers))


@pytest.mark.parametrize(
    ("windows", "longest", "counts"),
    [
        ((None,) * 30, 2048, {None: [30]}),
        ((512,) * 32, 2048, {512: [32]}),
        ((512,) * 32, 512, {None: [32]}),
        (by_period(18, 6, 512), 32768, {None: [3], 512: [3] * 5}),
        (by_period(18, 6, 512), 512, {None: [18]}),
        (by_period(26, 6, 512), 32768, {None: [4], 512: [4] * 5 + [2]}),
        (by_period(34, 6, 1024), 131072, {None: [5], 1024: [5] * 5 + [4]}),
        (by_period(26, 2, 4096), 8192, {None: [13], 4096: [13]}),
        ((None, 9, 9), 64, {None: [1], 9: [1, 1]}),
        ((None, 9, 5), 64, {None: [1], 9: [1], 5: [1]}),
        ((None, 90, 5), 64, {None: [1, 1], 5: [1]}),
    ],
)
def test_layers_of_one_window_are_cut_into_groups_of_one_size(windows, longest, counts):
    found, layers = cut_layers(windows, longest)
    assert sorted(itertools.chain(*layers)) == list(range(len(windows)))
    assert {window: [len(of) for other, of in zip(found, layers, strict=True) if other == window] for window in found} == counts
    for window, of_group in zip(found, layers, strict=True):
        assert all(windows[layer] == window or (window is None and windows[layer] >= longest) for layer in of_group)
    assert [window is None for window in found] == sorted((window is None for window in found), reverse=True)
    for window in counts:
        padded = len(counts[window]) * max(map(len, layers))
        assert padded <= (1 + MOST_PADDING) * sum(counts[window])


@pytest.mark.parametrize("windows", [(None,), (None, 1), (5, 3), (None, 17, 9)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_a_sequence_never_holds_more_blocks_than_were_reckoned(windows, block_size, chunk):
    """Step by step, plans in flight included, and no estimate is above what some step holds by more than one block a window."""
    groups, end = KVGroups(windows, block_size, chunk), 70
    ahead = end if chunk is None else MAX_IN_FLIGHT * chunk
    for start in range(0, end, 3):
        held = 0
        for computed in range(start, end + 1):
            blocks = groups.blocks_for(min(end, computed + ahead))
            held = max(held, sum(blocks - groups.first(group, computed) for group in range(len(windows))))
        most = groups.most(start, end)
        assert held <= most <= held + sum(window is not None for window in windows)
    assert groups.longest(groups.most(0, end), 10 * end) >= end
    assert groups.most(0, groups.longest(37, 10 * end)) <= 37


@pytest.mark.parametrize("window", [1, 4, 5, 6, 17])
def test_what_the_next_token_sees_is_kept_and_so_is_the_last_block(window):
    groups, size = KVGroups((window,), 4, None), 4
    for computed in range(1, 60):
        first = groups.first(0, computed)
        seen = [place // size for place in range(max(0, computed - window + 1), computed + 1)]
        assert first <= min(seen)
        assert first <= (computed - 1) // size
        assert first == min(seen) or window <= size
