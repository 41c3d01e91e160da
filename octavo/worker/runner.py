"""Executes plans on one device: holds the model, the KV memory and what each slot needs, and nothing about who asked."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo import models, ops
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError, EngineError
from octavo.kv_groups import KVGroups, cut_layers
from octavo.layers.weights import Weights
from octavo.loading.checkpoint import Checkpoint
from octavo.ops.interface import AttentionBatch, BlockShape
from octavo.plan import Capacity, Logprob, Row, RowResult, StepPlan, StepResult, Tier
from octavo.text.grammar import Grammars, LookAhead
from octavo.worker import batch, logprobs, sampler
from octavo.worker.adjustments import Adjustments
from octavo.worker.batch import Slot
from octavo.worker.kv_store import KVStore
from octavo.worker.memory import available_memory, available_processors
from octavo.worker.sampler import Drawn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}

SCORED_AT_ONCE = 32
"""Positions whose logits are held at one time while a prompt is scored."""


class Runner:
    """Loads a model and runs it. All compute happens on the thread that calls, loading included.

    grammars: of the model's vocabulary, for structured output; without them it is refused.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        on_tensor: Callable[[int, int], None] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._grammars = grammars
        self.device = _device(config.model.device)
        threads = _threads(config.model.threads)
        torch.set_num_threads(threads)
        # Beside a model that takes every processor, masks would cost it more time than they take themselves.
        self._looks_ahead = self.device.type != "cpu" or threads < available_processors()
        self._masks: LookAhead | None = None
        model_config, decoder = models.find(checkpoint, config.model.model_impl)
        dtype, kv_dtype = _dtypes(config, checkpoint)
        block_size = self._block_size = config.memory.block_size

        context = model_config.context
        wanted = config.model.max_model_len
        if wanted is not None and wanted > context:
            raise ConfigError(f"max_model_len: {wanted}; allowed: up to the model's context of {context} tokens")
        limits = {"max_model_len" if wanted else "the model's context": wanted or context}
        if kv_dtype == torch.int8 and model_config.head_dim % 4:
            raise ConfigError(
                f"kv_cache_dtype: 'int8'; heads of {model_config.head_dim} features need another, as they are no multiple of 4"
            )
        if config.memory.max_blocks_per_seq != "auto":
            limits["max_blocks_per_seq"] = config.memory.max_blocks_per_seq * block_size
        reach = min(limits.values())

        self._slots: dict[int, Slot] = {}
        self._ops = ops.backend(self.device)
        with torch.inference_mode():
            weights = Weights(checkpoint, dtype, self._ops, config.model.quantization, on_tensor)
            with self._ops.loading():
                self.model = decoder(self._ops, weights, model_config, reach)
            _check_untaken(weights)
            windows, layers = cut_layers(model_config.windows, reach)
            groups = KVGroups(windows, block_size, config.scheduler.prefill_chunk_size)
            shape = BlockShape(
                num_layers=max(map(len, layers)),
                num_kv_heads=model_config.num_kv_heads,
                block_size=block_size,
                head_dim=model_config.head_dim,
                dtype=kv_dtype,
            )
            num_blocks, ceiling_by = _pool_blocks(config, shape.num_bytes, groups, reach, self.device)
            swap_blocks = _swap_blocks(config, shape.num_bytes, num_blocks, self.device)
            self._kv = KVStore(shape, num_blocks, config.memory.prealloc_blocks, self.device, swap_blocks, layers)
        self._num_groups = len(layers)
        limits["the KV pool"] = groups.longest(num_blocks, reach + block_size)
        bound_by = min(limits, key=lambda name: limits[name])
        self.capacity = Capacity(
            num_blocks=num_blocks,
            committed_blocks=self._kv.committed,
            prealloc_blocks=self._kv.prealloc_blocks,
            block_size=block_size,
            block_bytes=shape.num_bytes,
            longest=limits[bound_by],
            bound_by=bound_by,
            ceiling_by=ceiling_by,
            swap_blocks=swap_blocks,
            weight_bytes=weights.num_bytes,
            vocab_size=model_config.vocab_size,
            dtype=str(dtype).removeprefix("torch."),
            device=self.device.type,
            windows=windows,
        )

    def mapping_bytes(self) -> int:
        """Memory of the block tables held here."""
        return sum(slot.mapping_bytes() for slot in self._slots.values())

    def close(self) -> None:
        """Give KV memory back."""
        self._slots.clear()
        self._kv.close()
        if self._masks is not None:
            self._masks.close()

    def execute(self, plan: StepPlan) -> StepResult:
        copy_seconds = self.prepare(plan)
        began = time.perf_counter()
        rows = self._run(plan.rows) if plan.rows else []
        return StepResult(
            step=plan.step,
            rows=rows,
            committed_blocks=self._kv.committed,
            growth_refused=self._kv.growth_refused,
            forward_seconds=time.perf_counter() - began,
            copy_seconds=copy_seconds,
            copied_bytes=len(plan.copies) * self._kv.block_bytes,
        )

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> float:
        """Bring slots and KV memory to the state the plan's rows start from; returns the seconds its copies took."""
        for number in plan.released:
            self._slots.pop(number, None)
        self._kv.resize(plan.pool_blocks, plan.hurry)
        if not plan.rows:
            self._kv.wait()
        began = time.perf_counter()
        self._kv.copy(plan.copies)
        seconds = time.perf_counter() - began if plan.copies else 0.0
        for row in plan.rows:
            if row.assign is not None:
                self._slots[row.slot] = Slot(row.assign, self._num_groups)
            for update in row.tables:
                self._kv.check(Tier.DEVICE, max([0, *update.block_ids]))
            self._slots[row.slot].take(row)
        return seconds

    @torch.inference_mode()
    def forward(self, rows: list[Row]) -> Tensor:
        """Compute prepared rows, storing their keys and values -> the last layer's hidden states [T, hidden_size], in row order."""
        inputs = batch.build(rows, self._slots, self._block_size, self.device)
        return self._ops.run(self.model.forward, inputs.token_ids, inputs.positions, self._kv.layers, inputs.attention)

    @torch.inference_mode()
    def _run(self, rows: list[Row]) -> list[RowResult]:
        if any(row.draft_ids for row in rows):
            raise EngineError("this worker verifies no drafts")
        hidden = self.forward(rows)
        counts = np.array([row.count for row in rows])
        ends = np.cumsum(counts)
        # A sum is finite where its parts are: normalised, they are small.
        finite = np.logical_and.reduceat(np.isfinite(hidden.sum(-1, dtype=torch.float32).cpu().numpy()), ends - counts)
        sampled = self._sample(rows, hidden, ends)
        results = [
            self._result(row, hidden, end, sampled) if sound else self._failed(row)
            for row, end, sound in zip(rows, ends.tolist(), finite.tolist(), strict=True)
        ]
        self._look_ahead(rows)
        return results

    def _sample(self, rows: list[Row], hidden: Tensor, ends: np.ndarray) -> dict[int, Drawn]:
        """The next token of each slot whose row ends with the last one known."""
        places, draws, failed = [], [], {}
        for place, row in enumerate(rows):
            slot = self._slots[row.slot]
            if row.num_logits and row.start + row.count == len(slot.history):
                try:
                    draws.append(sampler.Draw(slot.assignment, slot.history, self._adjustments(slot)))
                    places.append(place)
                except ValueError as error:
                    failed[row.slot] = Drawn(None, error=str(error))
        drawn = sampler.sample(self._ops, self.model.logits(hidden[ends[places] - 1]), draws) if places else []
        return failed | {rows[place].slot: one for place, one in zip(places, drawn, strict=True)}

    def _adjustments(self, slot: Slot) -> Adjustments | None:
        if slot.adjustments is None and Adjustments.are_asked(slot.assignment.params):
            slot.adjustments = Adjustments(slot.assignment, self._grammars)
        return slot.adjustments

    def _look_ahead(self, rows: list[Row]) -> None:
        """Begin the masks of the next step, where something is free to compute them beside it."""
        if not self._looks_ahead:
            return
        matchers = []
        for row in rows:
            slot = self._slots[row.slot]
            if slot.adjustments is not None and slot.adjustments.matcher is not None:
                with contextlib.suppress(ValueError):  # a token that does not fit ends the sequence when it next samples
                    slot.adjustments.follow(slot.history)
                    matchers.append(slot.adjustments.matcher)
        if matchers:
            self._masks = self._masks or LookAhead()
            self._masks.begin(matchers)

    def _result(self, row: Row, hidden: Tensor, end: int, sampled: dict[int, Drawn]) -> RowResult:
        try:
            scores = self._prompt_logprobs(row, hidden, end)
        except FloatingPointError:
            return self._failed(row)
        if row.slot not in sampled:
            return RowResult(slot=row.slot, prompt_logprobs=scores)
        drawn = sampled[row.slot]
        if drawn.token_id is None:
            return self._failed(row, drawn.error)
        self._slots[row.slot].history.append(drawn.token_id)
        own = None if drawn.logprobs is None else [drawn.logprobs]
        return RowResult(slot=row.slot, token_ids=[drawn.token_id], logprobs=own, prompt_logprobs=scores)

    def _prompt_logprobs(self, row: Row, hidden: Tensor, end: int) -> list[list[Logprob]] | None:
        """Scores of those among the row's last `num_logits` positions that a prompt token follows. end: where the row ends in `hidden`."""
        asked, history = self._slots[row.slot].assignment, self._slots[row.slot].history
        stop = row.start + row.count
        first, last = stop - row.num_logits, min(stop, asked.prompt_length - 1)
        if asked.params.prompt_logprobs is None or asked.choice or first >= last:
            return None
        scores: list[list[Logprob]] = []
        for at in range(first, last, SCORED_AT_ONCE):
            until = min(at + SCORED_AT_ONCE, last)
            logits = self.model.logits(hidden[end - stop + at : end - stop + until])
            for line in logprobs.score(self._ops, logits, history[at + 1 : until + 1], asked.params.prompt_logprobs):
                if line is None:
                    raise FloatingPointError("no finite logits")
                scores.append(line)
        return scores

    def _failed(self, row: Row, error: str | None = None) -> RowResult:
        """Zeros take the place of what the row wrote, which must not meet another sequence, not even as a value of weight zero."""
        shape, places = self._kv.shape, np.arange(row.start, row.start + row.count)
        tables = self._slots[row.slot].tables
        targets = [table[places // self._block_size] * self._block_size + places % self._block_size for table in tables]
        slots = torch.from_numpy(np.array(targets)).to(self.device)
        # Nothing else in these blocks may change: a plan in flight may copy them for another answer to the same prompt.
        alone = AttentionBatch([1] * row.count, places.tolist(), [[table] * row.count for table in tables], slots, self._block_size, {})
        zeros = torch.zeros(row.count, shape.num_kv_heads, shape.head_dim, device=self.device)
        angles = torch.zeros(row.count, 0, device=self.device)
        for layer in self._kv.layers:
            self._ops.paged_attention(zeros, zeros, zeros, (angles, angles), layer, alone, 1.0, 1)
        return RowResult(slot=row.slot, error=error or "the model gave no finite logits for this request")


def _threads(wanted: int | str) -> int:
    usable = available_processors()
    if wanted == "auto":
        return usable
    if int(wanted) > usable:  # more would wait for each other at every product
        raise ConfigError(f"threads: {wanted}; allowed: auto, or 1 to {usable}, the processors this process may use")
    return int(wanted)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: 'cuda'; no CUDA device, or no CUDA build of torch, is here")
    return torch.device("cpu" if name == "auto" else name)


def _dtypes(config: EngineConfig, checkpoint: Checkpoint) -> tuple[torch.dtype, torch.dtype]:
    """Of activations, and of the KV cache.

    Activations are bfloat16 where nothing else is asked, save for a checkpoint stored in float32 throughout, and for quantized
    weights: products of integers come out as float32, and rounding them to bfloat16 would cost time and accuracy for nothing.
    The cache is as precise as activations; where weights are quantized, bfloat16 is more precise than they are.
    """
    quantized = _runs_quantized(config.model.quantization, checkpoint)
    if config.model.dtype != "auto":
        dtype = DTYPES[config.model.dtype]
    else:
        stored = {checkpoint.dtype(tensor) for tensor in checkpoint.names() if tensor.endswith("weight")}
        dtype = torch.float32 if quantized or stored == {torch.float32} else torch.bfloat16
    if config.memory.kv_cache_dtype != "auto":
        return dtype, DTYPES[config.memory.kv_cache_dtype]
    return dtype, torch.bfloat16 if quantized else dtype


def _runs_quantized(quantization: str, checkpoint: Checkpoint) -> bool:
    """Whether most of the weights are integers in memory."""
    if quantization != "auto":
        return quantization != "none"
    sizes = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.names()}
    return 2 * sum(size for name, size in sizes.items() if checkpoint.dtype(name) is None) > sum(sizes.values())


def _pool_blocks(config: EngineConfig, block_bytes: int, groups: KVGroups, context: int, device: torch.device) -> tuple[int, str]:
    """The pool's ceiling and what decides it: what was asked, or half of what is free, at most `max_batch_size` full contexts."""
    asked, free = config.memory, available_memory(device.type)
    if asked.max_blocks is not None:
        blocks, ceiling_by = asked.max_blocks, "max_blocks"
        said = f"max_blocks: {asked.max_blocks}"
    elif asked.kv_cache_memory != "auto":
        blocks, ceiling_by = asked.kv_cache_memory // block_bytes, "kv_cache_memory"
        said = f"kv_cache_memory: {asked.kv_cache_memory}"
    else:
        contexts = config.scheduler.max_batch_size
        said = f"kv_cache_memory: auto, of {free} bytes available"
        blocks, ceiling_by = min(
            (free // 2 // block_bytes, f"half of the {free / 2**30:.1f} GiB available"),
            (contexts * groups.most(0, context), f"{contexts} full contexts"),
        )
    least = 2 * len(groups)
    if blocks < least:
        raise ConfigError(f"{said}; a pool needs at least {least} blocks of {block_bytes} bytes")
    if blocks * block_bytes > free:
        raise ConfigError(f"{said}; {blocks} blocks take {blocks * block_bytes} bytes and {free} are available")
    return blocks, ceiling_by


def _swap_blocks(config: EngineConfig, block_bytes: int, pool_blocks: int, device: torch.device) -> int:
    """Blocks of the host tier, which on a CPU shares the pool's memory."""
    size = config.memory.swap_space
    if not size:
        return 0
    if size < block_bytes:
        raise ConfigError(f"swap_space: {size}; allowed: 0, or at least a block of {block_bytes} bytes")
    free = available_memory() - (pool_blocks * block_bytes if device.type == "cpu" else 0)
    if size > free:
        raise ConfigError(f"swap_space: {size}; allowed: up to {free} bytes, what the KV pool at its ceiling leaves of memory")
    return size // block_bytes


def _check_untaken(weights: Weights) -> None:
    """Tensors that no layer took mean that the model here is not the model there."""
    known = ("rotary_emb.inv_freq", "lm_head.weight", "rope_freqs.weight", "position_ids", "attn.bias", "attn.masked_bias")
    strange = [name for name in weights.untaken() if not name.endswith(known)]
    if strange:
        raise CheckpointError(f"the checkpoint holds tensors that this model does not use: {', '.join(strange[:5])}")
