"""An engine over the simulated executor, its books audited after every step, and what it is made to say."""

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.executor.simulated import SimulatedClock, SimulatedExecutor, simulated_capacity
from octavo.sampling_params import SamplingParams

TEXT = "Grüße aus 東京, ça va? 🙂 Ende."


class ByteTokenizer:
    """One token a byte; 256 is a special token, 257 stands for two characters."""

    special_ids = frozenset([256])
    strips_leading_space = False
    bos_token_id = None
    vocab_size = 258

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def token_bytes(self, token_id):
        return {256: b"<end>", 257: b"ok"}.get(token_id) or bytes([token_id])

    def decode(self, token_ids, skip_special_tokens=True, continuation=False):
        kept = [token_id for token_id in token_ids if not (skip_special_tokens and token_id in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


def speak(text=TEXT, end=256):
    """Tokens that spell a text, whatever was asked, and then an end."""
    ids = [*text.encode(), end]
    return lambda assignment, tokens: ids[(len(tokens) - assignment.prompt_length) % len(ids)]


FAULTS = ("row_error", "step_error", "seconds_per_step", "seconds_per_token", "commit_limit", "commits_per_step")
POOL = ("committed_blocks", "prealloc_blocks", "swap_blocks", "block_bytes", "longest")


def make_engine(next_token=None, *, num_blocks=64, eos=(256,), clock=None, block_size=4, **values):
    faults = {name: values.pop(name) for name in FAULTS if name in values}
    pool = {name: values.pop(name) for name in POOL if name in values}
    clock = clock or SimulatedClock()
    capacity = simulated_capacity(num_blocks, block_size, vocab_size=258, **pool)
    executor = SimulatedExecutor(capacity, next_token=next_token, clock=clock, **faults)
    config = EngineConfig.create(**{"block_size": block_size, "check_invariants": True, **values})
    return Engine(config, executor, ByteTokenizer(), eos_token_ids=frozenset(eos), clock=clock)


def run(engine, limit=5000):
    """Step until idle -> the last output of each request, and its first answer's deltas."""
    last, deltas, ended = {}, {}, set()
    for _ in range(limit):
        if not engine.has_work:
            break
        for output in engine.step():
            assert output.request_id not in ended
            ended |= {output.request_id} if output.finished else set()
            assert output.finished == all(one.finish_reason is not None for one in output.outputs)
            deltas.setdefault(output.request_id, []).append(output.read().delta)
            last[output.request_id] = output
    assert not engine.has_work
    assert ended == set(last)
    check_idle(engine)
    return last, deltas


def check_idle(engine):
    assert not engine.executor.breaches
    engine.scheduler.check()
    blocks = engine.stats().blocks
    assert (blocks.used, blocks.swap_used) == (0, 0)
    assert blocks.free + blocks.cached == blocks.total


def answer(engine, prompt="Hi", **params):
    request_id = engine.add(prompt, SamplingParams(**{"max_tokens": 100, **params}))
    return run(engine)[0][request_id].outputs[0]
