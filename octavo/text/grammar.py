"""Structured output: which tokens may come next, told by llguidance from a JSON schema, a regular expression, a choice or a grammar."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from octavo.errors import InvalidValueError
from octavo.sampling_params import StructuredOutputsParams
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE = 256 << 10
"""Characters of one schema, pattern or grammar."""

MAX_KEPT, MAX_KEPT_BYTES = 256, 4 << 20
"""Compiled grammars that are kept, and characters of their sources together; the one used longest ago goes first."""

LEXER_FUEL, MAX_LEXER_STATES, MAX_GRAMMAR_SIZE = 2_000_000, 100_000, 250_000
"""What compiling may take: some 50,000 of fuel are burnt in a millisecond, and a state takes 1 to 2 kB."""


class Grammars:
    """Compiles structures for one vocabulary, and keeps what it compiled. `check` and `matcher` may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()

    def check(self, asked: StructuredOutputsParams) -> None:
        """Raises InvalidValueError with the reason where a structure is wrong, not supported, or too large."""
        self._compile(asked)

    def matcher(self, asked: StructuredOutputsParams, ends: Iterable[int]) -> Matcher:
        """A matcher at the beginning of a text. ends: ids that may follow where the text is whole. Raises as `check` does."""
        return Matcher(self._compile(asked).deep_copy(), -(-self._tokenizer.vocab_size // 32), ends)

    def _compile(self, asked: StructuredOutputsParams) -> LLMatcher:
        try:
            key = msgspec.json.encode(asked)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidValueError(f"structured_outputs: {_shortened(str(error))}") from None
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key][0]
        if len(key) > MAX_SOURCE:
            raise InvalidValueError(f"structured_outputs: {len(key)} characters; allowed: {MAX_SOURCE} at most")
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL, max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False
        )
        name, grammar = _grammar(asked)
        made = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        tried = made.deep_copy()
        if not made.is_error():
            tried.compute_bitmask()  # some can be read, and fail where the text begins
        for matcher in (made, tried):
            if matcher.is_error():
                raise InvalidValueError(f"structured_outputs.{name}: {_shortened(matcher.get_error())}")
        with self._lock:
            self._compiled[key] = made, len(key)
            while len(self._compiled) > MAX_KEPT or sum(size for _, size in self._compiled.values()) > MAX_KEPT_BYTES:
                self._compiled.popitem(last=False)
        return made

    def prepare(self) -> None:
        """Make the vocabulary ready, which takes about a second and is otherwise done for the first structure."""
        assert self._vocabulary is not None

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Words(self._tokenizer)))


class Matcher:
    """How far one answer has come in its structure."""

    def __init__(self, matcher: LLMatcher, words: int, ends: Iterable[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._ends = sorted(ends)
        self._tokens: list[int] = []
        self._ahead: tuple[Future[None], np.ndarray] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        self._settle()
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_stopped(self) -> bool:
        """Whether there is no mask to compute."""
        self._settle()
        return self._matcher.is_stopped()

    def follow(self, token_ids: list[int]) -> None:
        """Go to where the answer is these tokens, back first where they are others. Raises ValueError where the structure forbids them."""
        known = len(self._tokens)
        if len(token_ids) == known and token_ids == self._tokens:
            return
        self._settle()
        self._ahead = None
        if token_ids[:known] != self._tokens:
            pairs = enumerate(zip(self._tokens, token_ids, strict=False))
            common = next((place for place, (mine, theirs) in pairs if mine != theirs), min(known, len(token_ids)))
            self._matcher.rollback(known - common)
            del self._tokens[common:]
        for token_id in token_ids[len(self._tokens) :]:
            if token_id in self._ends and self._matcher.is_accepting():
                return
            if not self._matcher.consume_token(token_id):
                raise ValueError(f"structured_outputs: token {token_id} does not fit ({_shortened(self._matcher.get_error())})")
            self._tokens.append(token_id)

    def fill(self, bits: np.ndarray) -> None:
        """Set the bits of the tokens that may come next: int32, 32 tokens a word, zero before. Raises ValueError where none can be told."""
        self._settle()
        if self._ahead is None and not self._matcher.is_stopped():
            mine = np.zeros(self._words, dtype=np.int32)
            self._matcher.unsafe_compute_mask_ptr(mine.ctypes.data, mine.nbytes)
        else:
            mine = self._ahead[1] if self._ahead is not None else bits
        if self._matcher.is_error():
            raise ValueError(f"structured_outputs: {_shortened(self._matcher.get_error())}")
        # Logits may be there for more ids, or fewer, than the vocabulary has.
        common = min(len(bits), len(mine))
        bits[:common] = mine[:common]
        if self._matcher.is_accepting():
            for token_id in self._ends:
                if token_id < 32 * len(bits):
                    bits.view("uint8")[token_id >> 3] |= 1 << (token_id & 7)

    def _settle(self) -> None:
        """Nothing else may be asked of a matcher while its mask is computed."""
        if self._ahead is not None:
            self._ahead[0].result()


class LookAhead:
    """Computes the masks of the next position beside whatever the caller does next, on a thread without the interpreter's lock."""

    def __init__(self) -> None:
        from llguidance import LLExecutor

        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-masks")
        self._executor = LLExecutor(1)

    def begin(self, matchers: list[Matcher]) -> None:
        """For matchers that have taken in their last token."""
        wanted = [matcher for matcher in matchers if not matcher.is_stopped]
        if wanted:
            bits = np.zeros((len(wanted), wanted[0]._words), dtype=np.int32)
            done = self._thread.submit(self._compute, wanted, bits)
            for place, matcher in enumerate(wanted):
                matcher._ahead = done, bits[place]

    def close(self) -> None:
        self._thread.shutdown()

    def _compute(self, matchers: list[Matcher], bits: np.ndarray) -> None:
        pairs = [(matcher._matcher, place) for place, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, bits.strides[0], len(bits))


class _Words:
    """A vocabulary as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.bos_token_id = tokenizer.bos_token_id
        ends = tokenizer.eos_token_ids
        self.eos_token_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(ends, default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that spell just this. A vocabulary that marks the start of a text with a space writes it where none was asked for."""
        ids = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        if b"".join(map(self._tokenizer.token_bytes, ids)) == text:
            return ids
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        found, at = [], 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                if (token_id := self._ids.get(text[at:end])) is not None:
                    found.append(token_id)
                    at = end
                    break
            else:
                break  # no token begins so; what is spelled so far is all that can be
        return found

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {word: token_id for token_id, word in reversed(list(enumerate(self.tokens))) if word and token_id not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


def _grammar(asked: StructuredOutputsParams) -> tuple[str, str]:
    """Which field is asked for, and llguidance's own form of it."""
    from llguidance import LLMatcher, grammar_from

    fields = {"json": asked.json if asked.json is not None else asked.json_object or None}
    fields |= {name: getattr(asked, name) for name in ("regex", "choice", "grammar")}
    (name,) = (name for name, value in fields.items() if value is not None)
    try:
        if name == "json":
            schema = asked.json if asked.json is not None else {"type": "object"}
            if isinstance(schema, str):
                schema = json.loads(schema)
            if not isinstance(schema, (dict, bool)):
                raise ValueError("a schema is an object, or true or false")
            options: dict[str, Any] = {"whitespace_flexible": not asked.disable_any_whitespace}
            if asked.whitespace_pattern is not None:
                options["whitespace_pattern"] = asked.whitespace_pattern
            if isinstance(schema, bool):
                schema = {} if schema else {"not": {}}
            return name, LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
        if asked.regex is not None:
            return name, LLMatcher.grammar_from_regex(asked.regex)
        if asked.choice is not None:
            return name, LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in asked.choice))
        assert asked.grammar is not None
        return name, grammar_from("grammar", asked.grammar)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"structured_outputs.{name}: {_shortened(str(error))}") from None


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]}..."
