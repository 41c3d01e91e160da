"""Matrices in 4 bits as GPTQ and AWQ leave them, packed word by word, and the numbers these stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FIRST_TO_LAST = [*range(8)]


def packed(codes: np.ndarray, order: list[int]) -> np.ndarray:
    """[A, 8 * B] -> int32 [A, B]: four bits of a word hold the code of the place that the order names."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for a, b in np.ndindex(*words.shape):
        words[a, b] = sum(int(codes[a, 8 * b + place]) << 4 * at for at, place in enumerate(order))
    return words.view(np.int32)


def quantized(weight: Tensor, group_size: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Plain rounding of [N, K]: codes [N, K], and zeros and float16 scales [N, G]."""
    groups = np.pad(weight.numpy(), ((0, 0), (0, -weight.shape[1] % group_size))).reshape(len(weight), -1, group_size)
    if symmetric:
        scales = (np.abs(groups).max(-1) / 7).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, 15).astype(int)
    codes = np.clip(np.rint(groups / scales.astype(np.float32)[..., None]) + zeros[..., None], 0, 15).astype(int)
    return codes.reshape(len(weight), -1)[:, : weight.shape[1]], zeros, scales


def numbers(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_size: int, as_run: bool = False) -> Tensor:
    """float32 [N, K], one by one. as_run: with -zero * scale rounded to float16, as the products have it."""
    out = np.empty(codes.shape, np.float32)
    for n, k in np.ndindex(*codes.shape):
        zero, scale = int(zeros[n, k // group_size]), np.float32(scales[n, k // group_size])
        out[n, k] = int(codes[n, k]) * scale + np.float32(np.float16(-zero * scale)) if as_run else (int(codes[n, k]) - zero) * scale
    return torch.from_numpy(out)


def gptq(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_size: int, less: int = 1) -> dict[str, Tensor]:
    """less: what is taken from each zero, over whole words as GPTQModel does; 0 in format gptq_v2."""
    words = (packed(zeros.T, FIRST_TO_LAST).view(np.uint32) - np.uint32(0x11111111 * less)).view(np.int32)
    parts = {
        "qweight": packed(codes, FIRST_TO_LAST).T,
        "qzeros": words,
        "scales": scales.T,
        "g_idx": (np.arange(codes.shape[1]) // group_size).astype(np.int32),
    }
    return {name: torch.from_numpy(part.copy()) for name, part in parts.items()}


def awq(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_size: int) -> dict[str, Tensor]:
    parts = {"qweight": packed(codes.T, AWQ_ORDER), "qzeros": packed(zeros.T, AWQ_ORDER), "scales": scales.T}
    return {name: torch.from_numpy(part.copy()) for name, part in parts.items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
    "gptq, asymmetric": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False},
    "gptq v2, asymmetric": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"},
}


def packer(settings: dict[str, Any]) -> Callable[..., dict[str, Tensor]]:
    if settings["quant_method"] == "awq":
        return awq
    less = int(settings.get("checkpoint_format") != "gptq_v2")
    return lambda *parts: gptq(*parts, less=less)


def pack_folder(
    folder: Path, settings: dict[str, Any], group_size: int, is_packed: Callable[[str], bool], as_run: bool = False
) -> dict[str, Tensor]:
    """Quantize the matrices of an HF folder in place; returns all its tensors as they now are, in float32."""
    tensors, plain = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors[name] = plain[name] = value
        if is_packed(name):
            del tensors[name]
            parts = quantized(value, group_size, settings.get("sym", False))
            plain[name] = numbers(*parts, group_size, as_run)
            tensors |= {name.removesuffix("weight") + part: each for part, each in packer(settings)(*parts, group_size).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings | {"group_size": group_size}}))
    return plain
