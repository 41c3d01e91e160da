"""Helpers that compare Octavo's worker with transformers, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.loading import open_checkpoint
from octavo.plan import Assignment, Row, StepPlan, TableUpdate
from octavo.sampling_params import SamplingParams
from octavo.worker.runner import Runner


def make_runner(path: Path, **settings: Any) -> Runner:
    checkpoint = open_checkpoint(path)
    try:
        return Runner(checkpoint, EngineConfig.create(**({"dtype": "float32", "max_blocks": 320, "prealloc_blocks": 256} | settings)))
    finally:
        checkpoint.close()


def logits(runner: Runner, token_ids: list[int], chunk: int | None = None, shuffled: bool = True) -> torch.Tensor:
    """Logits at every position, [tokens, vocab_size], computed in chunks over a block table in shuffled order."""
    size = runner.capacity.block_size
    count = -(-len(token_ids) // size)
    order = (
        torch.randperm(runner.capacity.num_blocks, generator=torch.Generator().manual_seed(0))
        if shuffled
        else torch.arange(runner.capacity.num_blocks)
    )
    tables = order[: count * len(runner.capacity.windows)].view(-1, count).tolist()
    pool = runner.capacity.num_blocks
    runner.prepare(StepPlan(step=0, pool_blocks=pool, released=[], copies=[], rows=[]))  # waits until all have memory
    parts = []
    step = chunk or len(token_ids)
    for start in range(0, len(token_ids), step):
        taken = min(step, len(token_ids) - start)
        assign = Assignment(params=SamplingParams(), seed=0, history=token_ids, prompt_length=len(token_ids)) if start == 0 else None
        held, wanted = -(-start // size), -(-(start + taken) // size)
        updates = [TableUpdate(held, table[held:wanted]) for table in tables]
        row = Row(slot=0, start=start, count=taken, num_logits=taken, tables=updates, assign=assign)
        runner.prepare(StepPlan(step=1, pool_blocks=pool, released=[], copies=[], rows=[row]))
        with torch.inference_mode():
            parts.append(runner.model.logits(runner.forward([row])).float())
    return torch.cat(parts)


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def prompts(data: Path, count: int) -> list[str]:
    """Real prompts of four kinds in turn: instructions, arithmetic, code, questions."""

    def column(name: str, field: str) -> list[str]:
        lines = (data / name).read_text().splitlines()[: count // 4 + 1]
        values = [json.loads(line)[field] for line in lines]
        return [value[0] if isinstance(value, list) else value for value in values]

    kinds = [
        column("ifeval/input_data.jsonl", "prompt"),
        column("gsm8k/test.jsonl", "question"),
        column("humaneval/HumanEval.jsonl", "prompt"),
        column("mt-bench/question.jsonl", "turns"),
    ]
    return [kind[i] for i in range(count // 4 + 1) for kind in kinds][:count]
