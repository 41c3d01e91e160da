"""The sole language between mind and hands: what one step computes, and what came of it.

The scheduler writes a `StepPlan`, an executor answers with a `StepResult`. Both are plain data, encodable with msgspec, so
that a worker may live in another process or on another machine. Plans execute in the order of `step`; at most two are in
flight. Nothing here knows what a block or a token is *for*.
"""

from __future__ import annotations

import enum

import msgspec

from octavo.sampling_params import SamplingParams

MAX_IN_FLIGHT = 2

HOLE = -1
"""A block-table entry that names no block: it lies behind the window of its group."""


class Tier(enum.IntEnum):
    """Where a block lives."""

    DEVICE = 0
    HOST = 1


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy one block, all layers of whatever group it serves. Copies run in list order, before the forward pass."""

    source_tier: Tier
    source: int
    target_tier: Tier
    target: int


class TableUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Replace a slot's block table of one KV group from entry `start` on; what stood beyond is dropped.

    Entries wholly behind the window of the slot's next token may be holes, or name blocks that are others' by now: nobody is told,
    as nobody reads them any more.
    """

    start: int
    block_ids: list[int]


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Gives a slot to a sequence: at its first row, and again at every resumption.

    history: every known token, prompt first. A worker needs nothing older to continue as if never interrupted.
    prompt_length: how many of them the request came with; output position i is token prompt_length + i.
    choice: which of the request's n answers this is; draws are a function of (params.seed, choice, output position).
    ends: ids that end the output, where something hangs on them: they are not drawn before `min_tokens`, and close a structure.
    bad_words: token ids that must not follow each other.
    fork_source: slot whose per-sequence state is taken over, None for a fresh start.
    """

    params: SamplingParams
    seed: int
    history: list[int]
    prompt_length: int
    choice: int = 0
    adapter: str | None = None
    ends: list[int] = []
    bad_words: list[list[int]] = []
    fork_source: int | None = None


class Row(msgspec.Struct, gc=False):
    """Compute tokens [start, start + count) of the sequence in `slot`, and store their keys and values.

    token_ids: tokens the worker does not hold yet, appended to its history before the row runs.
    pending: how many of the inputs, at the end, are samples of this slot that have not been reported when the plan is written.
    draft_ids: guesses to verify; inputs after the known ones, counted in `count`.
    tables: the change since the slot's last row of each KV group's block table; empty where nothing changes.
    num_logits: positions, at the end of the row, given to the output head: 0 (the row catches up), 1 (it samples),
        drafts + 1 (it verifies), or more, where prompt logprobs are asked: then each of them whose next token is of the
        prompt is scored. A row samples if it ends with the last token known, and then only.

    Not to be written once made, though not frozen: that would make it a third dearer, and there is one for each token.
    """

    slot: int
    start: int
    count: int
    num_logits: int
    tables: list[TableUpdate]
    token_ids: list[int] = []
    pending: int = 0
    draft_ids: list[int] = []
    assign: Assignment | None = None


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `released` slots are given up before any row is read, so a row may assign one of them anew.

    pool_blocks: how many blocks the pool is to have. Where it has fewer, the worker commits more beside its work and reports how far
    it has come; a plan without rows waits for all of them. Where it has more, the tail goes back to the system, before the copies; a device
    that commits everything at start leaves it at that. hurry: whether somebody waits for more blocks; else their coming must not be in
    the way of the work.
    A plan names committed blocks only. Plans without rows compact, grow or shrink the pool, or release slots.
    """

    step: int
    pool_blocks: int
    released: list[int]
    copies: list[BlockCopy]
    rows: list[Row]
    hurry: bool = False


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token's raw log-probability and its rank, 1 the likeliest."""

    token_id: int
    logprob: float
    rank: int


class RowResult(msgspec.Struct, kw_only=True, gc=False):
    """What a row gave: its accepted ids (none while it catches up, one sampled, up to drafts + 1), or an error.

    logprobs: for each accepted id, where asked, itself and then the likeliest ones in order of rank.
    prompt_logprobs: the same for each scored position and the prompt token that follows it.
    An error ends the sequence alone; its keys and values must not be reused.
    """

    slot: int
    token_ids: list[int] = []
    logprobs: list[list[Logprob]] | None = None
    prompt_logprobs: list[list[Logprob]] | None = None
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Rows in plan order. `committed_blocks` is the minimum over ranks; times are seconds of the executor's clock.

    growth_refused: why the pool cannot have the blocks that were asked for, where it cannot; it stays at its size until a plan asks
        for no more than that.
    """

    step: int
    rows: list[RowResult]
    committed_blocks: int
    growth_refused: str | None = None
    forward_seconds: float = 0.0
    copy_seconds: float = 0.0
    copied_bytes: int = 0


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers hold once loaded, the least over all of them.

    windows: of each KV group, positions that a token sees in its layers, None for all. A block serves one group.
    num_blocks: the pool's ceiling, decided by ceiling_by. committed_blocks: those it has now, on the way to prealloc_blocks.
    swap_blocks: those of the host tier.
    longest: tokens of one sequence at most. bound_by: the setting or limit that decides it. weight_bytes: memory of the weights.
    """

    num_blocks: int
    committed_blocks: int
    block_size: int
    block_bytes: int
    longest: int
    bound_by: str
    vocab_size: int
    dtype: str
    device: str
    ceiling_by: str = ""
    prealloc_blocks: int = 0
    swap_blocks: int = 0
    weight_bytes: int = 0
    windows: tuple[int | None, ...] = (None,)

    def __str__(self) -> str:
        most = f"{_mebibytes(self.num_blocks * self.block_bytes)} at most" + (f": {self.ceiling_by}" if self.ceiling_by else "")
        start = _mebibytes(max(self.committed_blocks, self.prealloc_blocks) * self.block_bytes)
        swap = f", {_mebibytes(self.swap_blocks * self.block_bytes)} of swap" if self.swap_blocks else ""
        groups = f" for one of {len(self.windows)} groups of layers" if len(self.windows) > 1 else ""
        return (
            f"{self.dtype} on {self.device}, {self.num_blocks} KV blocks of {self.block_size} tokens{groups} "
            f"({most}; {start} from the start){swap}; a sequence may have {self.longest} tokens ({self.bound_by})"
        )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
