"""What a request asks of the sampler: vLLM's field names, defaults and meanings."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from octavo.errors import InvalidValueError, UnsupportedError, shown

# Fields that vLLM has and Octavo does not offer yet: accepted at the value that asks for nothing, refused by name otherwise.
NOT_YET = [
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "bad_words",
    "include_stop_str_in_output",
    "min_tokens",
    "logprobs",
    "detokenize",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "structured_outputs",
    "output_kind",
]

MAX_SEED = 2**63 - 1
MAX_ANSWERS = 1024
MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn and when to stop.

    temperature: 0 takes the likeliest token; above 0 divides the logits before drawing.
    top_k: draw among the k likeliest; 0 or -1 is no limit.
    top_p: draw among the smallest set of likeliest tokens whose probability reaches top_p, after top_k.
    min_p: drop tokens less likely than min_p times the likeliest.
    seed: makes the draws repeatable; None takes a fresh one. Output position i of a request draws with (seed, i) alone.
    max_tokens: generated tokens at most; None is as many as the context holds.
    stop_token_ids: further ids that end the output; the id itself is kept in `token_ids` and not in `text`.
    ignore_eos: go on past the model's own end-of-sequence ids.
    skip_special_tokens: leave special tokens out of `text`.
    timeout_ms: deadline for the whole request, queueing included; None takes the engine's.
    n: answers to the prompt; they share its blocks, and answer i draws with (seed, i).
    prompt_logprobs: for each prompt token after the first, its raw log-probability and those of so many likeliest tokens.
    priority: under the policy `priority` lower goes first.
    cache_salt: only requests of the same salt share blocks of equal prefixes.

    Raises InvalidValueError naming field, value and range; UnsupportedError for vLLM fields not offered yet.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    timeout_ms: float | None = None
    n: int = 1
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_salt: str | None = None

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Any = None
    bad_words: Any = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Any = None
    allowed_token_ids: Any = None
    structured_outputs: Any = None
    output_kind: Any = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e6)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if isinstance(self.stop_token_ids, list):
            msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not isinstance(self.stop_token_ids, tuple):
            raise InvalidValueError(f"stop_token_ids: {shown(self.stop_token_ids)}; allowed: a list of token ids")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValueError(f"{name}: {shown(getattr(self, name))}; allowed: true or false")
        if self.timeout_ms is not None:
            _number("timeout_ms", self.timeout_ms, 0.0, 1e12, above=True)
        _integer("n", self.n, 1, MAX_ANSWERS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise InvalidValueError(f"cache_salt: {shown(self.cache_salt)}; allowed: a text that is not empty")
        for name in NOT_YET:
            if not _asks_for_nothing(name, getattr(self, name)):
                value = getattr(self, name)
                raise UnsupportedError(f"{name}: {shown(value)} is not available in this version of Octavo; leave it out")

    @property
    def greedy(self) -> bool:
        """Temperatures this small would overflow the division, and single out the likeliest token anyway."""
        return self.temperature < 1e-5

    @classmethod
    def create(cls, **fields: Any) -> SamplingParams:
        """Build from keywords of any origin (flags, JSON), refusing unknown ones by name."""
        for name in fields:
            if name not in cls.__struct_fields__:
                raise InvalidValueError(f"{name}: no such sampling parameter; allowed: {', '.join(cls.__struct_fields__)}")
        return cls(**fields)


_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))


def _asks_for_nothing(name: str, value: object) -> bool:
    """Whether a field not offered yet is at its default, or, where it would be a collection, empty."""
    default = _DEFAULTS[name]
    if isinstance(value, (list, dict, tuple)):
        return not value and name in ("stop", "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs")
    if isinstance(default, bool) or isinstance(value, bool):
        return type(value) is type(default) and value == default
    return value is default or (isinstance(value, (int, float)) and value == default)


def _number(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    # Comparing first keeps whole numbers beyond every float out of isfinite.
    legal = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high and math.isfinite(value)
    if not legal or (above and value == low):
        bounds = f"above {low:g}" if above else f"from {low:g}"
        raise InvalidValueError(f"{name}: {shown(value)}; allowed: a number {bounds} to {high:g}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidValueError(f"{name}: {shown(value)}; allowed: a whole number from {low} to {high}")
