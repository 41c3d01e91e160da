"""What an arithmetic costs, measured on the default model and two windows of text."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.bench import quality


def test_float32_differs_from_itself_in_nothing_and_int8_kv_in_a_little(smollm2_gguf: Path, data: Path) -> None:
    variants = {"the same": quality.REFERENCE, "int8 KV": {**quality.REFERENCE, "kv_cache_dtype": "int8"}}
    reference, same, other = quality.measure(str(smollm2_gguf), variants, 600, data, small_windows=0)
    assert reference.tokens == same.tokens == 2 * (quality.WINDOW - 1)
    assert 5 < reference.perplexity < 60
    assert (same.perplexity, same.divergence, same.agreed) == (reference.perplexity, 0, same.tokens)
    assert 0 < other.divergence / other.tokens < 0.02
    assert 0.9 < other.agreed / other.tokens < 1
    assert other.perplexity == pytest.approx(reference.perplexity, rel=0.02)


def test_variants_are_settings_by_name() -> None:
    assert quality._settings("dtype:bfloat16,block_size:32") == {"dtype": "bfloat16", "block_size": 32}
