"""Record the token ids that llama.cpp gives awkward texts, as the golden files of tests/text.

    python scripts/record_token_ids.py LLAMA_TOKENIZE SMOLLM2_GGUF

LLAMA_TOKENIZE is llama.cpp's `llama-tokenize`; its libraries are looked for beside it. Recorded are SmolLM2's own vocabulary, a small
byte-level BPE one under every pre-tokenizer that Octavo knows, and a small SentencePiece one with and without a space prefix.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from octavo.loading.gguf import read_header
from octavo.text.pretokenizers import PRE_TOKENIZERS

TESTS = Path(__file__).resolve().parent.parent / "tests"
vocabularies = runpy.run_path(str(TESTS / "text/conftest.py"))

# ruff: noqa: RUF001 (letters that look like others are the point)
TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\t\ttabs\tand \t spaces",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces   three    four",
    "line\nbreak\r\nwindows\r\n\r\nend\n",
    "  \n  indented\n    more\n\n\n",
    "I'm you're they've we'll he'd it's don't",
    "I'M YOU'RE THEY'VE WE'LL HE'D IT'S DON'T",
    "rock'n'roll 'quoted' ''double''",
    "1 12 123 1234 12345 123456789 3.14159 1,000,000",
    "٣٤٥ ½ ² Ⅷ 一二三",
    "x=1;y+=2 # comment\nfor (int i = 0; i < 10; ++i) { a[i] <<= 2; }",
    "def f(x):\n    return {'a': [1, 2], \"b\": None}\n",
    "https://example.com/path?q=a+b&c=%20#frag user@example.org",
    "C:\\Users\\name\\file.txt $HOME/.config ~/x",
    "...!!! ?!? -- --- ——— “smart” ‘quotes’ «guillemets»",
    "emoji 😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷",
    "cafe\u0301 e\u0301\u0302 n\u0303 a\u030a",
    "naïve café straße Ærøskøbing Ångström",
    "你好，世界。今天天气怎么样？",
    "こんにちは世界 カタカナ ひらがな",
    "안녕하세요 세계",
    "مرحبا بالعالم كيف حالك؟",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Привет, мир! Ёлка",
    "Γειά σου Κόσμε",
    "mixed英語and日本語とrussianрусский123текст",
    "camelCaseWords HTTPServer XMLHttpRequest iPhone ABCdefGHI",
    "snake_case_words kebab-case-words SCREAMING_CASE",
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 3,
    "a" * 100,
    "nbsp\u00a0here\u2003em\u200bzero\u3000wide\u2028line",
    "\ufeffbom \u00ad soft \u200d joiner",
    "nul \x00 inside",
    "control \x01\x02\x1b[0m \x7f bytes",
    "$100 + 50% = ^caret | `tick` <tag> ~tilde",
    "math ∑∫√ ≤ ≥ ± × ÷ → ⇒ ∀x∈ℝ",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "before<|im_end|>after <|im_end|> spaced",
    "<s>[INST] hello world [/INST]</s> the end",
    "<|user|>the people\n\n   of the world",
    "hello hello  hello world the water of it and then them these",
]


def main() -> None:
    binary, smollm2 = Path(sys.argv[1]), read_header(sys.argv[2]).metadata
    shapes = {key: value for key, value in smollm2.items() if key.startswith("llama.") and key != "llama.vocab_size"}
    merges = train_merges()
    under_pre = {name: {**shapes, **vocabularies["make_bpe_metadata"](merges, name)} for name in PRE_TOKENIZERS}
    spaced = {name: {**shapes, **vocabularies["make_spm_metadata"](name == "space_prefix")} for name in ("space_prefix", "no_space_prefix")}
    write("bpe", {name: tokenize(binary, metadata, "<sep>") for name, metadata in under_pre.items()}, merges=merges)
    write("spm", {name: tokenize(binary, metadata, "<unk>") for name, metadata in spaced.items()})
    write("smollm2", {"smollm2": tokenize(binary, smollm2, "<repo_name>")})


def train_merges() -> list[str]:
    """Merges learned from the texts themselves without cutting them into words, so that every cut a pre-tokenizer makes shows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, max_token_length=10, show_progress=False)
    # llama.cpp makes control tokens of learned ones that look like an end of text, so none may be learned.
    tokenizer.train_from_iterator([text for text in TEXTS if "</s>" not in text], trainer)
    return [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def tokenize(binary: Path, metadata: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Ids of every text, and those put before a prompt, from one run: a special token between the texts keeps them apart."""
    with tempfile.TemporaryDirectory() as folder:
        model, prompt = Path(folder, "vocabulary.gguf"), Path(folder, "prompt.txt")
        write_vocabulary(model, metadata)
        prompt.write_text(separator + "".join(text + separator for text in TEXTS), encoding="utf-8", newline="")
        command = [binary, "--model", model, "--file", prompt, "--ids", "--no-escape", "--log-disable"]
        output = subprocess.run(command, env={**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}, check=True, capture_output=True)
    ids = json.loads(output.stdout)
    separator_id = metadata["tokenizer.ggml.tokens"].index(separator)
    groups: list[list[int]] = [[]]
    for token_id in ids:
        if token_id == separator_id:
            groups.append([])
        else:
            groups[-1].append(token_id)
    if len(groups) != len(TEXTS) + 2:
        raise SystemExit(f"{len(groups) - 2} texts came back of {len(TEXTS)}")
    return {"prefix": groups[0], "ids": groups[1:-1]}


def write_vocabulary(path: Path, metadata: Mapping[str, Any]) -> None:
    """A GGUF file of metadata alone."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write(name: str, recorded: Mapping[str, dict[str, Any]], **extra: Any) -> None:
    """One file: the texts, and each distinct result once, with the names of all that gave it."""
    results: list[dict[str, Any]] = []
    for source, result in recorded.items():
        same = next((known for known in results if all(known[key] == result[key] for key in result)), None)
        if same is None:
            results.append({"names": [source], **result})
        else:
            same["names"].append(source)
    content = {"texts": TEXTS, **extra, "results": results}
    (TESTS / f"data/token_ids_{name}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
