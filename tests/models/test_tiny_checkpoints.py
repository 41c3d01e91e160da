"""Every model, and every variation of one, against transformers on tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.errors import CheckpointError
from tests.models.checkpoints import CASES, GEMMA3, LLAMA3, LONGROPE, MIXTRAL, PHI3, QWEN3_MOE, ids, make
from tests.oracle import logits, make_runner, reference_logits


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_in_any_chunking(name: str, tmp_path: Path) -> None:
    model_type, differences = CASES[name]
    model = make(tmp_path, model_type, differences)
    tokens = ids(100)
    expected = reference_logits(model, tokens)
    runner = make_runner(tmp_path, block_size=8)
    whole = logits(runner, tokens)
    assert expected.std() > 0.1, "the checkpoint is too tame to tell anything"
    assert (whole - expected).abs().max() < 2e-4
    for chunk in (1, 7, 16):
        assert torch.equal(logits(runner, tokens, chunk), whole)


def test_dynamic_rotation_past_the_trained_context_is_that_of_token_by_token_generation(tmp_path: Path) -> None:
    model = make(tmp_path, "llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 40})
    tokens = ids(60)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        parts = [model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0] for token in tokens]
    assert (logits(make_runner(tmp_path), tokens) - torch.cat(parts)).abs().max() < 2e-4


@pytest.mark.parametrize("stored", ["absent", "present"])
def test_a_tied_head_is_the_embedding_whether_or_not_the_file_repeats_it(stored: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make(tmp_path, "llama", {"tie_word_embeddings": True})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if stored == "present":
        tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    assert (logits(make_runner(tmp_path), ids(20)) - reference_logits(model, ids(20))).abs().max() < 2e-4


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"model_type": "mamba"}, r"model_type: 'mamba' cannot run through transformers here: layer_types: linear_attention"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}, "rope_parameters": None}, r"type 'spiral' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, r"type 'yarn' needs factor"),
        ({"rms_norm_eps": "x"}, r"rms_norm_eps: 'x'; allowed: a number above 0"),
        ({"rms_norm_eps": -1}, r"rms_norm_eps: -1; allowed"),
        ({"num_attention_heads": 0}, r"num_attention_heads: 0; allowed: a whole number from 1"),
        ({"vocab_size": 256.0}, r"vocab_size: 256\.0; allowed"),
        ({"num_hidden_layers": "3"}, r"num_hidden_layers: '3'; allowed"),
        ({"max_position_embeddings": 10**9}, r"max_position_embeddings: 1000000000; allowed"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings: 'false'; allowed: true or false"),
        ({"rope_parameters": 5}, r"rope_parameters: 5; allowed: an object"),
        ({"rope_parameters": {"rope_type": ["x"]}}, r"rope_type: \['x'\]; allowed: a word"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, r"factor: 0; allowed: a number above 0"),
        ({"rope_parameters": {"rope_theta": -1}}, r"rope_theta: -1; allowed"),
        ({"model_type": "mistral", "sliding_window": 0}, r"sliding_window: 0; allowed"),
        ({"model_type": "qwen2", "use_sliding_window": True}, r"lacks sliding_window"),
        ({"model_type": "gemma3_text", "layer_types": ["linear_attention"] * 3}, r"layer_types: 'linear_attention' is not supported"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, r"layer_types: .*; allowed: a list of 3 names"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, r"use_bidirectional_attention: True is not supported"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, r"no_rope_layers: \[1, 0\]; allowed: 3 times 0 or 1"),
        ({"model_type": "phi3", "rope_parameters": LONGROPE | {"long_factor": [1.0]}}, r"long_factor has 1 numbers; 8 are needed"),
        (
            {"model_type": "phi3", "rope_parameters": LONGROPE | {"short_factor": [-1.0]}},
            r"short_factor: .*; allowed: a list of numbers above 0",
        ),
        ({"model_type": "phi3", "rope_parameters": {"type": "su"}}, r"type 'longrope' needs short_factor, long_factor"),
        ({"model_type": "phi3"}, r"needs the tensor model.layers.0.self_attn.qkv_proj.weight, which is not there"),
        ({"model_type": "granite", "logits_scaling": 0}, r"logits_scaling: 0; allowed: a number above 0"),
        ({"model_type": "mixtral"}, r"lacks num_local_experts"),
        ({"model_type": "mixtral", **MIXTRAL, "num_experts_per_tok": 6}, r"num_experts_per_tok: 6; allowed: a whole number from 1 to 5"),
        ({"model_type": "mixtral", **MIXTRAL}, r"needs the tensor model.layers.0.block_sparse_moe.gate.weight, which is not there"),
        ({"model_type": "qwen3_moe"}, r"lacks num_experts"),
        ({"model_type": "qwen3_moe", **QWEN3_MOE, "moe_intermediate_size": 0}, r"moe_intermediate_size: 0; allowed"),
        ({"model_type": "qwen3_moe", **QWEN3_MOE, "mlp_only_layers": 1}, r"mlp_only_layers: 1; allowed: a list of layers' numbers"),
        ({"model_type": "qwen3_moe", **QWEN3_MOE, "decoder_sparse_step": 0}, r"decoder_sparse_step: 0; allowed"),
        ({"hidden_act": "gelu"}, r"hidden_act: 'gelu' is not supported; supported: silu, swish, gelu_pytorch_tanh"),
        ({"hidden_size": None}, r"lacks hidden_size"),
        ({"num_key_value_heads": 3}, r"num_attention_heads: 4 is no multiple of num_key_value_heads: 3"),
        ({"intermediate_size": 81}, r"mlp.gate_proj.weight \[80, 48\], .*; the configuration says \[162, 48\]"),
        ({"num_hidden_layers": 4}, r"needs the tensor model.layers.3.input_layernorm.weight, which is not there"),
        ({"num_hidden_layers": 2}, r"tensors that this model does not use: model.layers.2"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_named(edit: dict[str, Any], said: str, tmp_path: Path) -> None:
    make(tmp_path, "llama", {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(CheckpointError, match=said):
        make_runner(tmp_path)


def test_gemma_3_under_the_older_keys_and_defaults(tmp_path: Path) -> None:
    """A period in place of a list, a base beside the other; and six layers a period where nothing is said."""
    model = make(tmp_path, "gemma3_text", GEMMA3 | {"num_hidden_layers": 7, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0})
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    assert written["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    del written["layer_types"], written["rope_parameters"]
    path.write_text(json.dumps(written))
    assert (logits(make_runner(tmp_path), ids(100)) - reference_logits(model, ids(100))).abs().max() < 2e-4
    path.write_text(json.dumps(written | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}))
    assert (logits(make_runner(tmp_path), ids(100)) - reference_logits(model, ids(100))).abs().max() < 2e-4


def test_seed_oss_by_its_own_defaults(tmp_path: Path) -> None:
    """What a configuration leaves out is what transformers takes for this type, not what a Llama would have."""
    usual = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}
    model = make(tmp_path, "seed_oss", usual | {"num_attention_heads": 16})
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    assert usual.keys() <= written.keys()
    path.write_text(json.dumps({name: value for name, value in written.items() if name not in usual}))
    assert (logits(make_runner(tmp_path), ids(100)) - reference_logits(model, ids(100))).abs().max() < 2e-4


def test_a_stretched_context_is_the_one_that_gemmas_configuration_names(tmp_path: Path) -> None:
    make(tmp_path, "gemma3_text", GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert make_runner(tmp_path).capacity.longest == 128


def test_the_longest_a_sequence_may_become_chooses_the_stretch(tmp_path: Path) -> None:
    """transformers goes by the length at hand; both mean the same up to the original context, and beyond it."""
    model = make(tmp_path, "phi3", PHI3)
    short = logits(make_runner(tmp_path, max_model_len=32), ids(30))
    assert (short - reference_logits(model, ids(30))).abs().max() < 2e-4
    assert (short - logits(make_runner(tmp_path), ids(30))).abs().max() > 0.1


def test_divisors_in_the_checkpoint_stretch_the_rotation_as_the_configuration_would(tmp_path: Path) -> None:
    """A GGUF of a Llama-3.1 type model says how it is stretched by the tensor rope_freqs alone."""
    from safetensors.torch import load_file, save_file

    model = make(tmp_path, "llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    stretched = model.model.rotary_emb.inv_freq
    plain = 1.0 / (10000.0 ** (torch.arange(0, 16, 2).float() / 16))
    assert not torch.allclose(plain, stretched)
    tensors = load_file(tmp_path / "model.safetensors") | {"rope_freqs.weight": plain / stretched}
    save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10000.0}))
    assert (logits(make_runner(tmp_path), ids(100)) - reference_logits(model, ids(100))).abs().max() < 2e-4
