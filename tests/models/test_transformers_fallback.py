"""Models of transformers with Octavo's attention: what runs is transformers' to the digit, what cannot run is told before."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from octavo.loading import open_checkpoint
from octavo.models import FALLBACK
from tests.models import checkpoints
from tests.models.checkpoints import ids
from tests.models.fallback_checkpoints import make
from tests.models.test_company import PROMPTS, add_tokenizer, answers, tight
from tests.oracle import logits, make_runner, reference_logits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "gpt neox": ("gpt_neox", {}),
    "gpt 2, transposed weights and learned positions": ("gpt2", {}),
    "gpt bigcode, one KV head": ("gpt_bigcode", {}),
    "opt, a decoder within": ("opt", {}),
    "cohere, logits scaled": ("cohere", {"logit_scale": 4.0, "use_qk_norm": True}),
    "cohere 2, windows on some layers": ("cohere2", {"logit_scale": 4.0}),
    "phi, partly rotated": ("phi", {}),
    "phi moe, a window that only the mask tells": ("phimoe", {}),
    "starcoder 2, window": ("starcoder2", {}),
    "deepseek 3, values narrower than keys": ("deepseek_v3", {}),
    "qwen 2 moe, experts merged at load": ("qwen2_moe", {}),
    "biogpt, its embedding scaled by code of its own": ("biogpt", {}),
    "gemma 3n, layers that share keys": ("gemma3n_text", {}),
    "llama, forced": ("llama", {}),
    "llama, yarn, forced": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    "llama, dynamic, forced": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "gemma 2, caps, forced": ("gemma2", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 40}),
    "mistral, window, forced": ("mistral", {}),
}
NAMES = ["stablelm", "cohere 2, windows on some layers", "qwen 2 moe, experts merged at load", "llama, forced"]
FORCED = {"model_impl": "transformers"}


def fallback(name: str) -> dict[str, Any]:
    """Settings that a case needs to run through transformers."""
    return FORCED if "forced" in name else {}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_transformers_in_any_chunking(name: str, tmp_path: Path) -> None:
    model_type, differences = CASES[name]
    model = make(tmp_path, model_type, **differences)
    tokens = ids(100)
    expected = reference_logits(model, tokens)
    runner = make_runner(tmp_path, block_size=8, **fallback(name))
    assert type(runner.model).__name__ == "FallbackModel"
    assert expected.std() > 0.1, "the checkpoint is too tame to tell anything"
    for chunk in (None, 7):
        assert (logits(runner, tokens, chunk) - expected).abs().max() < 2e-4
    assert runner.capacity.vocab_size == 131
    assert runner.capacity.longest == 128


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_transformers_in_any_company(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, CASES[name][0], **CASES[name][1])
    add_tokenizer(tmp_path, 131)
    with LLM(tmp_path, dtype="float32", prefix_caching=False, max_blocks=200, **fallback(name)) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        three = llm.generate([PROMPTS[0]], SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True))[0].outputs
        assert len({tuple(one.token_ids) for one in three}) == 3
        small = tight(llm)
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        assert answer == reference_logits(model, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()
    with LLM(tmp_path, dtype="float32", check_invariants=True, **small, **fallback(name)) as llm:
        assert answers(llm, PROMPTS) == alone
        assert answers(llm, PROMPTS[::-1]) == alone[::-1]
        assert llm.stats().preemptions > 0
        assert llm.stats().cached_tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_other_precisions_stay_near(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, CASES[name][0], **CASES[name][1])
    exact = reference_logits(model, ids(100))

    def off(found: torch.Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    theirs = off(reference_logits(model.bfloat16(), ids(100)))
    assert off(logits(make_runner(tmp_path, dtype="bfloat16", **fallback(name)), ids(100))) < 1.1 * theirs
    cached = off(logits(make_runner(tmp_path, kv_cache_dtype="int8", **fallback(name)), ids(100)))
    assert 1e-4 < cached < 0.05
    whole = make_runner(tmp_path, **fallback(name))
    eighths = make_runner(tmp_path, quantization="int8", kv_cache_dtype="float32", **fallback(name))
    assert 1e-3 < off(logits(eighths, ids(100))) < 0.1
    assert eighths.capacity.weight_bytes < whole.capacity.weight_bytes


def test_memory_is_accounted_for_and_a_tied_embedding_is_held_once(tmp_path: Path) -> None:
    model = make(tmp_path, "stablelm", tie_word_embeddings=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    found = make_runner(tmp_path).capacity.weight_bytes
    assert count * 4 <= found < count * 4 * 1.15  # panels are padded
    assert torch.allclose(logits(make_runner(tmp_path), ids(20)), reference_logits(model, ids(20)), atol=2e-4)


def test_one_chooses_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path / "a", "stablelm")
    make(tmp_path / "b", "llama")
    with caplog.at_level(logging.WARNING, "octavo"):
        make_runner(tmp_path / "a")
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"model_type 'stablelm' runs through transformers {importlib.metadata.version('transformers')}"
    ]
    with pytest.raises(CheckpointError, match=r"model_type: 'stablelm' is not supported natively; supported: .*llama"):
        make_runner(tmp_path / "a", model_impl="octavo")
    assert type(make_runner(tmp_path / "b").model).__name__ == "Decoder"
    assert type(make_runner(tmp_path / "b", model_impl="transformers").model).__name__ == "FallbackModel"


ALIBI = "its attention does not go through transformers' attention interface, as where ALiBi or other biases enter it"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("mamba", {}, "layer_types: linear_attention; allowed: full_attention, sliding_attention"),
    "mamba and attention": ("jamba", {"num_hidden_layers": 8}, "layer_types: linear_attention"),
    "rwkv": ("rwkv", {"attention_hidden_size": 64}, "it keeps a state outside attention"),
    "alibi, bloom": ("bloom", {}, ALIBI),
    "alibi, mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, ALIBI),
    "code of its own": ("gptj", {"rotary_dim": 8}, ALIBI),
    "encoder and decoder": ("bart", {}, "its code takes no positions"),
    "sinks": ("gpt_oss", {}, r"model\.layers\.0\.self_attn has attention sinks"),
    "chunks": ("llama4_text", {}, "layer_types: chunked_attention"),
    "sparse": ("deepseek_v32", {"head_dim": 8}, "layer_types: deepseek_sparse_attention"),
    "both ways": ("bert-generation", {}, "has a mask that is neither causal nor a sliding window"),
    "a mask of its own": ("doge", {}, "has a mask that is neither causal nor a sliding window"),
    "attention twice": ("diffllama", {}, "attends more than once for a token"),
    "positions counted otherwise": ("roberta", {"is_decoder": True}, "hidden states are off by .*counts positions otherwise"),
    "control by numbers": ("jetmoe", {}, "cannot be looked through before its weights are read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    model_type, differences, said = REFUSED[name]
    make(tmp_path, model_type, **differences)
    with pytest.raises(CheckpointError, match=rf"model_type: '{model_type}' cannot run through transformers here: .*{said}"):
        make_runner(tmp_path)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"model_type": "t5"}, "'t5' cannot run through transformers here: transformers .* has no causal language model of this type"),
        ({"model_type": "nonsense"}, "'nonsense' cannot run through transformers here: transformers .* does not read its configuration"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "it is an encoder with a decoder"),
        ({"model_type": "gemma4"}, "it is a model of more than text"),
        ({"model_type": "gpt2", "n_positions": None}, "does not read its configuration|lacks max_position_embeddings"),
        ({"hidden_size": "x"}, "does not read its configuration"),
        ({"hidden_size": 66}, "it cannot be built"),
        ({"num_hidden_layers": 5}, r"the model needs the tensors model\.layers\.4\.input_layernorm"),
        ({"num_hidden_layers": 3}, r"holds tensors that this model does not use: model\.layers\.3\."),
        ({"intermediate_size": 81}, r"transformers cannot read these weights \(.*(size|shape)"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_named(edit: dict[str, Any], said: str, tmp_path: Path) -> None:
    make(tmp_path, "stablelm")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(CheckpointError, match=said):
        make_runner(tmp_path)


def test_layers_of_other_heads_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "gemma4_text", head_dim=16, global_head_dim=32, layer_types=["sliding_attention", "full_attention"] * 2)
    with pytest.raises(CheckpointError, match="its layers differ in their heads of keys and values: 2 of 16 features and 2 of 32 features"):
        make_runner(tmp_path)


def test_a_gguf_file_is_not_for_transformers(smollm2_gguf: Path) -> None:
    with pytest.raises(CheckpointError, match="a GGUF file runs natively or not at all"):
        make_runner(smollm2_gguf, model_impl="transformers")


def test_without_transformers_it_is_said_how_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "stablelm")

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("octavo.models.transformers_fallback.importlib.import_module", absent)
    with pytest.raises(CheckpointError, match=r"'stablelm' cannot run .*not installed; pip install 'octavo\[transformers\]'"):
        make_runner(tmp_path)


def test_no_sequence_becomes_so_long_that_others_would_rotate_otherwise(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "phi3", checkpoints.PHI3)
    assert make_runner(tmp_path, model_impl="transformers").capacity.longest == 32


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FALLBACK)
def test_every_type_that_is_listed_runs(model_type: str, tmp_path: Path) -> None:
    model = make(tmp_path, model_type)
    runner = make_runner(tmp_path, block_size=8, model_impl="transformers")
    expected = reference_logits(model, ids(100))
    assert expected.std() > 0.01
    for chunk in (None, 7):
        assert (logits(runner, ids(100), chunk) - expected).abs().max() < 2e-4


@pytest.mark.slow
def test_real_weights_give_the_same_natively_and_through_transformers(smollm2_gguf: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    (tmp_path / "config.json").write_text(json.dumps(dict(checkpoint.config)))
    tensors = {name: torch.empty(checkpoint.shape(name)) for name in checkpoint.names()}
    for name, tensor in tensors.items():
        checkpoint.read(name, tensor)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    tokens = torch.randint(5, 40000, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    native, other = (logits(make_runner(tmp_path, model_impl=impl), tokens, 128) for impl in ("octavo", "transformers"))
    assert (native - other).abs().max() < 5e-4
