"""How a byte-level BPE vocabulary cuts text into words before merging, by the name GGUF gives it (`tokenizer.ggml.pre`).

Each pattern cuts every piece that the patterns before it left. The patterns are those of the models' own `tokenizer.json`;
the names, and what they imply, follow llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.errors import CheckpointError


class PreTokenizer(NamedTuple):
    """`whole_words_first`: a word that is itself a token is taken as such, without merging. `adds_bos`: unless the file says otherwise."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    adds_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(suffix: str, digits: str) -> str:
    """Words cut where lower case turns to upper, as GPT-4o's vocabulary does."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


_GPT2 = PreTokenizer((_GPT2_WORDS,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = PreTokenizer((_LLAMA3_WORDS,), whole_words_first=True, adds_bos=True)
_LLAMA3_MERGED = PreTokenizer((_LLAMA3_WORDS,))
_QWEN2 = PreTokenizer((_QWEN2_WORDS,))
_GPT4O = PreTokenizer((_cased_words(f"{_CONTRACTION}?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        _HAN_AND_KANA,
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
    )
)

PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(["gpt-2", "phi-2", "olmo", "mpt", "mellum", "gigachat", "a.x-4.0", "exaone4", "trillion", "granite-docling"], _GPT2),
    **dict.fromkeys(["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], _SINGLE_DIGITS),
    **dict.fromkeys(["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"], _LLAMA3),
    **dict.fromkeys(["dbrx", "smaug-bpe"], _LLAMA3_MERGED),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "kormo", "megrez", "hunyuan", "stablelm2", "grok-2"], _QWEN2),
    "tekken": PreTokenizer((_cased_words("", r"\p{N}"),), whole_words_first=True, adds_bos=True),
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2"], _GPT4O),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense"], _DEEPSEEK3),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",),
    ),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that name. Raises CheckpointError for one that is unknown."""
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise CheckpointError(f"the vocabulary is cut by pre-tokenizer {name!r}; supported: {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]
