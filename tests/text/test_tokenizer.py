from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from octavo.errors import ChatTemplateError, CheckpointError, InvalidValueError
from octavo.loading.gguf import read_header
from octavo.text.pretokenizers import PRE_TOKENIZERS
from octavo.text.tokenizer import Tokenizer

Metadata = dict[str, Any]
MakeMetadata = Callable[..., Metadata]
Golden = Callable[[str], dict[str, Any]]

COMBINING = {"cafe\u0301 e\u0301\u0302 n\u0303 a\u030a", "नमस्ते दुनिया", "สวัสดีชาวโลก"}
# Where llama.cpp only approximates the model's own pattern and Octavo follows the pattern. tekken and gpt-4o: a combining mark
# belongs to its word; deepseek-coder: a wide space is in the range of its third pattern and stays alone.
FOLLOWS_THE_MODEL = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2"), COMBINING),
    "deepseek-coder": {"nbsp\u00a0here\u2003em\u200bzero\u3000wide\u2028line"},
}


def assert_golden(tokenizer: Tokenizer, texts: list[str], result: dict[str, Any], known_differences: set[str] | None = None) -> None:
    assert tokenizer.encode("") == result["prefix"]
    for text, ids in zip(texts, result["ids"], strict=True):
        if text not in (known_differences or ()):
            assert tokenizer.encode(text, add_special_tokens=False) == ids, text
            assert tokenizer.encode(text) == result["prefix"] + ids


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_ids_are_llama_cpps(golden: Golden, bpe_metadata: MakeMetadata, pre: str) -> None:
    recorded = golden("bpe")
    result = next(result for result in recorded["results"] if pre in result["names"])
    assert_golden(Tokenizer.from_gguf(bpe_metadata(pre)), recorded["texts"], result, FOLLOWS_THE_MODEL.get(pre))


@pytest.mark.parametrize("name", ["space_prefix", "no_space_prefix"])
def test_sentencepiece_ids_are_llama_cpps(golden: Golden, spm_metadata: MakeMetadata, name: str) -> None:
    recorded = golden("spm")
    result = next(result for result in recorded["results"] if name in result["names"])
    assert_golden(Tokenizer.from_gguf(spm_metadata(name == "space_prefix")), recorded["texts"], result)


def test_smollm2_ids_are_llama_cpps(golden: Golden, smollm2_gguf: Path) -> None:
    metadata = read_header(smollm2_gguf).metadata
    start = time.perf_counter()
    tokenizer = Tokenizer.from_gguf(metadata)
    print(f"built in {time.perf_counter() - start:.3f} s")
    recorded = golden("smollm2")
    assert_golden(tokenizer, recorded["texts"], recorded["results"][0])
    for text in recorded["texts"]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (49152, 1, 2, (2, 0))
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}])[-9:] == tokenizer.encode(chat)[-9:]


@pytest.mark.slow
def test_gemma3_ids_are_sentencepieces(golden: Golden, gemma3_gguf: Path) -> None:
    tokenizer = Tokenizer.from_gguf(read_header(gemma3_gguf).metadata)
    recorded = golden("gemma3")
    assert_golden(tokenizer, recorded["texts"], recorded["results"][0])
    for text in recorded["texts"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (262144, 2, (1, 106))
    turn = tokenizer.encode("<start_of_turn>user\nhi<end_of_turn>\n")
    assert turn == [2, 105, 2364, 107, 2202, 106, 107]
    assert tokenizer.decode(turn) == "user\nhi\n"


def test_unknown_vocabularies_are_refused_by_name(bpe_metadata: MakeMetadata) -> None:
    with pytest.raises(CheckpointError, match=r"pre-tokenizer 'klingon'; supported: a\.x-4\.0, .*tekken"):
        Tokenizer.from_gguf(bpe_metadata("klingon"))
    with pytest.raises(CheckpointError, match=r"of kind 'rwkv'; supported: gpt2"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, r"lacks 'tokenizer.ggml.tokens'"),
        ({"merges": None}, r"lacks 'tokenizer.ggml.merges'"),
        ({"merges": ["a zz"]}, "merges do not fit"),
        ({"merges": ["ab"]}, "merges do not fit"),
        ({"token_type": [1, 2]}, "2 token types"),
        ({"tokens": ["a", "a"]}, "twice"),
        ({"pre": ["qwen2"]}, "pre-tokenizer"),
    ],
)
def test_inconsistent_vocabularies_are_refused(bpe_metadata: MakeMetadata, change: Metadata, message: str) -> None:
    metadata = bpe_metadata("qwen2") | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    if change.get("tokens"):
        del metadata["tokenizer.ggml.token_type"]
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(metadata)


def test_bos_and_eos_follow_the_flags_and_their_defaults(bpe_metadata: MakeMetadata, spm_metadata: MakeMetadata) -> None:
    flag, end = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
    for metadata, by_default in ((bpe_metadata("gpt-2"), False), (bpe_metadata("llama-bpe"), True), (spm_metadata(), True)):
        bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
        assert Tokenizer.from_gguf(metadata).encode("") == [bos] * by_default
        assert Tokenizer.from_gguf(metadata | {flag: True, end: True}).encode("") == [bos, eos]
        assert Tokenizer.from_gguf(metadata | {flag: False}).encode("") == []
        assert Tokenizer.from_gguf(metadata | {flag: True, end: True}).encode("", add_special_tokens=False) == []


def test_special_tokens_in_text_and_out_of_it(bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode("a<|im_start|>b<|user|>c")
    assert 1 in ids
    assert 4 in ids
    assert bpe_tokenizer.special_ids == {0, 1, 2, 3}
    assert bpe_tokenizer.decode(ids) == "ab<|user|>c"
    assert bpe_tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_start|>b<|user|>c"
    assert bpe_tokenizer.eos_token_ids == (2, 0)


def test_ids_beyond_the_vocabulary_stand_for_nothing(bpe_tokenizer: Tokenizer, spm_tokenizer: Tokenizer) -> None:
    for tokenizer in (bpe_tokenizer, spm_tokenizer):
        ids = tokenizer.encode("hello", add_special_tokens=False)
        assert tokenizer.decode([tokenizer.vocab_size, -1, 1 << 40, *ids]) == "hello"


def test_half_a_character_is_refused(bpe_tokenizer: Tokenizer, spm_tokenizer: Tokenizer) -> None:
    for tokenizer in (bpe_tokenizer, spm_tokenizer):
        with pytest.raises(InvalidValueError, match=r"'\\ud800', at position 1"):
            tokenizer.encode("a\ud800")


def test_a_character_nothing_can_spell_is_unknown(spm_metadata: MakeMetadata) -> None:
    metadata = spm_metadata()
    tokens = [token.replace("<0x", "<byte") for token in metadata["tokenizer.ggml.tokens"]]
    assert 0 in Tokenizer.from_gguf(metadata | {"tokenizer.ggml.tokens": tokens}).encode("\u2603")
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.unknown_token_id": len(tokens)}
    with pytest.raises(InvalidValueError, match="cannot spell '\u2603'"):
        Tokenizer.from_gguf(metadata).encode("\u2603")


@given(st.text(max_size=40))
def test_any_text_survives(bpe_tokenizer: Tokenizer, spm_tokenizer: Tokenizer, text: str) -> None:
    assert bpe_tokenizer.decode(bpe_tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
    plain = text.replace("\u2581", "").replace("<", "").replace("\n\n", "").replace("   ", "")
    assert spm_tokenizer.decode(spm_tokenizer.encode(plain, add_special_tokens=False), skip_special_tokens=False) == plain


def test_a_word_alone_is_the_word_in_a_text(spm_metadata: MakeMetadata) -> None:
    """Words are merged alone unless a piece joins them; with such a piece, whole texts are merged."""
    metadata = spm_metadata(space_prefix=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    joined = {**metadata, "tokenizer.ggml.tokens": [*tokens, "d\u2581m"]}
    joined |= {f"tokenizer.ggml.{key}": [*metadata[f"tokenizer.ggml.{key}"], value] for key, value in (("scores", 9.0), ("token_type", 1))}
    alone, together = Tokenizer.from_gguf(metadata), Tokenizer.from_gguf(joined)
    assert len(tokens) in together.encode("d made")
    text = "the water of the people  is hello world\n?"
    assert together.encode(text) == alone.encode(text)


CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_has_one_bos(bpe_metadata: MakeMetadata, template: str, adds_bos: bool) -> None:
    flags = {"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": adds_bos, "tokenizer.ggml.add_eos_token": True}
    ids = Tokenizer.from_gguf(bpe_metadata("qwen2") | flags).encode_chat([{"role": "user", "content": "hello"}])
    assert ids.count(0) == (1 if adds_bos or "bos_token" in template else 0)
    assert ids.index(1) == ids.count(0)
    assert ids.count(2) == 1  # the turn's own, and no EOS after it


def test_templates_by_name(bpe_metadata: MakeMetadata) -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with {{ tools[0] }}"}
    tokenizer = Tokenizer.from_gguf(bpe_metadata("qwen2") | templates)
    assert tokenizer.chat_template == "plain"
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=["hammer"]) == "with hammer"
    assert tokenizer.apply_chat_template([], chat_template="own {{ eos_token }}") == "own <|im_end|>"
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer.from_gguf(bpe_metadata("qwen2")).apply_chat_template([])


def save_folder(folder: Path, tokenizer: HFTokenizer, config: dict[str, Any]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return folder


@pytest.fixture
def byte_level_folder(tmp_path: Path, golden: Golden) -> Path:
    merges = [tuple(merge.split(" ")) for merge in golden("bpe")["merges"]]
    pieces = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)])
    tokenizer = HFTokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["qwen2"].patterns[0]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    return save_folder(
        tmp_path,
        tokenizer,
        {"bos_token": "<|begin|>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}, "chat_template": CHATML},
    )


@pytest.fixture
def sentencepiece_folder(tmp_path: Path, spm_metadata: MakeMetadata) -> Path:
    pieces = {piece: index for index, piece in enumerate(spm_metadata()["tokenizer.ggml.tokens"])}
    merges = [
        (piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece)) if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    tokenizer = HFTokenizer(models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return save_folder(tmp_path, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True})


@pytest.mark.parametrize("kind", ["byte_level_folder", "sentencepiece_folder"])
def test_a_folder_is_read_as_transformers_reads_it(request: pytest.FixtureRequest, golden: Golden, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = request.getfixturevalue(kind)
    oracle, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.bos_token_id == oracle.bos_token_id
    assert tokenizer.eos_token_ids == (oracle.eos_token_id,)
    assert tokenizer.special_ids == set(oracle.all_special_ids) | {
        token_id for token_id, token in oracle.added_tokens_decoder.items() if token.special
    }
    for text in golden("bpe")["texts"]:
        for special in (True, False):
            ids = oracle(text, add_special_tokens=special)["input_ids"]
            assert tokenizer.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def test_byte_level_decoding_is_tokenizers(byte_level_folder: Path) -> None:
    oracle, tokenizer = HFTokenizer.from_file(str(byte_level_folder / "tokenizer.json")), Tokenizer.from_folder(byte_level_folder)

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)

    check()


def test_where_a_folder_keeps_its_template(byte_level_folder: Path) -> None:
    path = byte_level_folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    assert Tokenizer.from_folder(byte_level_folder).chat_template == CHATML
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    path.write_text(
        json.dumps(config | {"chat_template": named, "added_tokens_decoder": {"9999": {"content": "<|late|>", "special": True}}})
    )
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    assert (tokenizer.apply_chat_template([]), tokenizer.apply_chat_template([], tools=[1])) == ("one", "two")
    assert tokenizer.encode("<|late|>", add_special_tokens=False) == [tokenizer.vocab_size - 1]
    (byte_level_folder / "chat_template.jinja").write_text("beside")
    assert Tokenizer.from_folder(byte_level_folder).chat_template == "beside"


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        Tokenizer.from_folder(tmp_path)
    tokenizer = HFTokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="decodes by WordPiece; supported"):
        Tokenizer.from_folder(tmp_path)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is damaged"):
        Tokenizer.from_folder(tmp_path)
