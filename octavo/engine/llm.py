"""Offline inference: `LLM`, in the shape of vLLM's."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config import EngineConfig
from octavo.core.stats import CompactionReport, Record, Stats
from octavo.engine.engine import Engine, Prompt
from octavo.errors import CheckpointError, EngineError, InvalidValueError, shown
from octavo.outputs import RequestOutput
from octavo.plan import Capacity
from octavo.sampling_params import SamplingParams
from octavo.text.grammar import Grammars
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.advice import Advice

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Score:
    """Of a text, the log-probability of each token after the first, given those before it."""

    logprobs: list[float]

    @property
    def logprob(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability; NaN for a text of one token."""
        if not self.logprobs:
            return math.nan
        nats = -self.logprob / len(self.logprobs)
        return math.exp(nats) if nats < 700 else math.inf


class LLM:
    """A model, loaded and ready.

    model: an alias, a hub id, a folder or a .gguf file. config: a YAML file or its parsed sections. settings: any setting of
    the configuration by name. on_tensor: called while loading with (tensors taken, tensors in the checkpoint).

    Raises ModelNotFoundError, CheckpointError, ConfigError. Use from one thread; `close()` or leave the context to free the memory.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        config: str | Path | Mapping[str, Any] | EngineConfig | None = None,
        *,
        revision: str | None = None,
        on_tensor: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(config, EngineConfig):
            config = config.to_dict()
        self.config = EngineConfig.create(config, **settings)
        from octavo.executor.inline import InlineExecutor
        from octavo.loading import open_checkpoint
        from octavo.loading.hub import resolve

        checkpoint = open_checkpoint(resolve(str(model), revision))
        try:
            metadata = checkpoint.metadata
            self.tokenizer = Tokenizer.from_folder(checkpoint.path) if metadata is None else Tokenizer.from_gguf(metadata)
            ends = checkpoint.generation_config.get("eos_token_id") or []
            ends = ends if isinstance(ends, list) else [ends]
            if not all(isinstance(token_id, int) for token_id in ends):
                raise CheckpointError(f"{checkpoint.path}: eos_token_id: {shown(ends)}; allowed: a token id, or a list of them")
            self.recommended = _recommended(checkpoint.generation_config)
            """Sampling parameters that the model's authors recommend, in its generation_config."""
            grammars = Grammars(self.tokenizer)
            executor = InlineExecutor(checkpoint, self.config, on_tensor, grammars)
        finally:
            checkpoint.close()
        self._unread: dict[str, RequestOutput] = {}
        self._engine: Engine | None = Engine(
            self.config,
            executor,
            self.tokenizer,
            eos_token_ids=frozenset([*self.tokenizer.eos_token_ids, *ends]),
            grammars=grammars,
        )

    @property
    def capacity(self) -> Capacity:
        """What the engine holds, and the longest sequence with what bounds it; its text is the line printed at start."""
        return self.engine.capacity

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("the engine is closed")
        return self._engine

    def get_default_sampling_params(self) -> SamplingParams:
        """What is `recommended`, and the usual defaults for the rest; used where no parameters are given."""
        return SamplingParams(**self.recommended)

    def _or_default(self, params: SamplingParams | Sequence[SamplingParams] | None) -> SamplingParams | Sequence[SamplingParams]:
        return self.get_default_sampling_params() if params is None else params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, batched; returns their outputs in order.

        prompts: one, or a list: texts, lists of token ids, or {"prompt_token_ids": [...]}. sampling_params: one for all, or one each.
        on_progress: called with each request that ended. Raises InvalidValueError before anything runs.
        """
        many = _as_prompts(prompts)
        params = _as_params(self._or_default(sampling_params), len(many))
        engine = self.engine
        encoded = [_encode(engine, prompt, place, len(many)) for place, prompt in enumerate(many)]
        for one in params:
            engine.check(one)
        ids: list[str] = []
        done: dict[str, RequestOutput] = {}
        try:
            for (text, token_ids), one in zip(encoded, params, strict=True):
                # Nobody reads in between.
                whole = one if one.output_kind == "final" else msgspec.structs.replace(one, output_kind="final")
                ids.append(engine.add_encoded(text, token_ids, whole))
            mine = set(ids)
            while len(done) < len(ids):
                for request_id in self._run(mine):
                    output = self._unread.pop(request_id).read()
                    if output.finished:
                        done[request_id] = output
                        if on_progress is not None:
                            on_progress(output)
        finally:
            self._drop(request_id for request_id in ids if request_id not in done)
        self._rest()
        return [done[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Answer one prompt, yielding its output whenever it grows, `delta` being the text added.

        The request is queued when the first output is asked for; closing the iterator aborts it. Several streams, and `generate`
        within one, share the batch: whoever asks drives the engine, and each reads its own. Raises InvalidValueError at once.
        """
        (params,) = _as_params(self._or_default(sampling_params), 1)
        self.engine.check(params)
        text, token_ids = self.engine.encode(prompt)
        return self._follow(text, token_ids, params)

    def _follow(self, text: str | None, token_ids: list[int], params: SamplingParams) -> Generator[RequestOutput, None, None]:
        request_id = self.engine.add_encoded(text, token_ids, params)
        finished = False
        try:
            while not finished:
                for _ in self._run({request_id}):
                    output = self._unread.pop(request_id).read()
                    finished = output.finished
                    if finished:
                        self._rest()
                    yield output
        finally:
            if not finished:
                self._drop([request_id])

    def _run(self, wanted: set[str]) -> list[str]:
        """Those of the wanted requests that have news, after a step where none had any yet."""
        if self._unread.keys().isdisjoint(wanted):
            self._unread.update((output.request_id, output) for output in self.engine.step())
        return [request_id for request_id in self._unread if request_id in wanted]

    def _rest(self) -> None:
        """Between calls there is time to give memory back."""
        if self._engine is not None and not self._engine.has_work:
            self._engine.rest()

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[RequestOutput], None] | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, each a list of {"role", "content"}; `template_variables` go to the chat template."""
        if not isinstance(messages, (list, tuple)) or not messages:
            raise InvalidValueError("messages: allowed: a list of {'role': ..., 'content': ...}, or a list of such lists, not empty")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        if not all(isinstance(conversation, (list, tuple)) and conversation for conversation in conversations):
            raise InvalidValueError("messages: a conversation is empty, or no list of messages")
        prompts: list[Prompt] = [self.tokenizer.encode_chat(conversation, **template_variables) for conversation in conversations]
        return self.generate(prompts, sampling_params, on_progress=on_progress)

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[Score]:
        """How likely the model holds texts of at least two tokens, from their prompt logprobs; in order."""
        outputs = self.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False))
        found = []
        for output in outputs:
            answer = output.outputs[0]
            if answer.finish_reason not in ("stop", "length"):
                raise EngineError(f"a text was not scored: {answer.error or answer.finish_reason}")
            ids = output.prompt_token_ids
            scored = zip(ids[1:], (output.prompt_logprobs or [None])[1:], strict=True)
            found.append(Score([scores[token_id].logprob for token_id, scores in scored if scores is not None]))
        return found

    def abort(self, request_id: str) -> bool:
        """End a request from within a stream or a progress callback; False where it is not live."""
        return self.engine.abort(request_id)

    def stats(self) -> Stats:
        return self.engine.stats()

    def record(self) -> Record:
        """Settings, figures and how they went over time, as `octavo advise` reads them."""
        return self.engine.record()

    def advise(self) -> list[Advice]:
        """What to change about KV memory, and why, from the figures of this engine."""
        from octavo.advice import advise

        return advise(self.record())

    def compact(self) -> CompactionReport | None:
        """Move live blocks down and give the rest of the pool back to the system, also while streams run; output is not affected.

        Returns what was moved and given back, None where nothing can be: `prealloc_blocks` stay, and cached prefixes are live, which
        `reset_prefix_cache` drops.
        """
        return self.engine.compact()

    def reset_prefix_cache(self) -> int:
        """Forget all prefixes; returns how many blocks were kept for them."""
        return self.engine.scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Audit every invariant of the books. Raises InvariantError."""
        self.engine.scheduler.check()

    def close(self) -> None:
        """Free model and KV memory. The object is of no use after; closing twice does nothing."""
        if self._engine is not None:
            self._engine.executor.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _drop(self, request_ids: Any) -> None:
        if self._engine is not None:
            for request_id in request_ids:
                self._engine.forget(request_id)
                self._unread.pop(request_id, None)


def _recommended(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises CheckpointError for a value that cannot be."""
    names = {**{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}, "max_new_tokens": "max_tokens"}
    given = {name: generation_config[theirs] for theirs, name in names.items() if generation_config.get(theirs) is not None}
    try:
        SamplingParams(**given)
    except InvalidValueError as error:
        raise CheckpointError(f"generation_config: {error}") from None
    return given


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidValueError(f"prompts: {shown(prompts)}; allowed: a text, a list of token ids, or a list of prompts")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def _encode(engine: Engine, prompt: Prompt, place: int, count: int) -> tuple[str | None, list[int]]:
    """As `Engine.encode`, the error saying which of several prompts it is about."""
    try:
        return engine.encode(prompt)
    except InvalidValueError as error:
        raise type(error)(f"prompts[{place}], {error}" if count > 1 else str(error)) from None


def _as_params(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidValueError(f"sampling_params: {shown(params)}; allowed: a SamplingParams, or a list of them")
    if len(params) != count:
        raise InvalidValueError(f"sampling_params: {len(params)} for {count} prompts; allowed: one for all, or one each")
    return list(params)
