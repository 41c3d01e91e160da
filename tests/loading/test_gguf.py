from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from octavo.errors import CheckpointError
from octavo.loading.gguf import GGUFCheckpoint, hf_name
from octavo.loading.gguf_header import TENSOR_TYPES, read_header
from octavo.text.tokenizer import Tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 64, 4, 2, 16, 96, 10
SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
    "blk.0.ffn_up.weight": (INTERMEDIATE, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INTERMEDIATE),
}
Tensors = dict[str, tuple[np.ndarray, Kind]]
Write = Callable[..., Path]


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(sum(name.encode())).standard_normal(shape).astype(np.float32)


def weights(kind: Kind = Kind.F32, **extra: tuple[int, ...]) -> Tensors:
    """A one-layer model's tensors, the matrices stored as `kind`."""
    shapes = SHAPES | {name.replace("__", "."): shape for name, shape in extra.items()}
    plain = {name: numbers(name, shape) for name, shape in shapes.items()}
    return {name: (value, kind if value.ndim == 2 else Kind.F32) for name, value in plain.items()}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(tensors: Tensors | None = None, architecture: str = "llama", **metadata: Any) -> Path:
        """A model of one layer; `metadata` adds to its keys or, where None, removes one; `__` stands for a dot."""
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        values = {
            "context_length": 128,
            "embedding_length": HIDDEN,
            "block_count": 1,
            "feed_forward_length": INTERMEDIATE,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }
        keyed = {f"{architecture}.{key}": value for key, value in values.items()}
        keyed |= {key.replace("__", ".").replace("ARCH", architecture): value for key, value in metadata.items()}
        for key, value in keyed.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
                kinds[type(value)](key, value)
        for name, (value, kind) in (tensors or weights()).items():
            packed = gguf.quants.quantize(value, kind) if value.dtype == np.float32 else value
            writer.add_tensor(name, packed, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write_file


def read(path: Path, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    checkpoint = GGUFCheckpoint(path)
    out = torch.full(checkpoint.shape(name), float("nan"), dtype=dtype)
    checkpoint.read(name, out)
    checkpoint.close()
    return out


def test_the_header_is_what_gguf_reads(write: Write) -> None:
    path = write(
        weights(Kind.Q8_0),
        general__alignment=64,
        a__text="naïve 世界",
        a__flag=True,
        some__strings=["", "b", "世"],
        some__floats=[0.5, -1.5],
        some__numbers=[1, -2, 3],
        some__flags=[True, False],
    )
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert header.alignment == 64
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == expected
    assert [*header.tensors] == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (info.type.name, info.offset, info.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)


def test_the_table_of_types_is_ggufs() -> None:
    for number, (name, length, size) in TENSOR_TYPES.items():
        assert Kind[name] == number
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == (length, size)
    readable = {kind.value for kind in gguf.quants._type_traits} | {Kind.F32, Kind.F16}
    assert set(TENSOR_TYPES) == readable


@pytest.mark.parametrize("number", sorted(TENSOR_TYPES), ids=lambda number: TENSOR_TYPES[number].name)
def test_every_type_dequantizes_as_in_gguf(write: Write, number: int) -> None:
    kind, info = Kind(number), TENSOR_TYPES[number]
    rows, columns = 300, 256
    try:
        packed = gguf.quants.quantize(numbers("quantized", (rows, columns)), kind).view(np.uint8)
    except NotImplementedError:
        packed = np.random.default_rng(0).integers(0, 256, (rows, columns // info.block_length * info.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(packed, kind)
        path = write(weights() | {"blk.0.attn_v.weight": (packed, kind)})
        actual = read(path, "model.layers.0.self_attn.v_proj.weight")
    np.testing.assert_array_equal(actual.numpy(), expected.reshape(rows, columns))
    assert GGUFCheckpoint(path).dtype("model.layers.0.self_attn.v_proj.weight") == {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }.get(info.name)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_own_dequantization_is_ggufs_for_any_bits(write: Write, kind: Kind) -> None:
    _, size = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(1).integers(0, 256, (500, 8 * size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(packed, kind)
    actual = read(write(weights() | {"output.weight": (packed, kind)}), "lm_head.weight")
    np.testing.assert_array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reading_into_part_of_a_fused_tensor(write: Write, dtype: torch.dtype) -> None:
    checkpoint = GGUFCheckpoint(write(weights(Kind.Q8_0)))
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    fused = torch.zeros(2 * INTERMEDIATE, 2 * HIDDEN, dtype=dtype)
    checkpoint.read(gate, fused[:INTERMEDIATE, :HIDDEN])
    checkpoint.read(up, fused[INTERMEDIATE:, :HIDDEN])
    expected = torch.cat([read(checkpoint.path, gate), read(checkpoint.path, up)]).to(dtype)
    assert torch.equal(fused[:, :HIDDEN], expected)
    assert not fused[:, HIDDEN:].any()


def interleaved(value: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter makes of HF's rows: pairs (i, i + half) of a head side by side."""
    half = len(value) // heads // 2
    rows = [head * 2 * half + pair + side * half for head in range(heads) for pair in range(half) for side in range(2)]
    return value[rows]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q4_1, Kind.Q5_0])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_query_and_key_rows_return_to_hf_order(write: Write, architecture: str, kind: Kind) -> None:
    tensors = weights(kind, blk__0__attn_q__bias=(HEADS * HEAD_DIM,), blk__0__attn_k__bias=(KV_HEADS * HEAD_DIM,))
    plain = {name: value for name, (value, _) in tensors.items()}
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        for name in (f"blk.0.attn_{part}.weight", f"blk.0.attn_{part}.bias"):
            if architecture == "llama":
                tensors[name] = (interleaved(plain[name], heads), tensors[name][1])
    path = write(tensors, architecture)
    for name, (_, stored) in tensors.items():
        expected = gguf.quants.dequantize(gguf.quants.quantize(plain[name], stored), stored)
        np.testing.assert_array_equal(read(path, hf_name(name)).numpy(), expected.reshape(plain[name].shape), err_msg=name)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_groups_are_the_rows_that_are_read(write: Write, architecture: str, kind: Kind) -> None:
    checkpoint = GGUFCheckpoint(write(weights(kind, output__weight=(5000, HIDDEN)), architecture))
    for name in checkpoint.names():
        grouped = checkpoint.grouped(name)
        assert (grouped is None) == (checkpoint.dtype(name) is not None)
        if grouped is not None:
            assert grouped.shape == checkpoint.shape(name)
            assert torch.equal(grouped.dense(), read(checkpoint.path, name)), name


def test_some_rows_of_a_tensor(write: Write) -> None:
    checkpoint = GGUFCheckpoint(write(weights(Kind.Q4_1)))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"):
        out = torch.empty(9, HIDDEN)
        checkpoint.read_rows(name, 5, out)
        assert torch.equal(out, read(checkpoint.path, name)[5:14])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_groups_that_are_not_finite_are_no_groups(write: Write, value: float) -> None:
    packed = gguf.quants.quantize(numbers("damaged", (VOCAB, HIDDEN)), Kind.Q8_0)
    packed[3, :2] = np.array([value], np.float16).view(np.uint8)
    checkpoint = GGUFCheckpoint(write(weights() | {"output.weight": (packed, Kind.Q8_0)}))
    assert checkpoint.grouped("lm_head.weight") is None


def test_names(write: Write) -> None:
    extra: dict[str, tuple[int, ...]] = {
        "rope_freqs__weight": (8,),
        "output__weight": (VOCAB, HIDDEN),
        "blk__0__attn_q_norm__weight": (16,),
    }
    checkpoint = GGUFCheckpoint(write(weights(**extra)))
    layer = "model.layers.0."
    assert checkpoint.names() == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "rope_freqs.weight",
        *(f"{layer}self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        layer + "self_attn.q_norm.weight",
        layer + "input_layernorm.weight",
        layer + "post_attention_layernorm.weight",
    }
    np.testing.assert_array_equal(read(checkpoint.path, "rope_freqs.weight").numpy(), numbers("rope_freqs.weight", (8,)))


def test_configuration(write: Write) -> None:
    config = GGUFCheckpoint(write(tokenizer__ggml__bos_token_id=1, tokenizer__ggml__eos_token_id=2)).config
    assert config == {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


SANDWICHED = {f"blk__0__{part}__weight": (HIDDEN,) for part in ("post_attention_norm", "post_ffw_norm")}


def test_gemma3_is_named_as_by_hf_and_its_norms_hold_what_hfs_hold(write: Write) -> None:
    tensors = weights(**SANDWICHED, blk__0__attn_q_norm__weight=(HEAD_DIM,))
    checkpoint = GGUFCheckpoint(write(tensors, "gemma3", ARCH__attention__sliding_window=512, ARCH__rope__freq_base=1e6))
    expected = {"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": HEAD_DIM, "sliding_window": 512}
    assert expected.items() <= checkpoint.config.items()
    assert checkpoint.config["rope_theta"] == 1e6
    assert not {"sliding_window_pattern", "rope_local_base_freq"} & checkpoint.config.keys()
    named = {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
    }
    for name, hf in named.items():
        stored = tensors[f"blk.0.{name}.weight"][0]
        np.testing.assert_array_equal(read(checkpoint.path, f"model.layers.0.{hf}.weight").numpy(), stored - np.float32(1))
    query = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(read(checkpoint.path, query).numpy(), tensors["blk.0.attn_q.weight"][0])


def test_gemma3_says_more_where_it_differs(write: Write) -> None:
    said = {
        "attention__sliding_window_pattern": 4,
        "rope__freq_base_swa": 5e4,
        "rope__scaling__type": "linear",
        "rope__scaling__factor": 8.0,
    }
    config = GGUFCheckpoint(write(weights(**SANDWICHED), "gemma3", **{f"ARCH__{key}": value for key, value in said.items()})).config
    assert (config["sliding_window_pattern"], config["rope_local_base_freq"], config["rope_scaling"]["factor"]) == (4, 5e4, 8.0)


def test_configuration_of_what_is_optional(write: Write) -> None:
    tensors = weights(blk__0__attn_q__bias=(HEADS * HEAD_DIM,), blk__0__ffn_up__bias=(INTERMEDIATE,), output__weight=(VOCAB, HIDDEN))
    optional = {
        "rope__freq_base": 5e5,
        "rope__dimension_count": 8,
        "attention__head_count_kv": [KV_HEADS] * 3,
    }
    config = GGUFCheckpoint(write(tensors, "qwen2", **{f"ARCH__{key}": value for key, value in optional.items()})).config
    expected = {
        "model_type": "qwen2",
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": KV_HEADS,
    }
    expected |= {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}
    assert expected.items() <= config.items()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 2.0}, None),
        ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5},
        ),
    ],
)
def test_rope_scaling(write: Write, metadata: dict[str, Any], expected: dict[str, Any] | None) -> None:
    config = GGUFCheckpoint(write(**{f"ARCH__{key}": value for key, value in metadata.items()})).config
    assert config["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": [2], "bos_token_id": 1}),
        ({"eos_token_id": 2, "eot_token_id": 5, "eom_token_id": 6}, {"eos_token_id": [2, 5, 6]}),
        ({"eos_token_id": 5, "eot_token_id": 5}, {"eos_token_id": [5]}),
        ({"eos_token_id": 0, "tokens": ["<e>", "<|eot_id|>", "<|im_end|>"], "token_type": [3, 3, 1]}, {"eos_token_id": [0, 1]}),
    ],
)
def test_every_token_that_ends_an_answer(write: Write, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    path = write(**{f"tokenizer__ggml__{key}": value for key, value in metadata.items()})
    assert GGUFCheckpoint(path).generation_config == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma9"}, "'gemma9'; supported: llama, qwen2, qwen3, .*gemma3"),
        (
            {"tensors": {"blk.0.ffn_gate_exps.weight": (SHAPES["blk.0.ffn_up.weight"], Kind.F32)}},
            r"'blk.0.ffn_gate_exps.weight' has shape \[96, 64\], and one of all experts has three dimensions",
        ),
        (
            {"tensors": {"blk.0.ffn_up_exps.weight": ((4, INTERMEDIATE, HIDDEN), Kind.F32)}, "ARCH__expert_count": 8},
            r"'blk.0.ffn_up_exps.weight' has shape \[4, 96, 64\], and its metadata implies \[8, 96, 64\]",
        ),
        (
            {"tensors": {"blk.0.ffn_gate_shexp.weight": (SHAPES["blk.0.ffn_up.weight"], Kind.F32)}},
            "'blk.0.ffn_gate_shexp.weight' has no place",
        ),
        ({"ARCH__expert_count": 8}, "'blk.0.ffn_up_exps.weight' is missing"),
        ({"architecture": "qwen2", "ARCH__expert_count": 8}, "mixture of experts"),
        ({"ARCH__expert_gating_func": 2}, "gating function 2; supported: 1, softmax"),
        ({"ARCH__context_length": None}, "lacks 'llama.context_length'"),
        ({"ARCH__context_length": "long"}, "'llama.context_length' as long, which is no int"),
        ({"ARCH__context_length": 0}, "context length is 0"),
        ({"ARCH__attention__head_count": 0}, r"implies \[0, 64\]"),
        ({"ARCH__attention__head_count_kv": [1, 2]}, r"as \[1, 2\], which is no int"),
        ({"ARCH__feed_forward_length": 1 << 30}, "'blk.0.ffn_up.weight' has shape"),
        ({"ARCH__block_count": 1 << 30}, "announces 1073741824 layers, and 1 are there"),
        ({"ARCH__rope__scaling__type": "longrope"}, "'longrope'; supported: none, linear, yarn"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(write: Write, change: dict[str, Any], message: str) -> None:
    if "tensors" in change:
        change["tensors"] = weights() | {name: (numbers(name, shape), kind) for name, (shape, kind) in change["tensors"].items()}
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(write(**change))


def test_reading_what_is_not_there(write: Write) -> None:
    checkpoint = GGUFCheckpoint(write())
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head.weight'"):
        checkpoint.shape("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' has shape \[64\], and \[65\] was expected"):
        checkpoint.read("model.norm.weight", torch.empty(65))
    checkpoint.close()
    with pytest.raises(CheckpointError, match="was closed"):
        checkpoint.read("model.norm.weight", torch.empty(64))
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head.weight'"):
        checkpoint.grouped("lm_head.weight")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GG", "does not begin"),
        (b"<!DOCTYPE html>", "does not begin"),
        (b"GGUF" + (1).to_bytes(4, "little"), "version is 1"),
        (b"GGUF" + (3).to_bytes(4, "big"), "little-endian"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "ends within its header"),
    ],
)
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)


def open_and_use(path: Path) -> None:
    """All that loading a model does with a file."""
    checkpoint = GGUFCheckpoint(path)
    for name in checkpoint.names():
        checkpoint.read(name, torch.empty(checkpoint.shape(name)))
    Tokenizer.from_gguf(checkpoint.metadata).encode("a b")


@pytest.fixture
def small_model(write: Write) -> bytes:
    vocabulary = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", "a", "b", "\u2581", "<0x0A>", "<|im_end|>", "ab", ""],
        "scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, 0.0, 0.0, -4.0, 0.0],
        "token_type": [2, 3, 3, 1, 1, 1, 6, 3, 1, 5],
        "eos_token_id": 2,
        "add_bos_token": True,
    }
    path = write(weights(Kind.Q8_0), **{f"tokenizer__ggml__{key}": value for key, value in vocabulary.items()})
    open_and_use(path)
    return path.read_bytes()


def test_a_file_cut_short_is_refused_wherever_it_was_cut(small_model: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    for end in [*range(0, 2600, 7), *range(2600, len(small_model), 997), len(small_model) - 1]:
        path.write_bytes(small_model[:end])
        with pytest.raises(CheckpointError):
            read_header(path)


def test_a_damaged_header_is_refused_or_harmless(small_model: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(small_model)
    end = min(tensor.offset for tensor in read_header(path).tensors.values())
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(small_model)
        for position in random.integers(0, end, random.integers(1, 4)):
            damaged[position] = random.choice([0, 1, 0x7F, 0xFF, random.integers(256)])
        path.write_bytes(damaged)
        try:
            with np.errstate(all="ignore"):
                open_and_use(path)
        except CheckpointError:
            refused += 1
    assert refused > 500


def test_reading_takes_little_memory_beside_the_result(write: Write) -> None:
    checkpoint = GGUFCheckpoint(write(weights() | {"output.weight": (numbers("large", (4000, 512)), Kind.Q5_0)}))
    out = torch.empty(4000, 512, dtype=torch.bfloat16)
    checkpoint.read("lm_head.weight", out)
    tracemalloc.start()
    checkpoint.read("lm_head.weight", out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20


def test_the_groups_of_smollm2(smollm2_gguf: Path) -> None:
    checkpoint = GGUFCheckpoint(smollm2_gguf)
    start = time.perf_counter()
    grouped = {name: part.bits for name in checkpoint.names() if (part := checkpoint.grouped(name))}
    print(f"unpacked in {time.perf_counter() - start:.3f} s")
    assert len(grouped) == 211
    assert {name for name, bits in grouped.items() if bits == 8} == {"model.embed_tokens.weight"}
    name = "model.layers.7.self_attn.k_proj.weight"
    expected = torch.empty(checkpoint.shape(name))
    checkpoint.read(name, expected)
    part = checkpoint.grouped(name)
    assert part is not None
    assert torch.equal(part.dense(), expected)


def test_smollm2(smollm2_gguf: Path) -> None:
    start = time.perf_counter()
    checkpoint = GGUFCheckpoint(smollm2_gguf)
    opened = time.perf_counter()
    for name in checkpoint.names():
        out = torch.empty(checkpoint.shape(name), dtype=torch.bfloat16)
        checkpoint.read(name, out)
        assert out.isfinite().all()
    print(f"opened in {opened - start:.3f} s, read in {time.perf_counter() - opened:.3f} s")
    assert len(checkpoint.names()) == 272
    assert checkpoint.config["vocab_size"] == 49152
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 0]}
