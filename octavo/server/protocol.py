"""What is said over HTTP: OpenAI's requests and answers with vLLM's additions, and the description of both that `/openapi.json` shows.

Bounds of sampling parameters are only described here; `SamplingParams` holds them. A field that takes nothing but null is OpenAI's and
not supported: anything else is refused by its name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from octavo.errors import InvalidValueError
from octavo.sampling_params import MAX_BIASES, MAX_LOGPROBS, RANGES, SamplingParams

MAX_PROMPTS = 1024
"""Prompts of one call."""

MAX_LABEL = 128
"""Characters of a label that the log tells."""

MAX_FIELDS = 256
"""Fields of one object."""

MAX_ID = 2**31 - 1


def ranged(name: str, about: str = "", **changed: float) -> Any:
    """A parameter's field, with its bounds described."""
    bounds = RANGES[name]
    limits: dict[str, Any] = {"exclusiveMinimum" if bounds.above else "minimum": bounds.low, "maximum": bounds.high} | changed
    return Field(default=None, description=about or None, json_schema_extra=limits)


Item = TypeVar("Item")


class _FirstError(FailFast):
    """Hashable, so that it may stand in a union."""

    __hash__ = object.__hash__


Many = Annotated[list[Item], _FirstError()]
"""A list of which no more is looked at from its first wrong element on."""


def few(given: Any, most: int) -> Any:
    """Refuse a dictionary or list of more before its entries are looked at: each that is wrong would be an error of its own."""
    if isinstance(given, dict | list) and len(given) > most:
        raise PydanticCustomError("too_many", "{count} entries; allowed: {most} at most", {"count": len(given), "most": most})
    return given


TokenId = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": MAX_ID})]
Text = Annotated[str, Field(json_schema_extra={"minLength": 1})]


class Body(BaseModel):
    """Types are taken as they are: a text is no number, and an unknown field is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        return few(data, MAX_FIELDS)


class Part(Body):
    """A part of a message. Only texts are read here."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str = ""


class ToolCall(Body):
    index: int | None = Field(default=None, description="what a client repeats of a stream; not read")
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """A message of a conversation. `developer` is `system` by its newer name."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Part] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Many[Any] | None = Field(default=None, description="what a client repeats of an answer; not read")
    audio: None = None
    function_call: None = None


class Function(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="calls fit their schema where tool_choice makes one certain; not under `auto`")


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Body):
    """Exactly one of the first five."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Many[Text] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = True
    whitespace_pattern: str | None = None


class SamplingBody(Body):
    """What both kinds of generation take."""

    model: str = Field(default="", description="empty: the one that is served")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = ranged("n")
    presence_penalty: float | None = ranged("presence_penalty")
    frequency_penalty: float | None = ranged("frequency_penalty")
    repetition_penalty: float | None = ranged("repetition_penalty")
    temperature: float | None = ranged("temperature")
    top_p: float | None = ranged("top_p")
    top_k: int | None = ranged("top_k", "0 and -1 are no limit")
    min_p: float | None = ranged("min_p")
    seed: int | None = ranged("seed")
    stop: Text | Many[Text] | None = None
    stop_token_ids: Many[TokenId] | None = None
    bad_words: Many[Text] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = ranged("min_tokens")
    prompt_logprobs: int | None = ranged("prompt_logprobs")
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = Field(default=None, description="both are the same: no vocabulary here puts spaces there")
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(lambda given: few(given, MAX_BIASES))] = Field(
        default=None, description="token id to a number from -100 to 100", json_schema_extra={"maxProperties": MAX_BIASES}
    )
    allowed_token_ids: Many[TokenId] | None = None
    structured_outputs: StructuredOutputs | None = None
    logits_processors: Many[str] | None = Field(default=None, description="names that the server has registered")
    timeout_ms: float | None = ranged("timeout_ms", "deadline of the whole request, queueing included")
    priority: int | None = ranged("priority")
    cache_salt: Text | None = None
    request_id: str | None = Field(
        default=None, pattern=r"^[!-~]{1,128}$", description="the request's id; without it that of X-Request-Id, or a new one"
    )
    return_token_ids: bool | None = None
    user: str | None = Field(default=None, description=f"a label; its first {MAX_LABEL} characters are written to the log")

    def params(self, recommended: dict[str, Any], **changed: Any) -> SamplingParams:
        """What the model recommends, what the body says, and what the caller makes of the rest. Raises InvalidValueError."""
        given = {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}
        if self.structured_outputs is not None:
            fields = self.structured_outputs.model_dump(by_alias=True, exclude_unset=True)
            given["structured_outputs"] = {name: value for name, value in fields.items() if value is not None}
        if any(":" in name for name in self.logits_processors or ()):
            raise InvalidValueError("logits_processors: an import path; allowed: a name that the server has registered")
        return SamplingParams.create(**recommended | given | changed)


SAMPLED = [name for name in SamplingBody.model_fields if name in SamplingParams.__struct_fields__ and name != "structured_outputs"]


def few_prompts(given: Any) -> Any:
    is_one = isinstance(given, list) and bool(given) and isinstance(given[0], int)
    return given if is_one else few(given, MAX_PROMPTS)


class CompletionRequest(SamplingBody):
    prompt: Annotated[Text | Many[Text] | Many[TokenId] | Many[Many[TokenId]], BeforeValidator(few_prompts)] = Field(
        description=f"one prompt or several, {MAX_PROMPTS} at most, as text or token ids"
    )
    max_tokens: int | None = ranged("max_tokens", "generated tokens at most, 16 without it; 0 with echo", minimum=0)
    logprobs: int | None = ranged("logprobs", "score the tokens, and name so many of the likeliest")
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: None = None
    best_of: None = None


class ChatCompletionRequest(SamplingBody):
    messages: Many[Message] = Field(min_length=1)
    max_tokens: int | None = ranged("max_tokens", "the older name of max_completion_tokens")
    max_completion_tokens: int | None = ranged("max_tokens", "generated tokens at most; without it as many as the context holds")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None, description="told to the chat template; `none` asks it for no thinking"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="further variables of the chat template")
    documents: Many[dict[str, Any]] | None = Field(default=None, description="what to answer from, told to a template that knows of it")
    add_generation_prompt: bool | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(lambda given: few(given, MAX_FIELDS))] = Field(
        default=None, description="a label; not read", json_schema_extra={"maxProperties": MAX_FIELDS}
    )
    safety_identifier: str | None = Field(default=None, description="a label; not read")
    prompt_cache_key: str | None = Field(default=None, description="not needed: all equal prefixes are shared, within their cache_salt")
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    modalities: Many[Literal["text"]] | None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    prediction: None = None
    verbosity: None = None
    web_search_options: None = None
    best_of: None = None


class TokenizeRequest(Body):
    """Of a prompt, or of a conversation as its template writes it."""

    model: str = ""
    prompt: str | None = None
    messages: Many[Message] | None = Field(default=None, min_length=1)
    tools: Many[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str = ""
    tokens: Many[TokenId]


# Answers


class ErrorContent(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorContent


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length", "tool_calls", "timeout", "abort"]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class Health(BaseModel):
    status: str


class Version(BaseModel):
    version: str


class Aborted(BaseModel):
    id: str
    aborted: Literal[True]


class CacheReset(BaseModel):
    blocks: int = Field(description="blocks that were kept for their prefixes only, and are free now")
