"""What every backend makes of the bits of a mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.ops.interface import Ops
from tests.ops.comparing import quickly, same_bits


@quickly
@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.data())
def test_what_has_no_bit_is_minus_infinity(ops: Ops, size: int, seed: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    words = data.draw(st.integers(1, -(-size // 32) + 1))
    logits = torch.from_numpy(random.normal(0, 3, (5, size)).astype(np.float32))
    rows = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True))
    bits = torch.from_numpy(random.integers(-(2**31), 2**31, (len(rows), words), dtype=np.int32))
    wanted = logits.clone()
    for place, row in enumerate(rows):
        for token_id in range(size):
            if token_id >= 32 * words or not int(bits[place, token_id // 32]) >> token_id % 32 & 1:
                wanted[row, token_id] = -torch.inf
    ops.mask(logits, torch.tensor(rows), bits)
    assert same_bits(logits, wanted)


@pytest.mark.parametrize("size", [17, 49152])
def test_nothing_beside_the_row_is_written(ops: Ops, size: int) -> None:
    wide = torch.ones(3, size + 40)
    ops.mask(wide[:, :size], torch.tensor([1]), torch.zeros(1, -(-size // 32), dtype=torch.int32))
    assert (wide[1, :size] == -torch.inf).all()
    wide[1, :size] = 1
    assert (wide == 1).all()
