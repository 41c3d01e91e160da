#!/usr/bin/env python3
"""A checkpoint that computes the same function with other weights, to measure quantization on weights that lie on no grid.

    scripts/fold_weights.py FOLDER RESULT [--seed N] [--deviation S]

A checkpoint made from a quantized file lies on that file's grid, and quantizing it again to as many bits costs next to nothing. Here every
matrix but the embedding leaves its grid, and the logits stay what they were, but for float32 rounding:

- RMSNorm's scales go into the projections that read what it normalizes, and become 1; the head, which may need it, is untied.
- Each head of keys and values has a random rotation of its values, undone in the columns of `o_proj` of all query heads that share it.
- Each row of `up_proj` has a random positive factor, log-normal with deviation S, undone in the columns of `down_proj`.

FOLDER is an HF folder of a model with the layers of Llama, Mistral, Qwen2 or Qwen3; RESULT is one too, in float32 safetensors.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""The projections that read what a norm gives."""


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder, in float64."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{folder} holds no safetensors")
    return {name: tensor.double() for file in files for name, tensor in load_file(file).items()}


def fold_norm(weights: dict[str, Tensor], norm: str, readers: list[str]) -> None:
    """Move a norm's scales into the columns of its readers."""
    for reader in readers:
        weights[reader] = weights[reader] * weights[norm]
    weights[norm] = torch.ones_like(weights[norm])


def random_rotations(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Orthogonal [count, size, size]."""
    rotations, triangular = torch.linalg.qr(torch.randn(count, size, size, generator=generator, dtype=torch.float64))
    return rotations * triangular.diagonal(dim1=1, dim2=2).sign()[:, None]  # without the signs they would not be uniform


def rotate_values(weights: dict[str, Tensor], attention: str, rotations: Tensor) -> None:
    """Turn the values of each KV head, and turn them back in the columns of `o_proj`."""
    count, size, _ = rotations.shape
    for name in (f"{attention}.v_proj.weight", f"{attention}.v_proj.bias"):
        if name in weights:
            rows = weights[name]
            weights[name] = (rotations @ rows.view(count, size, -1)).view(rows.shape)
    columns = weights[f"{attention}.o_proj.weight"]
    heads = columns.view(len(columns), count, -1, size)  # [hidden, KV head, query heads that share it, size]
    weights[f"{attention}.o_proj.weight"] = torch.einsum("nkqs,kts->nkqt", heads, rotations).reshape(columns.shape)


def scale_up_rows(weights: dict[str, Tensor], mlp: str, deviation: float, generator: torch.Generator) -> None:
    """Scale the rows of `up_proj`, and the columns of `down_proj` back."""
    up, down = f"{mlp}.up_proj.weight", f"{mlp}.down_proj.weight"
    factors = (torch.randn(len(weights[up]), generator=generator, dtype=torch.float64) * deviation).exp()
    weights[up] = weights[up] * factors[:, None]
    weights[down] = weights[down] / factors


def fold(weights: dict[str, Tensor], config: dict[str, Any], deviation: float, generator: torch.Generator) -> None:
    """Change the weights in place; the head is untied from the embedding."""
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    weights.setdefault(HEAD, weights[EMBEDDING])
    fold_norm(weights, NORM, [HEAD])
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for norm, readers in READERS.items():
            fold_norm(weights, f"{layer}.{norm}.weight", [f"{layer}.{reader}.weight" for reader in readers])
        rotate_values(weights, f"{layer}.self_attn", random_rotations(key_heads, size, generator))
        scale_up_rows(weights, f"{layer}.mlp", deviation, generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deviation", type=float, default=0.3, help="of the logarithm of up_proj's factors")
    asked = parser.parse_args()
    config = json.loads((asked.folder / "config.json").read_text(encoding="utf-8"))
    weights = read_weights(asked.folder)
    fold(weights, config, asked.deviation, torch.Generator().manual_seed(asked.seed))
    asked.result.mkdir(parents=True, exist_ok=True)
    for file in asked.folder.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.name != "config.json":
            shutil.copy(file, asked.result)
    changed = {**config, "tie_word_embeddings": False, "dtype": "float32"}
    changed.pop("torch_dtype", None)  # its older name
    (asked.result / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    plain = {name: tensor.float().contiguous() for name, tensor in weights.items()}
    save_file(plain, asked.result / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
