"""The compiled kernels of octavo/csrc. Tensors are given by address, strides in elements; the caller keeps them alive."""

import numpy as np
from numpy.typing import NDArray

def instruction_sets() -> list[str]:
    """Names that Backend takes on this processor, fastest first."""

class AttentionPlan:
    """Who attends to what in one step, for all layers with one window (0: no window).

    counts, starts, table_lengths: [rows]. tables: the rows' block tables one after another. slots: the address of int64 [tokens].
    Raises IndexError where a row needs a block that its table, or the region, lacks.
    """

    def __init__(
        self,
        counts: NDArray[np.int64],
        starts: NDArray[np.int64],
        table_lengths: NDArray[np.int64],
        tables: NDArray[np.int64],
        slots: int,
        tokens: int,
        *,
        window: int,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        dim: int,
        group: int,
        element: int,
        head_bytes: int,
    ) -> None:
        """element: 0 float32, 1 bfloat16, 2 int8. head_bytes: keys, or values, of one head of a block."""

class Matrix:
    """A weight [outputs, inputs], copied into the layout of the products."""

    @staticmethod
    def dense(weight: int, outputs: int, inputs: int, stride: int, bfloat16: bool, /) -> Matrix: ...
    @staticmethod
    def grouped(bits: int, codes: int, scales: int, minimums: int, zero: int, outputs: int, inputs: int, /) -> Matrix:
        """codes: uint8 [outputs, inputs]. scales, minimums (or 0): float16 [outputs, groups of 32 inputs]. Raises ValueError."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...

class Recording:
    """The calls of one forward pass. Addresses and sizes stay as they were when it was made."""

    def __init__(self) -> None: ...
    def run(self, plans: list[AttentionPlan]) -> None:
        """Make the calls again. plans: as many as were seen, in the order in which they came. Raises ValueError, IndexError."""

class Backend:
    """The kernels of one instruction set; see octavo.ops.interface.Ops. Raises ValueError for one that is not here."""

    def __init__(self, name: str, /) -> None: ...
    @property
    def name(self) -> str: ...
    def record(self, into: Recording | None) -> None:
        """Add the calls that follow to a recording, until it is None."""

    def paged_attention(
        self,
        plan: AttentionPlan,
        query: int,
        query_stride: int,
        key: int,
        key_stride: int,
        value: int,
        value_stride: int,
        cos: int,
        sin: int,
        half: int,
        out: int,
        bfloat16: bool,
        region: int,
        layer: int,
        scale: float,
        softcap: float,
        /,
    ) -> None:
        """softcap: 0 for none."""

    def rms_norm(
        self,
        x: int,
        x_stride: int,
        residual: int,
        weight: int,
        out: int,
        total: int,
        bfloat16: bool,
        weight_bfloat16: bool,
        tokens: int,
        heads: int,
        size: int,
        eps: float,
        multiplier: float,
        /,
    ) -> None:
        """weight, out: 0 where the sum alone is wanted."""

    def activate_and_mul(self, gate_up: int, stride: int, out: int, bfloat16: bool, activation: int, tokens: int, size: int, /) -> None:
        """activation: 0 SiLU, 1 GELU by tanh."""

    def linear(
        self, matrix: Matrix, x: int, x_stride: int, x_bfloat16: bool, rows: int, bias: int, out: int, out_bfloat16: bool, /
    ) -> None: ...
    def route(self, logits: int, stride: int, tokens: int, size: int, count: int, over_chosen: bool, places: int, weights: int, /) -> None:
        """places: int64 [tokens, count]. weights: float32 [tokens, count]. Raises ValueError where count is none of 1 to size."""

    def experts(
        self,
        gate_up: list[Matrix],
        down: list[Matrix],
        x: int,
        x_stride: int,
        bfloat16: bool,
        tokens: int,
        choices: int,
        weights: int,
        count: int,
        activation: int,
        out: int,
        /,
    ) -> None:
        """choices: int64 [tokens, count]. Raises IndexError for one that is no expert, ValueError where shapes do not fit together."""

    def embedding(self, matrix: Matrix, ids: int, tokens: int, out: int, out_bfloat16: bool, scale: float, /) -> None:
        """Raises IndexError for an id that the matrix does not have."""

    def softcap(self, x: int, stride: int, rows: int, size: int, cap: float, /) -> None:
        """In place."""

    def mask(self, x: int, stride: int, size: int, rows: int, bits: int, words: int, count: int, /) -> None: ...
    def argmax(self, x: int, stride: int, rows: int, size: int, peaks: int, places: int, /) -> None: ...
    def score(
        self, x: int, stride: int, rows: int, size: int, token_ids: int, count: int, logprobs: int, ids: int, ranks: int, /
    ) -> None: ...
    def sample(
        self,
        x: int,
        stride: int,
        rows: int,
        size: int,
        peaks: int,
        temperature: int,
        min_p: int,
        top_k: int,
        top_p: int,
        uniform: int,
        places: int,
        /,
    ) -> None: ...
