"""One file per HF `model_type`, found through the registry below.

A model's file offers `configure(hf) -> DecoderConfig`. Where it is more than a Llama with other data, it offers its own
`Decoder` too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.loading.checkpoint import Checkpoint

MODELS = {
    "gemma": "octavo.models.gemma",
    "gemma2": "octavo.models.gemma2",
    "gemma3_text": "octavo.models.gemma3_text",
    "granite": "octavo.models.granite",
    "llama": "octavo.models.llama",
    "mistral": "octavo.models.mistral",
    "mixtral": "octavo.models.mixtral",
    "olmo2": "octavo.models.olmo2",
    "olmo3": "octavo.models.olmo3",
    "phi3": "octavo.models.phi3",
    "qwen2": "octavo.models.qwen2",
    "qwen3": "octavo.models.qwen3",
    "qwen3_moe": "octavo.models.qwen3_moe",
    "seed_oss": "octavo.models.seed_oss",
    "smollm3": "octavo.models.smollm3",
}


# fmt: off
FALLBACK = (
    "afmoe", "apertus", "arcee", "axk1", "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm", "deepseek_v2",
    "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text",
    "gemma3n_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "laguna", "llama", "mellum",
    "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
)
# fmt: on
"""Types that were seen to run through transformers 5.17 as they run there; causal language models of others are tried."""


class Found(Protocol):
    """What an engine must know of a model before its weights are read: the configuration that its decoder is made with."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def find(checkpoint: Checkpoint, model_impl: str = "auto") -> tuple[Found, type]:
    """The model's configuration and decoder class: the one here where there is one, or else transformers', unless one of them is asked for.

    Raises CheckpointError naming a type that cannot run, and why.
    """
    model_type = checkpoint.config.get("model_type")
    if model_impl == "transformers" or (model_impl == "auto" and model_type not in MODELS):
        from octavo.models import transformers_fallback

        return transformers_fallback.configure(checkpoint), transformers_fallback.FallbackModel
    if model_type not in MODELS:
        raise CheckpointError(f"model_type: {model_type!r} is not supported natively; supported: {', '.join(MODELS)}")
    module = importlib.import_module(MODELS[model_type])
    from octavo.models.llama import Decoder

    return module.configure(checkpoint.config), getattr(module, "Decoder", Decoder)
