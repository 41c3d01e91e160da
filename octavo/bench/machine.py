"""The machine under a benchmark, and what it reaches when it does one simple thing: the ceilings that figures are held against."""

from __future__ import annotations

import importlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.worker.memory import available_memory, available_processors

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.loading.checkpoint import Checkpoint

FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""Of a processor's flags those that matrix products use."""

READ_BYTES = 1 << 30
"""Well beyond a cache, where memory allows."""

ROWS, WIDTH = 512, 2048
REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """instruction_set: the native kernels' first choice here, "" without them. memory: bytes of the machine."""

    processor: str
    processors: int
    features: list[str]
    instruction_set: str
    memory: int
    system: str
    python: str
    torch: str
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.processors} processors ({' '.join(self.features)}), {self.memory / 2**30:.1f} GiB; {self.system}, "
            f"torch {self.torch} with {self.threads} threads, kernels for {self.instruction_set or 'no processor, plain torch'}"
        )


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What one simple loop reaches on the threads that the engine uses, the best of several rounds.

    read_bandwidth: bytes a second. product_rate: operations a second, two for a multiplication and its addition.
    """

    read_bandwidth: float
    read_how: str
    product_rate: float
    product_how: str


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What a step must read and multiply at least.

    weight_bytes: of what the loaded model holds, less an embedding that is only looked up. body_parameters: of the matrices that
    every token goes through. head_parameters: of the output head, for tokens that are sampled from.
    """

    weight_bytes: int
    body_parameters: int
    head_parameters: int


def describe() -> Machine:
    """After an engine is loaded, for it decides the number of threads."""
    import torch

    text = _read("/proc/cpuinfo")
    flags = set((_field(text, "flags") or _field(text, "Features")).split())
    try:
        kernels = importlib.import_module("octavo._native").instruction_sets()
    except (ImportError, AttributeError):
        kernels = []
    return Machine(
        processor=_field(text, "model name") or platform.processor() or platform.machine(),
        processors=available_processors(),
        features=[name for name in FEATURES if name in flags],
        instruction_set=kernels[0] if kernels else "",
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
    )


def measure(read_bytes: int = READ_BYTES, rows: int = ROWS, width: int = WIDTH) -> Ceilings:
    """Read a buffer, and multiply bfloat16 matrices, both through torch on all its threads.

    Reading is torch.sum of 64-bit integers or torch.dot of 32-bit floats, whichever is faster; both add less than they read. A loop in C
    may read somewhat more, so shares of this ceiling may pass 1.
    """
    import torch

    count = min(read_bytes, available_memory() // 4) // 8
    with torch.inference_mode():
        numbers = torch.ones(2 * count, dtype=torch.float32)
        integers = numbers.view(torch.int64)
        reads = {"torch.sum of int64": _best(integers.sum), "torch.dot of float32": _best(lambda: torch.dot(numbers, numbers))}
        how = min(reads, key=lambda name: reads[name])
        bandwidth = count * 8 / reads[how]
        inputs, weights = (torch.randn(size, width).bfloat16() for size in (rows, width))
        seconds = _best(lambda: torch.nn.functional.linear(inputs, weights))
    return Ceilings(
        read_bandwidth=bandwidth,
        read_how=f"{how}, {count * 8 / 2**20:.0f} MiB",
        product_rate=2 * rows * width * width / seconds,
        product_how=f"torch linear in bfloat16, {rows} rows of {width} by {width}",
    )


def model_size(llm: LLM, checkpoint: Checkpoint) -> ModelSize:
    """From the checkpoint's shapes, and the memory of the model that was loaded from it."""
    matrices = {name: shape[0] * shape[1] for name in checkpoint.names() if len(shape := checkpoint.shape(name)) == 2}
    embedding = sum(count for name, count in matrices.items() if name.endswith("embed_tokens.weight"))
    head = sum(count for name, count in matrices.items() if name.endswith("lm_head.weight"))
    is_tied = not head or bool(checkpoint.config.get("tie_word_embeddings"))
    body = sum(matrices.values()) - embedding - head
    looked_up = 0 if is_tied else embedding
    return ModelSize(
        weight_bytes=round(llm.capacity.weight_bytes * (1 - looked_up / max(1, body + head + embedding))),
        body_parameters=body,
        head_parameters=head or embedding,
    )


def _best(work: Callable[[], Any]) -> float:
    """Seconds, after one round that prepares."""
    work()
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _field(text: str, name: str) -> str:
    """The first value of that name in a text of `name : value` lines."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
