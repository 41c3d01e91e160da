#!/usr/bin/env python3
"""A checkpoint of a real model's shape with random weights, to compare speed on shapes whose own weights are not at hand.

    scripts/random_model.py FOLDER --tokenizer FOLDER [--shape qwen3-0.6b]

Writes FOLDER/SHAPE-hf (config, bfloat16 safetensors, tokenizer) and FOLDER/SHAPE-q4_0.gguf and -q8_0.gguf, which hold the same numbers
with all matrices quantized alike, embeddings too. The tokenizer's folder has a byte-level BPE `tokenizer.json` with `<|endoftext|>`;
its vocabulary is filled up with tokens that no text gives. What such a model generates means nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.text.pretokenizers import pre_tokenizer

# fmt: off
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": True, "dtype": "bfloat16",
    },
}
"""HF's `config.json` of each shape. All are of architecture Qwen3, with tied embeddings."""

GGUF_COUNTS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim", "attention.value_length": "head_dim",
}
"""HF's name of each of GGUF's."""
# fmt: on

QUANTIZATIONS = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("q4_0", "q8_0")}
PRE_TOKENIZER = "qwen2"
END_OF_TEXT = "<|endoftext|>"
SEED, DEVIATION = 0, 0.02
ROWS = 16384  # drawn and quantized at a time


def tensor_shapes(config: dict[str, Any]) -> dict[str, torch.Size]:
    """By HF's names, in the order of the files."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def padded_tokenizer(folder: Path, size: int) -> Tokenizer:
    """The folder's vocabulary filled up to `size`, cutting text into words in a way that a GGUF file can name."""
    source = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = [token["content"] for token in source["added_tokens"]]
    vocabulary = source["model"]["vocab"] | {token["content"]: token["id"] for token in source["added_tokens"]}
    vocabulary |= {f"<|unused_{i}|>": i for i in range(len(vocabulary), size)}
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in source["model"]["merges"]]
    if sorted(vocabulary.values()) != list(range(size)) or END_OF_TEXT not in special:
        raise SystemExit(f"{folder} has no vocabulary of at most {size} tokens, numbered without holes, with {END_OF_TEXT}")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer(PRE_TOKENIZER).patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def start_folder(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> BinaryIO:
    """All but the weights. Returns their file, where they follow in order and without gaps."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = dict.fromkeys(["bos_token_id", "eos_token_id"], tokenizer.token_to_id(END_OF_TEXT))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    for name, content in {"config": config | ends, "generation_config": ends, "tokenizer_config": names}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensor_shapes(config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = (folder / "model.safetensors").open("wb")
    file.write(len(text).to_bytes(8, "little") + text)
    return file


def start_gguf(path: Path, quantization: str, config: dict[str, Any], tokenizer: Tokenizer) -> gguf.GGUFWriter:
    """All but the weights, which follow in order."""
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantization.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, name in GGUF_COUNTS.items():
        writer.add_uint32(f"{config['model_type']}.{key}", config[name])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    ids, special = range(config["vocab_size"]), tokenizer.get_added_tokens_decoder()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list([tokenizer.id_to_token(i) for i in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in ids])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.token_to_id(END_OF_TEXT))
    writer.add_eos_token_id(tokenizer.token_to_id(END_OF_TEXT))
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, shape in tensor_shapes(config).items():
        kind = QUANTIZATIONS[quantization] if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        block, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(names.get_name(name, (".weight",)), shape, np.dtype(np.float32), math.prod(shape) // block * size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoints go")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER", help="whose vocabulary and merges to take")
    options = parser.parse_args()
    config = SHAPES[options.shape]
    tokenizer = padded_tokenizer(options.tokenizer, config["vocab_size"])
    generator = torch.Generator().manual_seed(SEED)
    weights = start_folder(options.folder / f"{options.shape}-hf", config, tokenizer)
    writers = {name: start_gguf(options.folder / f"{options.shape}-{name}.gguf", name, config, tokenizer) for name in QUANTIZATIONS}
    for shape in tensor_shapes(config).values():
        parts = [(min(ROWS, shape[0] - start), *shape[1:]) for start in range(0, shape[0], ROWS)]
        draws = (torch.ones(part) if len(part) == 1 else torch.randn(part, generator=generator) * DEVIATION for part in parts)
        rows = [draw.bfloat16() for draw in draws]
        weights.writelines(part.view(torch.uint8).numpy().data for part in rows)
        for name, writer in writers.items():
            kind = QUANTIZATIONS[name] if len(shape) == 2 else gguf.GGMLQuantizationType.F32
            writer.write_tensor_data(np.concatenate([gguf.quants.quantize(part.float().numpy(), kind) for part in rows]))
    for file in (weights, *writers.values()):
        file.close()


if __name__ == "__main__":
    main()
