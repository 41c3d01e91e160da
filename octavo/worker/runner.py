"""Executes plans on one device: holds the model, the KV memory and what each slot needs, and nothing about who asked."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from octavo import models, ops
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError, EngineError
from octavo.layers.weights import Weights
from octavo.loading.checkpoint import Checkpoint
from octavo.plan import Capacity, Row, RowResult, StepPlan, StepResult
from octavo.worker import batch, sampler
from octavo.worker.batch import Slot
from octavo.worker.kv_store import BlockShape, KVStore
from octavo.worker.memory import available_memory, available_processors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Runner:
    """Loads a model and runs it. All compute happens on the thread that calls, loading included."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, on_tensor: Callable[[int, int], None] | None = None) -> None:
        self.device = _device(config.model.device)
        torch.set_num_threads(_threads(config.model.threads))
        model_config, decoder = models.find(checkpoint.config)
        dtype = _dtype(config.model.dtype, checkpoint)
        kv_dtype = dtype if config.memory.kv_cache_dtype == "auto" else DTYPES[config.memory.kv_cache_dtype]
        block_size = self._block_size = config.memory.block_size

        context = model_config.rotary.context
        wanted = config.model.max_model_len
        if wanted is not None and wanted > context:
            raise ConfigError(f"max_model_len: {wanted}; allowed: up to the model's context of {context} tokens")
        limits = {"max_model_len" if wanted else "the model's context": wanted or context}
        if config.memory.max_blocks_per_seq != "auto":
            limits["max_blocks_per_seq"] = config.memory.max_blocks_per_seq * block_size
        reach = min(limits.values())

        self._slots: dict[int, Slot] = {}
        with torch.inference_mode():
            weights = Weights(checkpoint, dtype, self.device, on_tensor)
            self._model = decoder(ops.backend(self.device), weights, model_config, reach)
            _check_untaken(weights)
            shape = BlockShape(
                num_layers=model_config.num_layers,
                num_kv_heads=model_config.num_kv_heads,
                block_size=block_size,
                head_dim=model_config.head_dim,
                dtype=kv_dtype,
            )
            num_blocks = _pool_blocks(config, shape.num_bytes, -(-reach // block_size), self.device)
            limits["the KV pool"] = num_blocks * block_size
            self._kv = KVStore(shape, num_blocks, min(config.memory.prealloc_blocks, num_blocks), self.device)
        bound_by = min(limits, key=lambda name: limits[name])
        self.capacity = Capacity(
            num_blocks=num_blocks,
            block_size=block_size,
            kv_bytes=self._kv.num_bytes,
            longest=limits[bound_by],
            bound_by=bound_by,
            vocab_size=model_config.vocab_size,
            dtype=str(dtype).removeprefix("torch."),
            device=self.device.type,
        )

    def mapping_bytes(self) -> int:
        """Memory of the block tables held here."""
        return sum(slot.table.nbytes for slot in self._slots.values())

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        copied = self.prepare(plan)
        prepared = time.perf_counter()
        rows = self._run(plan.rows)
        return StepResult(
            step=plan.step,
            rows=rows,
            committed_blocks=self.capacity.num_blocks,
            forward_seconds=time.perf_counter() - prepared,
            copy_seconds=prepared - began if plan.copies else 0.0,
            copied_bytes=copied,
        )

    def prepare(self, plan: StepPlan) -> int:
        """Bring slots and KV memory to the state the plan's rows start from; returns bytes copied."""
        for number in plan.released:
            self._slots.pop(number, None)
        copied = self._kv.copy(plan.copies)
        for row in plan.rows:
            if row.assign is not None:
                self._slots[row.slot] = Slot(row.assign)
            self._slots[row.slot].take(row)
        return copied

    @torch.inference_mode()
    def forward(self, rows: list[Row]) -> Tensor:
        """Compute prepared rows, storing their keys and values -> logits [sum of num_logits, vocab_size]."""
        inputs = batch.build(rows, self._slots, self._block_size, self.device)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._kv.layers, inputs.attention)
        return self._model.logits(hidden[inputs.logit_rows])

    @torch.inference_mode()
    def _run(self, rows: list[Row]) -> list[RowResult]:
        if any(row.draft_ids or row.num_logits > 1 for row in rows):
            raise EngineError("this worker verifies no drafts and scores no prompts")
        logits = self.forward(rows)
        sampling = [row for row in rows if row.num_logits]
        draws = []
        for row in sampling:
            asked = self._slots[row.slot].assignment
            draws.append(sampler.Draw(asked.params, asked.seed, asked.choice, row.start + row.count - asked.prompt_length))
        token_ids = dict(zip((row.slot for row in sampling), sampler.sample(logits, draws) if sampling else [], strict=True))
        return [self._result(row, token_ids) for row in rows]

    def _result(self, row: Row, token_ids: dict[int, int | None]) -> RowResult:
        if row.slot not in token_ids:
            return RowResult(slot=row.slot)
        slot, token_id = self._slots[row.slot], token_ids[row.slot]
        if token_id is None:
            self._kv.scrub(slot.table[slot.table >= 0].tolist())
            return RowResult(slot=row.slot, error="the model gave no finite logits for this request")
        slot.history.append(token_id)
        return RowResult(slot=row.slot, token_ids=[token_id])


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


def _dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """auto is bfloat16, save for a checkpoint stored in float32 throughout."""
    if name != "auto":
        return DTYPES[name]
    stored = {checkpoint.dtype(tensor) for tensor in checkpoint.names() if tensor.endswith("weight")}
    return torch.float32 if stored == {torch.float32} else torch.bfloat16


def _pool_blocks(config: EngineConfig, block_bytes: int, blocks_per_context: int, device: torch.device) -> int:
    """The pool's size: what was asked, or half of what is free, at most `max_batch_size` full contexts."""
    memory = config.memory
    free = available_memory(device.type)
    if memory.max_blocks is not None:
        blocks, said = memory.max_blocks, f"max_blocks: {memory.max_blocks}"
    elif memory.kv_cache_memory != "auto":
        blocks, said = memory.kv_cache_memory // block_bytes, f"kv_cache_memory: {memory.kv_cache_memory}"
    else:
        blocks, said = free // 2 // block_bytes, f"kv_cache_memory: auto, of {free} bytes available"
        blocks = min(blocks, config.scheduler.max_batch_size * blocks_per_context)
    if blocks < 2:
        raise ConfigError(f"{said}; a pool needs at least 2 blocks of {block_bytes} bytes")
    if blocks * block_bytes > free:
        raise ConfigError(f"{said}; {blocks} blocks take {blocks * block_bytes} bytes and {free} are available")
    return blocks


def _check_untaken(weights: Weights) -> None:
    """Tensors that no layer took mean that the model here is not the model there."""
    known = ("rotary_emb.inv_freq", "lm_head.weight", "rope_freqs.weight", "position_ids", "attn.bias", "attn.masked_bias")
    strange = [name for name in weights.untaken() if not name.endswith(known)]
    if strange:
        raise CheckpointError(f"the checkpoint holds tensors that this model does not use: {', '.join(strange[:5])}")
