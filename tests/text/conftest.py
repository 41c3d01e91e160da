"""Small vocabularies made on the spot, in the form of GGUF metadata. scripts/record_token_ids.py makes the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from octavo.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[1] / "data"

SPM_TEXT = """
the of and to in is it was he for on are as with his they at be this have from or one had by word but not what all were we when your can
said there use an each which she do how their if will up other about out many then them these so some her would make like him into time
has look two more write go see number no way could people my than first water been call who oil its now find long down day did get come
made may part hello world naïve café straße привет мир 世界 日本 दुनिया
"""


def make_spm_metadata(space_prefix: bool = True) -> dict[str, Any]:
    """A SentencePiece vocabulary: control, byte and user-defined tokens, then pieces, the commonest first."""
    user_defined = ["<|user|>", "\n\n", "   "]
    pieces = dict.fromkeys(["\u2581\u2581", "\u2581\u2581\u2581\u2581"])
    for word in SPM_TEXT.split():
        spaced = "\u2581" + word
        for length in range(2, len(spaced) + 1):
            pieces |= dict.fromkeys([spaced[:length], spaced[-length:]])
    pieces |= dict.fromkeys(sorted(set("".join(SPM_TEXT.split())) | set("\u2581.,!?'0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *user_defined]
    # Scores repeat, so that the leftmost of equals is put to the test.
    scores = [0.0] * len(tokens) + [-float(index // 3) for index in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *pieces],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [4] * len(user_defined) + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def make_bpe_metadata(merges: list[str], pre: str) -> dict[str, Any]:
    """A byte-level BPE vocabulary: four control tokens, one user-defined, the bytes, and what the merges make."""
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<sep>", "<|user|>"]
    beyond_merges = "ĠHTTPServer"  # reached only where whole words are looked up first
    learned = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges), beyond_merges]
    tokens = [*added, *dict.fromkeys(learned)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3] * 4 + [4] + [1] * (len(tokens) - len(added)),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def load_golden(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"token_ids_{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    return load_golden


@pytest.fixture(scope="session")
def bpe_metadata() -> Callable[[str], dict[str, Any]]:
    """A byte-level BPE vocabulary under the pre-tokenizer of that name."""
    merges = load_golden("bpe")["merges"]
    return lambda pre: make_bpe_metadata(merges, pre)


@pytest.fixture(scope="session")
def spm_metadata() -> Callable[..., dict[str, Any]]:
    return make_spm_metadata


@pytest.fixture(scope="session")
def bpe_tokenizer(bpe_metadata: Callable[[str], dict[str, Any]]) -> Tokenizer:
    return Tokenizer.from_gguf(bpe_metadata("qwen2"))


@pytest.fixture(scope="session", params=[True, False], ids=["space prefix", "no space prefix"])
def spm_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_gguf(make_spm_metadata(request.param))
