"""The engine for callers on an event loop: the step loop on a thread of its own, text made of tokens on the loop's.

All that computes runs on the step thread, loading included. Commands reach it in a queue and run between two steps; what changed in a
step comes back in one piece, and while the next step computes, the event loop's thread makes text of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol, TypeVar

from octavo.core.request import Request
from octavo.core.scheduler import Change
from octavo.engine.engine import Engine
from octavo.engine.llm import LLM
from octavo.errors import EngineError, InvalidValueError, OverloadedError, UnavailableError, described, shown
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

Result = TypeVar("Result")

IDLE_SECONDS = 0.5
"""After so long without work, memory that was not needed lately is given back."""


class Observer(Protocol):
    """Who measures. Called on the event loop's thread."""

    def tokens(self, seconds: float, count: int) -> None:
        """An answer gained `count` tokens so long after those before."""

    def ended(self, output: RequestOutput, num_generated: int) -> None:
        """A request ended, with so many tokens generated for all its answers."""


class Call:
    """Requests that were queued together. Iterating gives (place, its output) whenever one has news.

    An output is read as it is given, so that a slow reader gets more at once, and must be used before the next is asked for.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.num_generated = [0] * len(requests)
        self._outputs: list[RequestOutput | None] = [None] * len(requests)
        self._last = [[0.0] * request.params.n for request in requests]
        self._error: str | None = None
        self._news = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Until all have ended. Raises EngineError where the engine stops."""
        left = len(self.requests)
        while left:
            await self._news.wait()
            self._news.clear()
            for place, output in enumerate(self._outputs):
                if output is not None:
                    self._outputs[place] = None
                    left -= output.finished
                    yield place, output.read()
            if self._error is not None:
                raise EngineError(self._error)

    async def outputs(self) -> list[RequestOutput]:
        """All of them, when they have ended. Raises EngineError where the engine stops."""
        found = {place: output async for place, output in self}
        return [found[place] for place in range(len(self.requests))]

    def put(self, place: int, output: RequestOutput) -> None:
        self._outputs[place] = output
        self._news.set()

    def fail(self, error: str) -> None:
        self._error = error
        self._news.set()

    def took(self, place: int, choice: int, count: int, now: float) -> float:
        """Note that an answer gained tokens; returns the seconds since those before, 0 for the first."""
        self.num_generated[place] += count
        last = self._last[place]
        before, last[choice] = last[choice], now
        return now - before if before else 0.0


class AsyncEngine:
    """Loads with `start`, answers with `add`, ends with `close`. All calls come from one event loop.

    make: builds the LLM, on the step thread. max_waiting, max_waiting_tokens: requests that may wait to be admitted, and the tokens of
    their prompts; what would exceed either is refused with OverloadedError. 0 is no limit.
    """

    def __init__(
        self, make: Callable[[], LLM], *, max_waiting: int = 0, max_waiting_tokens: int = 0, observer: Observer | None = None
    ) -> None:
        self.is_draining = self._is_closed = False
        self.error: str | None = None
        """Why the step thread ended, where it did on its own."""
        self._make = make
        self._max_waiting, self._max_waiting_tokens = max_waiting, max_waiting_tokens
        self._observer = observer
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[str, tuple[Call, int]] = {}
        self._num_expected = 0
        self._asked: set[Future[Any]] = set()
        self._llm: LLM | None = None
        self._ended = asyncio.Event()
        self._queue_seconds = 0.0
        self._thread = threading.Thread(target=self._main, name="octavo-steps", daemon=True)
        self._loaded: Future[LLM] = Future()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._llm is not None and not self.is_draining and self.error is None

    @property
    def llm(self) -> LLM:
        """Raises UnavailableError until it is loaded."""
        if self._llm is None:
            raise UnavailableError("the model is being loaded")
        return self._llm

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    async def start(self) -> LLM:
        """Load the model and begin. Raises what loading raises."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        llm = await asyncio.wrap_future(self._loaded)
        llm.engine.stop = lambda sequence, text: self._commands.put(lambda: llm.engine.scheduler.stop(sequence, text))
        self._llm = llm
        return llm

    @contextlib.contextmanager
    def expected(self, requests: int) -> Iterator[None]:
        """While so many are being encoded they count as waiting. Raises OverloadedError, UnavailableError."""
        self.require_ready()
        self._require_room(requests, 0)
        self._num_expected += requests
        try:
            yield
        finally:
            self._num_expected -= requests
            self._ended.set()

    def add(self, wanted: Sequence[tuple[str | None, list[int], SamplingParams, str]], arrival: float | None = None) -> Call:
        """Queue requests, all or none: texts, ids and parameters that `Engine.encode` and `check` have passed, and request ids.

        arrival: when they came, by the engine's clock. Raises InvalidValueError for an id that is in use, OverloadedError,
        UnavailableError.
        """
        self.require_ready()
        ids = [request_id for *_, request_id in wanted]
        for request_id in ids:
            if request_id in self._live or ids.count(request_id) > 1:
                raise InvalidValueError(f"request_id: {shown(request_id)} is in use by a live request")
        self._require_room(len(wanted), sum(len(token_ids) for _, token_ids, _, _ in wanted))
        engine = self.llm.engine
        call = Call([engine.open(*one, arrival) for one in wanted])
        self._live.update((request_id, (call, place)) for place, request_id in enumerate(ids))
        self._commands.put(lambda: self._begin(engine, call))
        return call

    def abort(self, request_id: str) -> bool:
        """End a request; its last output then has the finish reason `abort`. False where no such request is live."""
        if request_id not in self._live:
            return False
        engine = self.llm.engine

        def run() -> None:
            engine.abort(request_id)

        self._commands.put(run)
        return True

    def forget(self, call: Call) -> None:
        """End what has not ended of a call that nobody reads any more."""
        for place, request in enumerate(call.requests):
            if self._live.get(request.request_id, (None, 0))[0] is call:
                self.abort(request.request_id)
                del self._live[request.request_id]
                output = self.llm.engine.close(request.request_id)
                if output is not None:
                    self._note_end(call, place, output)

    async def call(self, work: Callable[[Engine], Result]) -> Result:
        """Run something on the step thread, between two steps. Raises what it raises, and UnavailableError."""
        if self.error is not None:
            raise UnavailableError(f"the engine has stopped: {self.error}")
        if self._is_closed:
            raise UnavailableError("the engine is closed")
        engine = self.llm.engine
        done: Future[Result] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():  # who asked has gone
                return
            try:
                done.set_result(work(engine))
            except BaseException as error:
                done.set_exception(error)

        self._asked.add(done)
        self._commands.put(run)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._asked.discard(done)

    def require_ready(self) -> None:
        """Raises UnavailableError where requests are not taken."""
        if self.is_draining:
            raise UnavailableError("the server is shutting down")
        if self.error is not None:
            raise UnavailableError(f"the engine has stopped: {self.error}")
        assert self.llm is not None

    async def drain(self, seconds: float) -> None:
        """Take no more requests, wait for those that run, and abort what is left after so long."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._live or self._num_expected:
                    self._ended.clear()
                    await self._ended.wait()
        for request_id in self._live:
            self.abort(request_id)

    async def close(self) -> None:
        """End the step thread and free the model."""
        self.is_draining = self._is_closed = True
        self._commands.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._refuse_asked("the engine is closed")

    def _require_room(self, requests: int, tokens: int) -> None:
        ahead = [call.requests[place] for call, place in self._live.values()]
        waiting = [request for request in ahead if request.sequences[0].num_cached is None]
        retry_after = min(60, max(1, round(self._queue_seconds)))
        num_waiting = len(waiting) + self._num_expected
        # What is more than may wait by itself is let in when nothing waits: later it would not be less.
        if self._max_waiting and num_waiting and num_waiting + requests > self._max_waiting:
            raise OverloadedError(f"{num_waiting} requests wait already; {self._max_waiting} may", retry_after)
        waiting_tokens = sum(len(request.prompt_token_ids) for request in waiting)
        if self._max_waiting_tokens and waiting_tokens and waiting_tokens + tokens > self._max_waiting_tokens:
            raise OverloadedError(f"{waiting_tokens} prompt tokens wait already; {self._max_waiting_tokens} may", retry_after)

    # On the step thread

    def _main(self) -> None:
        try:
            llm = self._make()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(llm)
        with llm:
            try:
                self._steps(llm.engine)
            except BaseException as error:
                self._loop.call_soon_threadsafe(self._stopped, described(error))
                raise

    def _steps(self, engine: Engine) -> None:
        rested = True
        while True:
            while (command := self._next_command(engine.has_work, rested)) is not _NOTHING:
                if command is None:
                    return
                command()
                rested = False
            if engine.has_work:
                if changes := engine.advance():
                    self._loop.call_soon_threadsafe(self._deliver, changes)
            else:
                engine.rest()
                rested = True

    def _next_command(self, has_work: bool, rested: bool) -> Callable[[], None] | None:
        """The next one; without work, waits for it, or until it is time to rest."""
        try:
            return self._commands.get(block=not has_work, timeout=None if rested else IDLE_SECONDS)
        except queue.Empty:
            return _NOTHING

    def _begin(self, engine: Engine, call: Call) -> None:
        try:
            for request in call.requests:
                engine.scheduler.add(request)
        except Exception as error:  # `open` has refused what can be refused
            for request in call.requests:
                engine.abort(request.request_id)
            self._loop.call_soon_threadsafe(self._failed, call, described(error))

    # On the event loop's thread

    def _deliver(self, changes: list[Change]) -> None:
        now, live = time.monotonic(), self._live
        for change in changes:
            request = change.sequence.request
            call, place = live.get(request.request_id, (None, 0))
            if change.token_ids and call is not None and call.requests[place] is request:
                count = len(change.token_ids)
                gap = call.took(place, change.sequence.choice, count, now)
                if gap and self._observer is not None:
                    self._observer.tokens(gap, count)
        for output in self.llm.engine.deliver(changes):
            call, place = live[output.request_id]
            call.put(place, output)
            if output.finished:
                del live[output.request_id]
                self._note_end(call, place, output)

    def _note_end(self, call: Call, place: int, output: RequestOutput) -> None:
        self._ended.set()
        admitted = next((event.time for event in output.metrics.events if event.kind == "admitted"), None)
        if admitted is not None:
            self._queue_seconds += 0.1 * (admitted - output.metrics.arrival - self._queue_seconds)
        if self._observer is not None:
            self._observer.ended(output, call.num_generated[place])

    def _failed(self, call: Call, error: str) -> None:
        self.forget(call)
        call.fail(error)

    def _stopped(self, error: str) -> None:
        self.error = error
        live, self._live = self._live, {}
        for call, _ in live.values():
            call.fail(f"the engine has stopped: {error}")
        self._refuse_asked(f"the engine has stopped: {error}")
        self._ended.set()

    def _refuse_asked(self, why: str) -> None:
        for done in list(self._asked):
            with contextlib.suppress(InvalidStateError):  # it is done, or was left
                done.set_exception(UnavailableError(why))


def _NOTHING() -> None:  # noqa: N802
    """Stands for no command."""
