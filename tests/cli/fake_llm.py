"""An engine without a model: it answers every prompt with the same words, and misbehaves where the prompt says so."""

import signal
from types import SimpleNamespace
from typing import ClassVar

from octavo.core.scheduler import Scheduler
from octavo.errors import ChatTemplateError, PromptTooLongError
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

WORDS = ["Four", " score", "\nand", " séven"]


class FakeLLM:
    capacity = "no memory at all"
    made: ClassVar[list["FakeLLM"]] = []
    cached = 0
    ceiling = 64
    recommended: ClassVar[dict] = {}

    def __init__(self, model, config, on_tensor):
        self.model, self.config = str(model), config
        on_tensor(1, 1)
        self.prompts, self.params, self.chats, self.ended = [], [], [], []
        self.closed = False
        self.tokenizer = SimpleNamespace(encode_chat=self._encode_chat)
        FakeLLM.made.append(self)

    def _encode_chat(self, messages):
        if messages[-1]["content"] == "untemplated":
            raise ChatTemplateError("the model has no chat template")
        self.chats.append(messages)
        return list(range(len(messages)))

    def stream(self, prompt, params):
        self.prompts.append(prompt)
        self.params.append(params)
        text = prompt if isinstance(prompt, str) else self.chats[-1][-1]["content"]
        if text == "long":
            raise PromptTooLongError("the prompt has 9000 tokens, and the context holds 2048")
        if text == "crash":
            raise RuntimeError("a fault")
        if text == "interrupt early":
            signal.raise_signal(signal.SIGINT)
        limit = params.max_tokens or len(WORDS)
        try:
            for count in range(1, min(limit, len(WORDS)) + 1):
                finish = "length" if count == limit else "stop" if count == len(WORDS) else None
                if text == "fail" and count == 2:
                    finish = "error"
                yield self._output(prompt, params, count, finish)
                if finish == "error":
                    return
                if text in ("interrupt", "interrupt twice"):
                    signal.raise_signal(signal.SIGINT)
                    if text == "interrupt twice":
                        signal.raise_signal(signal.SIGINT)
        finally:
            self.ended.append(text)

    def generate(self, prompts, params, on_progress=None):
        outputs = []
        for prompt in prompts:
            *_, last = self.stream(prompt, params)
            outputs.append(last)
            if on_progress:
                on_progress(last)
        return outputs

    def _output(self, prompt, params, count, finish):
        """Each answer begins with one word less than the one before; where one fails it is the last."""
        answers = [
            CompletionOutput(choice, "".join(WORDS[choice:count]), list(range(choice, count)), finish, delta=WORDS[count - 1])
            for choice in range(params.n)
        ]
        if finish == "error":
            answers[-1].error = "a NaN"
            for answer in answers[:-1]:
                answer.finish_reason = "stop"
        token_ids = [7] * len(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        return RequestOutput(
            request_id=str(len(self.prompts)),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            outputs=answers,
            finished=finish is not None,
            metrics=RequestMetrics(arrival=1.0, first_token=1.25, finished=2.0),
            num_cached_tokens=self.cached,
            prompt_logprobs=None if params.prompt_logprobs is None else [None, *[{7: Logprob(-0.5, 2, " a")}] * (len(token_ids) - 1)],
        )

    def stats(self):
        blocks = SimpleNamespace(total=64, used=0, peak_used=3, ceiling=self.ceiling)
        return SimpleNamespace(blocks=blocks, steps=40, seconds={"check": 0.1, "step": 0.4})

    def record(self):
        return Scheduler(num_blocks=8).record(longest=128, stats=Scheduler(num_blocks=8).stats())

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
