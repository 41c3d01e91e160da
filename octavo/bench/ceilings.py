"""What share of the machine's ceilings the kernels reach: python -m octavo.bench.ceilings [MODEL] [ROUNDS]

Decode attention of 64 sequences of 450 tokens over all of SmolLM2's layers, of the bandwidth of a plain read loop; and a whole
prefill of 4,096 tokens in bfloat16, the operations of its attention counted, of the rate of torch's linear at 512 rows. A round measures
the ceilings and each share of them; medians, least and most of the rounds are told.
"""

from __future__ import annotations

import json
import sys

from octavo import LLM, SamplingParams
from octavo.bench import attention, latency, machine
from octavo.bench.display import summary
from octavo.config import EngineConfig
from octavo.loading import open_checkpoint
from octavo.loading.hub import resolve

SEQUENCES, LENGTH, LAYERS, BLOCK_SIZE = 64, 450, 30, 16
PREFILL = 4096
SETTINGS = {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "bfloat16", "prefill_chunk_size": 512, "max_model_len": 8192}


def attention_rate(kv_cache_dtype: str) -> float:
    """Bytes of KV memory that decode attention reads in a second."""
    (figures,) = attention.measure([LENGTH] * SEQUENCES, [BLOCK_SIZE], 3, LAYERS, kv_cache_dtype)
    return figures.layer_bytes / figures.layer_us * 1e6


def prefill_operations(model: str, size: machine.ModelSize, length: int) -> int:
    """Of the matrices that each token goes through, the head once, and causal attention; two for a multiplication and its addition."""
    checkpoint = open_checkpoint(resolve(model))
    config = checkpoint.config
    checkpoint.close()
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    scored = length * (length + 1) // 2
    return 2 * (length * size.body_parameters + size.head_parameters + 2 * scored * heads * head_dim * layers)


def main(model: str = "smollm2-135m", rounds: str = "5") -> None:
    checkpoint = open_checkpoint(resolve(model))
    found: dict[str, list[float]] = {}
    with LLM(model, EngineConfig.create(None, **SETTINGS)) as llm:
        operations = prefill_operations(model, machine.model_size(llm, checkpoint), PREFILL)
        checkpoint.close()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        for _ in range(int(rounds)):
            ceilings = machine.measure()
            (seconds,) = latency.first_token(llm.engine, PREFILL, 1).seconds
            figures = {
                "read_bytes_per_s": ceilings.read_bandwidth,
                "product_operations_per_s": ceilings.product_rate,
                "prefill_tokens_per_s": PREFILL / seconds,
                "prefill_share": operations / seconds / ceilings.product_rate,
                "decode_attention_share": attention_rate("bfloat16") / ceilings.read_bandwidth,
                "decode_attention_int8_share": attention_rate("int8") / ceilings.read_bandwidth,
            }
            for name, value in figures.items():
                found.setdefault(name, []).append(value)
    print(json.dumps({"machine": str(machine.describe()), **{name: summary(values) for name, values in found.items()}}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
