"""The native matrix products, timed beside torch's: `python -m octavo.bench.products [--threads N] [--isa NAME]`.

Each product runs over copies of its weight in turn, as a model does over its layers, so that none finds it in the nearer caches. All
that stands in one row of the table was timed in alternation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from octavo import _native
from octavo.bench import machine
from octavo.ops.cpu import CpuOps
from octavo.quantization import GROUP, Grouped

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (3072, 1024)]
ROWS = [1, 8, 64, 512]
KINDS = ["float32", "bfloat16", "8-bit", "4-bit"]
FOOTPRINT = 64 << 20
REPEATS = 7
SECONDS = 0.01
"""What one timing takes at least."""


def random_weight(kind: str, outputs: int, inputs: int) -> Tensor | Grouped:
    if kind in ("float32", "bfloat16"):
        return torch.randn(outputs, inputs).to(getattr(torch, kind))
    bits = int(kind[0])
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // GROUP).half().float()
    return Grouped(bits, codes, scales, minimums=-scales) if bits == 4 else Grouped(bits, codes, scales, zero=128)


def seconds_each(calls: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """The median of alternating timings of each call, which takes the number of its repetition."""
    counts, taken = {}, {name: [] for name in calls}  # type: dict[str, int], dict[str, list[float]]
    for name, call in calls.items():
        call(0)
        began = time.perf_counter()
        call(1)
        counts[name] = max(1, int(SECONDS / (time.perf_counter() - began)))
    for _ in range(REPEATS):
        for name, call in calls.items():
            began = time.perf_counter()
            for number in range(counts[name]):
                call(number)
            taken[name].append((time.perf_counter() - began) / counts[name])
    return {name: statistics.median(times) for name, times in taken.items()}


def calls_of(kind: str, products: CpuOps, x: Tensor, outputs: int) -> tuple[Callable[[int], object], int]:
    """A product over copies of a weight, and the bytes of one copy."""
    weight = random_weight("bfloat16" if kind == "torch" else kind, outputs, x.shape[1])
    if kind == "torch":
        assert isinstance(weight, Tensor)
        copies = [weight.clone() for _ in range(max(2, FOOTPRINT // weight.nbytes))]
        return lambda number: F.linear(x, copies[number % len(copies)]), weight.nbytes
    matrix = products.matrix(weight)
    matrices = [matrix, *(products.matrix(weight) for _ in range(1, max(2, FOOTPRINT // matrix.nbytes)))]
    return lambda number: products.linear(x, matrices[number % len(matrices)]), matrix.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", default=_native.instruction_sets()[0], choices=_native.instruction_sets())
    parser.add_argument("--kinds", nargs="*", default=["torch", *KINDS])
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--shapes", nargs="*", default=[f"{outputs}x{inputs}" for outputs, inputs in SHAPES])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    products = CpuOps(torch.device("cpu"), options.isa)
    print(f"{options.isa}, {options.threads} threads; a plain read loop: {machine.measure().read_bandwidth / 1e9:.1f} GB/s")
    print("GB/s of weights, and 10^9 operations/s; torch is F.linear in bfloat16")
    print(f"{'outputs x inputs':>16}{'rows':>6}" + "".join(f"{kind:>18}" for kind in options.kinds))
    with torch.inference_mode():
        for shape in options.shapes:
            outputs, inputs = (int(size) for size in shape.split("x"))
            for rows in options.rows:
                x = torch.randn(rows, inputs).bfloat16()
                made = {kind: calls_of(kind, products, x, outputs) for kind in options.kinds}
                seconds = seconds_each({kind: call for kind, (call, _) in made.items()})
                figures = [
                    (made[kind][1] / seconds[kind] / 1e9, 2 * rows * outputs * inputs / seconds[kind] / 1e9) for kind in options.kinds
                ]
                print(f"{shape:>16}{rows:>6}" + "".join(f"{rate:>9.1f}{operations:>9.0f}" for rate, operations in figures), flush=True)


if __name__ == "__main__":
    main()
