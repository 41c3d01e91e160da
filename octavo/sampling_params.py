"""What a request asks of the sampler: vLLM's field names, defaults and meanings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from octavo.errors import InvalidValueError, shown

MAX_SEED = 2**63 - 1
MAX_ANSWERS = 1024
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 4096
MAX_BAD_WORDS = 1024
MAX_BIASES = 1024
MAX_PROCESSORS = 16


class Range(NamedTuple):
    """Bounds of a number, both allowed unless `above`, which leaves out the lower one."""

    low: float
    high: float
    above: bool = False


RANGES = {
    "n": Range(1, MAX_ANSWERS),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(1e-6, 1e6),
    "temperature": Range(0.0, 1e6),
    "top_p": Range(0.0, 1.0, above=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0.0, 1.0),
    "seed": Range(-MAX_SEED - 1, MAX_SEED),
    "max_tokens": Range(1, 2**31 - 1),
    "min_tokens": Range(0, 2**31 - 1),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
    "timeout_ms": Range(0.0, 1e12, above=True),
    "priority": Range(-(2**31), 2**31 - 1),
}
"""Of every parameter that is a number; whole numbers where the bounds are."""

MAY_BE_NONE = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "timeout_ms")

OUTPUT_KINDS = ("cumulative", "delta", "final")

STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the whole text of an answer must be: exactly one of json, json_object, regex, choice and grammar.

    json: a value that a JSON schema admits, the schema given as a mapping or as JSON text. json_object: any JSON object. regex: a text
    that the whole pattern matches. choice: one of these texts. grammar: a sentence of a Lark grammar.
    disable_any_whitespace: JSON without white space between its parts, which vLLM would leave to the model unless asked.
    whitespace_pattern: what may stand between them, as a regular expression, where white space is not disabled.

    Raises InvalidValueError naming field, value and range.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = True
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        if self.json_object is not None:
            _flag("structured_outputs.json_object", self.json_object)
        given = [name for name in STRUCTURES if getattr(self, name) is not None and not (name == "json_object" and not self.json_object)]
        if len(given) != 1:
            names = ", ".join(given) or "nothing"
            raise InvalidValueError(f"structured_outputs: {names} is given; allowed: one of {', '.join(STRUCTURES)}")
        if self.json is not None:
            _schema(self.json)
        choice = self.choice
        if choice is not None and not (isinstance(choice, tuple) and choice and all(_is_text(one) for one in choice)):
            raise InvalidValueError(f"structured_outputs.choice: {shown(choice)}; allowed: a list of texts, none of them empty")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not _is_text(value):
                raise InvalidValueError(f"structured_outputs.{name}: {shown(value)}; allowed: a text that is not empty")
        _flag("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise InvalidValueError("structured_outputs.whitespace_pattern: it is given; allowed: with disable_any_whitespace: false")

    @classmethod
    def create(cls, fields: Any) -> StructuredOutputsParams:
        """From a mapping of any origin, refusing unknown fields by name."""
        if not isinstance(fields, dict):
            raise InvalidValueError(f"structured_outputs: {shown(fields)}; allowed: a mapping with one of {', '.join(STRUCTURES)}")
        for name in fields:
            if name not in cls.__struct_fields__:
                raise InvalidValueError(f"structured_outputs: no field {shown(name)}; allowed: {', '.join(cls.__struct_fields__)}")
        return cls(**fields)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn and when to stop.

    n: answers to the prompt; they share its blocks, and answer i draws with (seed, i).
    presence_penalty, frequency_penalty: taken from the logit of each token generated so far, once, and once for each time it was.
    repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens of the prompt or generated.
    temperature: 0 takes the likeliest token; above 0 divides the logits before drawing.
    top_k: draw among the k likeliest; 0 or -1 is no limit.
    top_p: draw among the smallest set of likeliest tokens whose probability reaches top_p, after top_k and min_p.
    min_p: drop tokens less likely than min_p times the likeliest.
    seed: makes the draws repeatable; None takes a fresh one. Output position i of a request draws with (seed, i) alone.
    stop: texts that end the output, which is cut before the earliest of them.
    stop_token_ids: further ids that end the output; the id itself is kept in `token_ids` and not in `text`.
    bad_words: texts whose tokens never follow each other in the output, at its start or after a space.
    include_stop_str_in_output: keep what ended the output, a text or a token, in `text`.
    ignore_eos: go on past the model's own end-of-sequence ids.
    max_tokens: generated tokens at most; None is as many as the context holds.
    min_tokens: generated tokens before anything may end the output.
    logprobs: for each generated token its raw log-probability, before all of the above, and those of so many likeliest tokens.
    prompt_logprobs: the same for each prompt token after the first.
    detokenize: False leaves `text` empty.
    skip_special_tokens: leave special tokens out of `text`.
    spaces_between_special_tokens: without effect, as none of the vocabularies read here puts spaces there.
    logit_bias: {token id: number} added to logits.
    allowed_token_ids: no other token is drawn.
    structured_outputs: what the text must be; a StructuredOutputsParams, or a mapping of its fields.
    output_kind: what each output of a stream holds: all so far (cumulative), what is new (delta), or all, once, at the end (final).
    logits_processors: called in turn with (prompt_token_ids, output_token_ids, logits [vocab_size]) for the logits to draw from: names
        that were registered, import paths `module:function`, or callables.
    timeout_ms: deadline for the whole request, queueing included; None takes the engine's.
    priority: under the policy `priority` lower goes first.
    cache_salt: only requests of the same salt share blocks of equal prefixes.

    Raises InvalidValueError naming field, value and range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: str = "cumulative"
    logits_processors: Sequence[Any] = ()
    timeout_ms: float | None = None
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        for name, bounds in RANGES.items():
            value = getattr(self, name)
            if value is None and name in MAY_BE_NONE:
                continue
            if isinstance(bounds.low, int):
                _integer(name, value, bounds.low, int(bounds.high))
            else:
                _number(name, value, *bounds)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in FLAGS:
            _flag(name, getattr(self, name))
        if self.cache_salt is not None and not _is_text(self.cache_salt):
            raise InvalidValueError(f"cache_salt: {shown(self.cache_salt)}; allowed: a text that is not empty")
        if self.output_kind not in OUTPUT_KINDS:
            raise InvalidValueError(f"output_kind: {shown(self.output_kind)}; allowed: {', '.join(OUTPUT_KINDS)}")
        self._take_collections()
        if self.stop and not self.detokenize:
            raise InvalidValueError("stop: it is looked for in the text; allowed: with detokenize: true")
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidValueError("ignore_eos: true; allowed: false where structured_outputs are asked for, which end with the text")

    def _take_collections(self) -> None:
        """Lists become tuples, and what may be given in several forms takes one."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._put("stop", _texts("stop", stop, MAX_STOPS, MAX_STOP_LENGTH))
        self._put("bad_words", _texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_LENGTH))
        self._put("stop_token_ids", _token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidValueError("allowed_token_ids: it is empty; allowed: None, or a list of at least one token id")
            self._put("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._put("logit_bias", _biases(self.logit_bias))
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            self._put("structured_outputs", StructuredOutputsParams.create(self.structured_outputs))
        processors = self.logits_processors
        if processors is None:
            processors = ()
        if not isinstance(processors, (list, tuple)) or not all(isinstance(one, str) or callable(one) for one in processors):
            raise InvalidValueError(f"logits_processors: {shown(processors)}; allowed: a list of names, import paths and callables")
        if len(processors) > MAX_PROCESSORS:
            raise InvalidValueError(f"logits_processors: {len(processors)} of them; allowed: {MAX_PROCESSORS} at most")
        self._put("logits_processors", tuple(processors))

    def _put(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)

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


FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens")


def _schema(schema: object) -> None:
    """A text, or a mapping that is JSON."""
    legal = _is_text(schema) or isinstance(schema, dict)
    try:
        msgspec.json.encode(schema)
        plain = _is_json(schema)
    except (TypeError, ValueError, OverflowError, RecursionError):
        plain = False
    if not legal or not plain:
        raise InvalidValueError(f"structured_outputs.json: {shown(schema)}; allowed: a JSON schema, as a mapping or as JSON text")


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str)


def _is_text(value: object) -> bool:
    """A text that is not empty, and holds no half of a character."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidValueError(f"{name}: {shown(value)}; allowed: true or false")


def _texts(name: str, values: Any, most: int, longest: int) -> tuple[str, ...]:
    if values is None:
        return ()
    if not isinstance(values, (list, tuple)) or not all(_is_text(one) and len(one) <= longest for one in values):
        raise InvalidValueError(f"{name}: {shown(values)}; allowed: a list of texts of 1 to {longest} characters")
    if len(values) > most:
        raise InvalidValueError(f"{name}: {len(values)} texts; allowed: {most} at most")
    return tuple(values)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)):
        raise InvalidValueError(f"{name}: {shown(values)}; allowed: a list of token ids")
    for token_id in values:
        _integer(name, token_id, 0, 2**31 - 1)
    return tuple(values)


def _biases(values: Any) -> dict[int, float]:
    """JSON has no numbers for keys, so digits will do."""
    if not isinstance(values, dict):
        raise InvalidValueError(f"logit_bias: {shown(values)}; allowed: {{token id: a number from -100 to 100}}")
    if len(values) > MAX_BIASES:
        raise InvalidValueError(f"logit_bias: {len(values)} entries; allowed: {MAX_BIASES} at most")
    found = {}
    for key, bias in values.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        _integer("logit_bias", token_id, 0, 2**31 - 1)
        _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        found[token_id] = float(bias)
    return found


def _number(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    # Comparing first keeps whole numbers beyond every float out of isfinite.
    legal = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high and math.isfinite(value)
    if not legal or (above and value == low):
        bounds = f"above {low:g}" if above else f"from {low:g}"
        raise InvalidValueError(f"{name}: {shown(value)}; allowed: a number {bounds} to {high:g}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidValueError(f"{name}: {shown(value)}; allowed: a whole number from {low} to {high}")
