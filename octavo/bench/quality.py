"""What an arithmetic costs in quality: perplexity, and the divergence of its logits from those of float32 on the same weights.

    python -m octavo.bench.quality [MODEL] [--tokens N] [--data FOLDER] [--variant NAME=SETTING:VALUE,...] [--json FILE]

The text is cut into windows that the model sees from their first token, half of them Shakespeare, half worked sums (GSM8K). Every variant
scores a window in chunks of CHUNK tokens; in the first windows also in chunks of 8 and token by token, where each kernel for few rows
has its turn: those logits must have the same bits, and the report says whether they have.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.traces import DATA_VARIABLE, DEFAULT_FOLDER
from octavo.config import EngineConfig, parse_flag

if TYPE_CHECKING:
    from torch import Tensor

WINDOW = 512
CHUNK = 512
SMALL_CHUNKS = (1, 8)
SMALL_WINDOWS = 2
"""Windows that are scored in small chunks too."""

FILES = ("shakespeare/tinyshakespeare_600k.txt", "gsm8k/test.jsonl")

REFERENCE = {"dtype": "float32", "quantization": "none"}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, int8 KV": {"kv_cache_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "bfloat16, int8 KV": {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4, int8 KV": {"quantization": "int4", "kv_cache_dtype": "int8"},
}


@dataclass
class Quality:
    """One variant against the reference. divergence: mean KL of reference to variant, nats a token. agreement: the likeliest token's."""

    name: str
    settings: dict[str, Any]
    tokens: int = 0
    nats: float = 0.0
    divergence: float = 0.0
    agreed: int = 0
    same_bits: bool = True
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)

    def as_dict(self, reference: Quality) -> dict[str, Any]:
        return {
            **asdict(self),
            "perplexity": self.perplexity,
            "perplexity_change_percent": 100 * (self.perplexity / reference.perplexity - 1),
            "divergence": self.divergence / self.tokens,
            "agreement_percent": 100 * self.agreed / self.tokens,
        }


class Scorer:
    """A model that tells the logits after every token of a window."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        from octavo.loading import open_checkpoint
        from octavo.loading.hub import resolve
        from octavo.worker.runner import Runner

        checkpoint = open_checkpoint(resolve(model))
        # A pool for one sequence, of which nothing is given back.
        sizes = {"max_model_len": WINDOW, "max_batch_size": 1, "prefill_chunk_size": None, "prealloc_blocks": WINDOW}
        try:
            self._runner = Runner(checkpoint, EngineConfig.create(None, **settings, **sizes))
        finally:
            checkpoint.close()

    def logits(self, token_ids: list[int], chunk: int) -> Tensor:
        """[len(token_ids), vocab_size] in float32."""
        import torch

        from octavo.plan import Assignment, Row, StepPlan, TableUpdate
        from octavo.sampling_params import SamplingParams

        capacity = self._runner.capacity
        blocks = capacity.num_blocks // len(capacity.windows)
        tables = [TableUpdate(0, list(range(group * blocks, (group + 1) * blocks))) for group in range(len(capacity.windows))]
        found = []
        for start in range(0, len(token_ids), chunk):
            count = min(chunk, len(token_ids) - start)
            row = Row(slot=0, start=start, count=count, num_logits=count, tables=[] if start else tables)
            if start == 0:
                row.assign = Assignment(params=SamplingParams(), seed=0, history=token_ids, prompt_length=len(token_ids), choice=0)
            self._runner.prepare(StepPlan(step=0, pool_blocks=capacity.num_blocks, released=[], copies=[], rows=[row]))
            with torch.inference_mode():
                found.append(self._runner.model.logits(self._runner.forward([row])).float())
        return torch.cat(found)


def windows(model: str, count: int, folder: Path) -> list[list[int]]:
    """Token ids of the texts, in turn one window of each."""
    from octavo.loading import open_checkpoint
    from octavo.loading.hub import resolve
    from octavo.text.tokenizer import Tokenizer

    checkpoint = open_checkpoint(resolve(model))
    tokenizer = Tokenizer.from_folder(checkpoint.path) if checkpoint.metadata is None else Tokenizer.from_gguf(checkpoint.metadata)
    checkpoint.close()
    texts = []
    for file in FILES:
        text = (folder / file).read_text(encoding="utf-8")
        if file.endswith(".jsonl"):
            text = "\n\n".join(f"{each['question']}\n{each['answer']}" for each in map(json.loads, text.splitlines()))
        ids = tokenizer.encode(text[: count * WINDOW * 8 // len(FILES)])
        texts.append([ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW, WINDOW)])
    return [window for pair in zip(*texts, strict=False) for window in pair][:count]


def compare(quality: Quality, logits: Tensor, reference: Tensor, token_ids: list[int]) -> None:
    """Add a window's figures."""
    import torch

    began, found, wanted = len(token_ids) - 1, logits.log_softmax(-1)[:-1], reference.log_softmax(-1)[:-1]
    asked = torch.tensor(token_ids[1:])[:, None]
    quality.tokens += began
    quality.nats -= float(found.gather(-1, asked).double().sum())
    quality.divergence += float((wanted.exp() * (wanted - found)).double().sum())
    quality.agreed += int((found.argmax(-1) == wanted.argmax(-1)).sum())


def measure(
    model: str, variants: dict[str, dict[str, Any]], tokens: int, folder: Path, small_windows: int = SMALL_WINDOWS
) -> list[Quality]:
    """The reference first, then every variant, over the same windows."""
    import torch

    texts = windows(model, -(-tokens // WINDOW), folder)
    reference = Scorer(model, REFERENCE)
    scorers = {name: Scorer(model, settings) for name, settings in variants.items()}
    found = [Quality("float32", REFERENCE), *(Quality(name, settings) for name, settings in variants.items())]
    with torch.inference_mode():
        for number, window in enumerate(texts):
            wanted = reference.logits(window, CHUNK)
            compare(found[0], wanted, wanted, window)
            for quality, scorer in zip(found[1:], scorers.values(), strict=True):
                began = time.perf_counter()
                logits = scorer.logits(window, CHUNK)
                quality.seconds += time.perf_counter() - began
                compare(quality, logits, wanted, window)
                if number < small_windows:
                    quality.same_bits &= all(torch.equal(scorer.logits(window, chunk), logits) for chunk in SMALL_CHUNKS)
    return found


def _settings(text: str) -> dict[str, Any]:
    pairs = [pair.partition(":") for pair in text.split(",") if pair]
    return {key: parse_flag(key, value) for key, _, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--data", default=os.environ.get(DATA_VARIABLE) or str(DEFAULT_FOLDER))
    parser.add_argument("--variant", action="append", metavar="NAME=SETTING:VALUE,...", help="instead of the usual ones")
    parser.add_argument("--small-windows", type=int, default=SMALL_WINDOWS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    variants = VARIANTS
    if asked.variant:
        split = [each.partition("=") for each in asked.variant]
        variants = {name: _settings(text) for name, _, text in split}
    found = measure(asked.model, variants, asked.tokens, Path(asked.data), asked.small_windows)
    lines = [quality.as_dict(found[0]) for quality in found]
    print(f"{asked.model}, {found[0].tokens} tokens in windows of {WINDOW}; float32 perplexity {found[0].perplexity:.4f}")
    print(f"{'':24} perplexity       KL   top-1  same bits at 1, 8 and {CHUNK}")
    for line in lines[1:]:
        print(
            f"{line['name']:24} {line['perplexity_change_percent']:+9.3f}%  {line['divergence']:.5f}  {line['agreement_percent']:5.2f}%"
            f"  {'yes' if line['same_bits'] else 'NO'}"
        )
    if asked.json:
        asked.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
