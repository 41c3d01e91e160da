"""GPTQ's and AWQ's matrices: the numbers they stand for, the groups of 32 they become, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.loading import open_checkpoint
from octavo.loading.checkpoint import Checkpoint
from tests.loading.packing import SETTINGS, numbers, pack_folder, packer, quantized

ROWS, COLUMNS = 40, 256
NAME = "model.layers.0.mlp.down_proj.weight"


def drawn(group_size: int, columns: int = COLUMNS) -> Tensor:
    """Some groups lie on one side of zero, and some are small."""
    weight = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(group_size))
    weight[:9, :group_size].abs_()
    weight[9:12, :group_size].abs_().neg_()
    weight[12] *= 1e-3
    return weight


def write(folder: Path, settings: dict[str, Any], group_size: int, columns: int = COLUMNS) -> Tensor:
    """One matrix and a norm; returns the numbers of the matrix."""
    save_file({NAME: drawn(group_size, columns), "model.norm.weight": torch.randn(8)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return pack_folder(folder, settings, group_size, lambda name: name == NAME)[NAME]


def read(checkpoint: Checkpoint, name: str = NAME) -> Tensor:
    out = torch.full(checkpoint.shape(name), torch.nan)
    checkpoint.read(name, out)
    return out


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    settings = {key: value for key, value in (config["quantization_config"] | changes).items() if value is not None}
    path.write_text(json.dumps(config | {"quantization_config": settings}))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    path = folder / "model.safetensors"
    named = {f"model.layers.0.mlp.down_proj.{part}": value for part, value in changes.items()}
    save_file({name: value for name, value in (load_file(path) | named).items() if value is not None}, path)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_matrix_is_the_numbers_it_stands_for(kind: str, group_size: int, tmp_path: Path) -> None:
    wanted = write(tmp_path, SETTINGS[kind], group_size)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == {NAME, "model.norm.weight"}
    assert (checkpoint.shape(NAME), checkpoint.dtype(NAME)) == ((ROWS, COLUMNS), None)
    assert torch.equal(read(checkpoint), wanted)
    part = torch.empty(7, COLUMNS)
    checkpoint.read_rows(NAME, 11, part)
    assert torch.equal(part, wanted[11:18])

    grouped = checkpoint.grouped(NAME)
    assert grouped is not None
    assert (grouped.bits, grouped.shape, grouped.scales.shape) == (4, (ROWS, COLUMNS), (ROWS, COLUMNS // 32))
    if kind == "gptq":
        assert (grouped.zero, grouped.minimums) == (8, None)
        assert torch.equal(grouped.dense(), wanted)
        return
    codes, zeros, scales = (torch.from_numpy(part) for part in quantized(drawn(group_size), group_size, symmetric=False))
    assert torch.equal(grouped.codes.long(), codes)
    assert torch.equal(grouped.scales, scales.float().repeat_interleave(group_size // 32, 1))
    assert grouped.minimums is not None
    minimums = (-scales.float() * zeros).repeat_interleave(group_size // 32, 1)
    assert bool((zeros == 0).any())
    assert bool((zeros == 15).any())
    assert bool(((grouped.minimums - minimums).abs() <= 2.0**-11 * minimums.abs() + 2.0**-25).all())


def test_what_is_not_packed_is_read_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, SETTINGS["awq"], 64)
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(read(checkpoint, "model.norm.weight"), load_file(tmp_path / "model.safetensors")["model.norm.weight"])
    assert (checkpoint.dtype("model.norm.weight"), checkpoint.grouped("model.norm.weight")) == (torch.float32, None)
    with pytest.raises(CheckpointError, match=r"down_proj.weight has shape \[40, 256\], and the model's is \[256, 40\]"):
        checkpoint.read(NAME, torch.empty(256, 40))


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_last_group_may_be_short(kind: str, tmp_path: Path) -> None:
    wanted = write(tmp_path, SETTINGS[kind], 128, columns=168)
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(read(checkpoint), wanted)
    grouped = checkpoint.grouped(NAME)
    assert grouped is not None
    assert (grouped.dense() - wanted).abs().max() <= 2.0**-11 * wanted.abs().max()


def test_zeros_of_8_are_8_whatever_the_format_is_called(tmp_path: Path) -> None:
    wanted = write(tmp_path, SETTINGS["gptq"] | {"checkpoint_format": "gptq_v2"}, 64)
    edit(tmp_path, checkpoint_format="gptq")
    assert torch.equal(read(open_checkpoint(tmp_path)), wanted)
    edit(tmp_path, sym=False)
    assert not torch.equal(read(open_checkpoint(tmp_path)), wanted)


def test_groups_in_another_order(tmp_path: Path) -> None:
    """Each run of 32 inputs has one group still."""
    wanted = write(tmp_path, SETTINGS["gptq, asymmetric"], 64)
    order, path = torch.tensor([2, 0, 3, 1]), tmp_path / "model.safetensors"
    parts = {part: load_file(path)[f"model.layers.0.mlp.down_proj.{part}"] for part in ("scales", "qzeros")}
    edit_tensors(
        tmp_path,
        g_idx=order.repeat_interleave(64).int(),
        **{part: value[order.argsort()].contiguous() for part, value in parts.items()},
    )
    edit(tmp_path, desc_act=True)
    assert torch.equal(read(open_checkpoint(tmp_path)), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_other_types(dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = write(tmp_path, SETTINGS["gptq"], 64)
    scales = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.down_proj.scales"]
    edit_tensors(tmp_path, scales=scales.to(dtype))
    assert (read(open_checkpoint(tmp_path)) - wanted).abs().max() <= (0 if dtype == torch.float32 else 2.0**-8) * wanted.abs().max()
    edit_tensors(tmp_path, scales=torch.full_like(scales, 1e6, dtype=dtype))
    assert open_checkpoint(tmp_path).grouped(NAME) is None, "float16 has no such scale"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 3}, r"gptq with bits: 3 is not supported; supported: 4$"),
        ({"bits": 8}, r"gptq with bits: 8 is not supported"),
        ({"bits": None}, r"quantization_config lacks bits"),
        ({"group_size": -1}, r"gptq with group_size: -1 is not supported; supported: 32, 64, 128"),
        ({"group_size": 16}, r"group_size: 16 is not supported"),
        ({"group_size": "64"}, r"group_size: '64'; allowed: a whole number"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format: marlin is not supported; supported: gptq, gptq_v2"),
        ({"is_marlin_format": True}, r"is_marlin_format: True is not supported"),
        ({"pack_dtype": "int16"}, r"pack_dtype: int16 is not supported; supported: int32"),
        ({"quant_method": "awq"}, r"awq with checkpoint_format: gptq is not supported; supported: gemm"),
        ({"quant_method": "awq", "version": "gemv"}, r"awq with version: gemv is not supported; supported: gemm"),
        ({"quant_method": "awq", "version": "gemm", "zero_point": False}, r"zero_point: False is not supported; supported: True"),
        ({"quant_method": "bitsandbytes"}, r"quantized by bitsandbytes cannot be read; allowed: gptq, awq, BF16, .*GGUF"),
        ({"quant_method": None}, r"quantized by a method that is not named"),
        ({"group_size": 128}, r"qzeros has shape \[4, 5\], and .*qweight \[32, 40\], in groups of 128 inputs, needs \[2, 5\]"),
        ({"desc_act": "yes"}, r"desc_act: 'yes'; allowed: true or false"),
    ],
)
def test_settings_that_are_not_supported_are_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    write(tmp_path, SETTINGS["gptq"], 64)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path)


def test_no_settings_at_all(tmp_path: Path) -> None:
    write(tmp_path, SETTINGS["gptq"], 64)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": "gptq"}))
    with pytest.raises(CheckpointError, match="quantization_config: 'gptq'; allowed: an object"):
        open_checkpoint(tmp_path)


SORTED = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(0)).int() // 64


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"qzeros": None}, r"no tensor model.layers.0.mlp.down_proj.qzeros"),
        ({"scales": torch.ones(4, 39).half()}, r"scales has shape \[4, 39\], and .* needs \[4, 40\]"),
        ({"scales": torch.ones(4, 40, dtype=torch.int32)}, r"scales is stored as I32; allowed: BF16, F16"),
        ({"qweight": torch.ones(32, 40)}, r"qweight is stored as F32; allowed: I32"),
        ({"qweight": torch.ones(40, dtype=torch.int32)}, r"qweight has shape \[40\], and a matrix has two dimensions"),
        ({"g_idx": torch.zeros(8, dtype=torch.int32)}, r"g_idx has shape \[8\], and .* needs \[256\]"),
        ({"g_idx": SORTED}, r"g_idx: inputs in the order of their activations \(desc_act\) are not supported"),
        ({"g_idx": torch.full((COLUMNS,), 4).int()}, r"g_idx names a group that has no scale"),
        ({"g_idx": None}, r"no tensor model.layers.0.mlp.down_proj.g_idx"),
    ],
)
def test_tensors_that_cannot_be_read_are_named_at_opening(tensors: dict[str, Tensor | None], said: str, tmp_path: Path) -> None:
    write(tmp_path, SETTINGS["gptq"], 64)
    edit(tmp_path, desc_act=True)
    edit_tensors(tmp_path, **tensors)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path)


def test_sorted_inputs_are_refused_where_the_settings_deny_them(tmp_path: Path) -> None:
    write(tmp_path, SETTINGS["gptq"], 64)
    edit_tensors(tmp_path, g_idx=SORTED)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="desc_act"):
        read(checkpoint)


def test_the_text_model_of_a_packed_whole(tmp_path: Path) -> None:
    wanted = write(tmp_path, SETTINGS["gptq"], 64)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    save_file({name.replace("model.", "model.language_model.", 1): value for name, value in load_file(path).items()}, path)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gemma3"}))
    checkpoint = open_checkpoint(tmp_path)
    grouped = checkpoint.grouped(NAME)
    assert grouped is not None
    assert torch.equal(grouped.dense(), wanted)
    assert torch.equal(read(checkpoint), wanted)


def test_packing_by_hand() -> None:
    """The layouts once more, from their definitions."""
    codes = np.arange(16).reshape(1, 16).repeat(8, 0)
    zeros, scales = np.arange(1, 9).reshape(8, 1), np.ones((8, 1), np.float16)
    ours = packer(SETTINGS["gptq"])(codes, zeros, scales, 32)
    assert [hex(word) for word in ours["qweight"][:, 0].numpy().view(np.uint32)] == ["0x76543210", "0xfedcba98"]
    assert hex(ours["qzeros"].numpy().view(np.uint32)[0, 0]) == "0x76543210"
    theirs = packer(SETTINGS["awq"])(codes, zeros, scales, 32)
    assert hex(theirs["qweight"].numpy().view(np.uint32)[3, 0]) == "0x33333333"
    assert hex(theirs["qzeros"].numpy().view(np.uint32)[0, 0]) == "0x86427531"
    assert numbers(codes, zeros, scales, 32)[2].tolist() == [code - 3 for code in range(16)]
