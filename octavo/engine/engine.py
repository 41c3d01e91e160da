"""The step loop: requests in, plans out to the executor, tokens back, text out."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.core.request import Request, Sequence
from octavo.core.scheduler import Change, Scheduler
from octavo.core.stats import CompactionReport, Record, Stats
from octavo.errors import EngineError, InvalidValueError, PromptTooLongError, UnsupportedError, shown
from octavo.executor.base import Executor
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.plan import Logprob as RankedToken
from octavo.plan import StepPlan
from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import Detokenizer
from octavo.text.grammar import Grammars
from octavo.text.stops import StopSearch
from octavo.text.tokenizer import Tokenizer
from octavo.worker import logits_processors

Prompt = str | list[int] | dict[str, list[int]]

logger = logging.getLogger("octavo")


@dataclass(slots=True)
class _Live:
    """A request's output as it grows; a detokenizer for each answer, and a search for stop texts where there are any."""

    request: Request
    output: RequestOutput
    detokenizers: list[Detokenizer]
    searches: list[StopSearch] | None
    num_generated: list[int]


class Engine:
    """One scheduler, one executor. Not thread-safe: all calls come from one thread, the one that computes.

    There is one exception, for who has a thread to spare: `encode`, `check`, `open`, `deliver` and `close` touch nothing that `advance`
    touches, and may be called from another thread, one and the same. It then replaces `stop`, which must run where `advance` does.

    clock: monotonic seconds, for deadlines and metrics. grammars: the workers', where they are in this process.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.executor = executor
        self.tokenizer = tokenizer
        self.grammars = grammars or Grammars(tokenizer)
        self.capacity = executor.capacity
        # An id beyond the logits is never drawn.
        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < self.capacity.vocab_size)
        self._check_invariants = config.memory.check_invariants
        self._clock = clock
        self._numbers = itertools.count()
        self._live: dict[str, _Live] = {}
        self._seconds = {"schedule": 0.0, "forward": 0.0, "check": 0.0, "step": 0.0}
        self._said_refusal = False
        self._changes: list[Change] = []
        self._spellings = functools.lru_cache(maxsize=64)(functools.partial(_spell, tokenizer, self.capacity.vocab_size))
        self.scheduler = Scheduler(
            num_blocks=self.capacity.num_blocks,
            committed_blocks=self.capacity.committed_blocks,
            prealloc_blocks=self.capacity.prealloc_blocks,
            block_size=self.capacity.block_size,
            block_bytes=self.capacity.block_bytes,
            windows=self.capacity.windows,
            max_batch_size=config.scheduler.max_batch_size,
            prefill_chunk_size=config.scheduler.prefill_chunk_size,
            policy=config.scheduler.policy,
            prefix_caching=config.memory.prefix_caching,
            swap_blocks=self.capacity.swap_blocks,
        )
        self.stop: Callable[[Sequence, str], None] = self.scheduler.stop

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._changes)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt in any of its forms -> (its text if it has one, its ids). Raises InvalidValueError for what can never run."""
        text = prompt if isinstance(prompt, str) else None
        if text is not None:
            ids = self.tokenizer.encode(text)
        elif isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
            ids = prompt["prompt_token_ids"]
        else:
            ids = prompt  # type: ignore[assignment]
        if not isinstance(ids, list):
            raise InvalidValueError(f"prompt: {shown(prompt)}; allowed: a text, a list of token ids, or {{'prompt_token_ids': [...]}}")
        if not ids:
            raise InvalidValueError("prompt: it is empty; at least one token is needed")
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < self.capacity.vocab_size:
                raise InvalidValueError(f"prompt: token id {shown(token_id)}; allowed: 0 to {self.capacity.vocab_size - 1}")
        if len(ids) >= self.capacity.longest:
            raise PromptTooLongError(
                f"prompt: {len(ids)} tokens; allowed: {self.capacity.longest - 1} at most, as a sequence may have "
                f"{self.capacity.longest} ({self.capacity.bound_by}), one of them generated"
            )
        return text, list(ids)

    def check(self, params: SamplingParams) -> None:
        """Refuse parameters that are wrong for this model. Raises InvalidValueError."""
        size = self.capacity.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= size:
                    raise InvalidValueError(f"{name}: {token_id}; allowed: 0 to {size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > size:
                raise InvalidValueError(f"{name}: {getattr(params, name)}; the vocabulary has {size} tokens")
        for processor in params.logits_processors:
            if not isinstance(processor, str) and not self.executor.takes_callables:
                raise UnsupportedError(
                    "logits_processors: a callable cannot be sent to this engine's workers; give a registered name, or module:function"
                )
            logits_processors.find(processor)
        if params.structured_outputs is not None:
            if not self._eos_token_ids and not params.stop_token_ids:
                raise UnsupportedError("structured_outputs: the model has no end-of-sequence token to end the text with")
            self.grammars.check(params.structured_outputs)
        self._spellings(tuple(params.bad_words))  # here, where a server has time

    def add(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a request; returns its id. Raises InvalidValueError, queueing nothing, for what can never run."""
        text, ids = self.encode(prompt)
        return self.add_encoded(text, ids, params, request_id)

    def add_encoded(self, text: str | None, ids: list[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a prompt that `encode` has passed."""
        self.check(params)
        before = self._live.get(request_id) if request_id is not None else None
        request = self.open(text, ids, params, request_id)
        try:
            self.scheduler.add(request)
        except BaseException:
            self.close(request.request_id)
            if before is not None:
                self._live[before.output.request_id] = before
            raise
        return request.request_id

    def deadline(self, params: SamplingParams, arrival: float) -> float | None:
        """When a request that came at `arrival` ends at the latest, by the engine's clock."""
        timeout_ms = params.timeout_ms if params.timeout_ms is not None else self.config.scheduler.timeout_ms
        return None if timeout_ms is None else arrival + timeout_ms / 1000

    def open(
        self, text: str | None, ids: list[int], params: SamplingParams, request_id: str | None = None, arrival: float | None = None
    ) -> Request:
        """Make a request of what `encode` and `check` have passed, and room for its output. Its id must not be that of a live one.

        arrival: when it came, by the engine's clock; without it now.
        """
        now = self._clock() if arrival is None else arrival
        number = next(number for number in self._numbers if request_id is not None or f"request-{number}" not in self._live)
        room = self.capacity.longest - len(ids)
        request = Request(
            request_id if request_id is not None else f"request-{number}",
            ids,
            params,
            arrival=now,
            max_length=len(ids) + (room if params.max_tokens is None else min(room, params.max_tokens)),
            deadline=self.deadline(params, now),
            eos_token_ids=self._eos_token_ids,
            seed=params.seed if params.seed is not None else _seed(self.config.model.seed, number),
            bad_words=self._spellings(tuple(params.bad_words)),
        )
        outputs = [CompletionOutput(choice, "", []) for choice in range(params.n)]
        if params.logprobs is not None:
            for answer in outputs:
                answer.logprobs, answer.cumulative_logprob = [], 0.0
        metrics = RequestMetrics(now, events=request.events)
        scores: list[dict[int, Logprob] | None] | None = None if params.prompt_logprobs is None else [None]
        output = RequestOutput(request.request_id, text, ids, outputs, False, metrics, prompt_logprobs=scores)
        detokenizers = [Detokenizer(self.tokenizer, ids, params.skip_special_tokens) for _ in outputs]
        searches = [StopSearch(params.stop, params.include_stop_str_in_output) for _ in outputs] if params.stop else None
        self._live[request.request_id] = _Live(request, output, detokenizers, searches, [0] * params.n)
        return request

    def close(self, request_id: str) -> RequestOutput | None:
        """Forget a request's output; returns it, as far as it has come, where the request is live."""
        live = self._live.pop(request_id, None)
        return live.output if live is not None else None

    def abort(self, request_id: str) -> bool:
        """End a request; its blocks are free at once. False where no such request is live."""
        return self.scheduler.finish(request_id, "abort")

    def forget(self, request_id: str) -> None:
        """End a request whose caller has gone, leaving no output behind."""
        self.abort(request_id)
        self.close(request_id)
        if not self._live:
            self.scheduler.take_changes()
            self._changes.clear()

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that gained text or ended, their text unread."""
        changes = self.advance()
        began = time.perf_counter()
        outputs = self.deliver(changes)
        self._seconds["step"] += time.perf_counter() - began
        return outputs

    def advance(self) -> list[Change]:
        """The first half of a step, up to the tokens; returns what changed."""
        began = time.perf_counter()
        plan = self.scheduler.schedule(self._clock())
        self._seconds["schedule"] += time.perf_counter() - began
        changes, self._changes = self._changes, []
        changes += self.scheduler.take_changes() if plan is None else self._execute(plan)
        self._seconds["step"] += time.perf_counter() - began
        return changes

    def deliver(self, changes: list[Change]) -> list[RequestOutput]:
        """The second half: makes text of tokens; returns the requests that gained text or ended."""
        outputs = {output.request_id: output for change in changes if (output := self._apply(change)) is not None}
        return list(outputs.values())

    def compact(self) -> CompactionReport | None:
        """Move live blocks down and give the pool's tail back to the system, whoever is running; None where nothing can be given back."""
        return self._compact(self.scheduler.compact(self._clock()))

    def rest(self) -> CompactionReport | None:
        """To be called when there is nothing to do: gives back memory that was not needed lately, where that is worth the copying."""
        return self._compact(self.scheduler.rest(self._clock()))

    def stats(self) -> Stats:
        return self.scheduler.stats(self.executor.mapping_bytes(), self._seconds)

    def record(self) -> Record:
        """What `octavo advise` reads: the figures, and how they went."""
        return self.scheduler.record(self.capacity.longest, self.stats())

    def _compact(self, plan: StepPlan | None) -> CompactionReport | None:
        if plan is None:
            return None
        began = time.perf_counter()
        self._changes += self._execute(plan)
        if (plan := self.scheduler.settle()) is not None:
            self._changes += self._execute(plan)
        report = self.scheduler.compaction
        if report is None:
            raise EngineError("the compaction failed; the sequences that ran ended with an error")
        return dataclasses.replace(report, seconds=time.perf_counter() - began)

    def _execute(self, plan: StepPlan) -> list[Change]:
        """Carry out a plan; returns what changed since the last one."""
        try:
            result = self.executor.execute(plan)
        except Exception as error:
            # What a request holds must never stop the engine: the step's requests end, the others go on.
            self.scheduler.fail(plan.step, f"{type(error).__name__}: {error}")
            changes = self.scheduler.take_changes()
        except BaseException as error:
            self.scheduler.fail(plan.step, type(error).__name__)
            raise
        else:
            self._seconds["forward"] += result.forward_seconds
            changes = self.scheduler.update(result)
        if self.scheduler.growth_refused is not None and not self._said_refusal:
            self._said_refusal = True
            logger.warning("%s", self.scheduler.growth_refused)
        if self._check_invariants:
            began = time.perf_counter()
            self.scheduler.check()
            self._seconds["check"] += time.perf_counter() - began
        return changes

    def _apply(self, change: Change) -> RequestOutput | None:
        sequence = change.sequence
        live = self._live.get(sequence.request.request_id)
        if live is None or live.request is not sequence.request:  # its caller has gone, and may have used the id again
            return None
        output, now, params = live.output, self._clock(), live.request.params
        completion = output.outputs[sequence.choice]
        if completion.finish_reason is not None:  # a stop text ended it, and this was computed meanwhile
            return None
        if params.output_kind == "delta":
            for answer in output.outputs:
                answer.drop_read()
        if change.prompt_logprobs and output.prompt_logprobs is not None:
            output.prompt_logprobs += [self._readable(tokens) for tokens in change.prompt_logprobs]
        if change.token_ids and output.metrics.first_token is None:
            output.metrics.first_token = now
        completion.token_ids += change.token_ids
        live.num_generated[sequence.choice] += len(change.token_ids)
        if change.logprobs and completion.logprobs is not None and completion.cumulative_logprob is not None:
            completion.logprobs += [self._readable(tokens) for tokens in change.logprobs]
            completion.cumulative_logprob += sum(tokens[0].logprob for tokens in change.logprobs)
        delta, stop = self._text_of(change, live) if params.detokenize else ("", None)
        completion.text += delta
        completion.unread += delta
        if stop is not None:
            completion.finish_reason, completion.stop_reason = "stop", stop
            self.stop(sequence, stop)
        elif change.finished:
            completion.finish_reason, completion.stop_reason = sequence.finish_reason, sequence.stop_reason
            completion.error = sequence.error
        output.num_cached_tokens = live.request.sequences[0].num_cached
        if sequence.num_preemptions:
            output.metrics.preemptions = sum(one.num_preemptions for one in live.request.sequences)
        if completion.finish_reason and all(answer.finish_reason for answer in output.outputs):
            output.finished = True
            output.metrics.finished = now
            del self._live[output.request_id]
        return output if output.finished or params.output_kind != "final" else None

    def _text_of(self, change: Change, live: _Live) -> tuple[str, str | None]:
        """The text that a change adds, and the stop text that ends it, where one does."""
        sequence, params = change.sequence, live.request.params
        detokenizer = live.detokenizers[sequence.choice]
        reason = sequence.finish_reason if change.finished else None
        # A stop id belongs to the tokens, and to the text only where that is asked.
        is_stop_id = reason == "stop" and not params.include_stop_str_in_output
        delta = detokenizer.push(change.token_ids[:-1] if is_stop_id else change.token_ids)
        if change.finished:
            delta += detokenizer.finish()
        if live.searches is None:
            return delta, None
        search = live.searches[sequence.choice]
        may_end = reason in (None, "stop", "length") and live.num_generated[sequence.choice] > params.min_tokens
        delta, found = search.push(delta, may_end)
        if found is None and change.finished:
            delta += search.finish()
        return delta, found

    def _readable(self, tokens: list[RankedToken]) -> dict[int, Logprob]:
        return {one.token_id: Logprob(one.logprob, one.rank, self._text(one.token_id)) for one in tokens}

    def _text(self, token_id: int) -> str:
        """One token as it reads in the middle of a text, special ones by name."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False, continuation=True)


def _spell(tokenizer: Tokenizer, vocab_size: int, bad_words: tuple[str, ...]) -> list[list[int]]:
    """The tokens of texts as they stand at a beginning, and after a space."""
    found = []
    for word in bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in found and max(ids) < vocab_size:
                found.append(ids)
    return found


def _seed(engine_seed: int, number: int) -> int:
    """A request's own seed, of 63 bits: the engine's seed and the request's number make a run repeatable as a whole."""
    digest = hashlib.blake2b(f"{engine_seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
