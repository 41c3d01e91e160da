"""The vocabulary inside a GGUF file: byte-level BPE (`gpt2`) and SentencePiece (`llama`).

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what a missing key means follows llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError
from octavo.text.pretokenizers import pre_tokenizer
from octavo.text.sentencepiece import SentencePiece
from octavo.text.vocabulary import Vocabulary

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_END_OF_TURN = ("<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises CheckpointError where the vocabulary is missing, inconsistent, or of a kind not known."""
    source = _Source(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return source.byte_level_bpe()
    if model == "llama":
        return source.sentencepiece()
    raise CheckpointError(f"the file holds a vocabulary of kind {model!r}; supported: gpt2 (byte-level BPE), llama (SentencePiece)")


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer, the declared end of text first.

    Older converters declare no end of turn, so control tokens that carry a well-known name of one count as well.
    """
    tokens, types = (_list_or_empty(metadata, key) for key in ("tokens", "token_type"))
    declared = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    named = [tokens.index(text) for text in _END_OF_TURN if text in tokens]
    named = [token_id for token_id in named if token_id < len(types) and types[token_id] == _CONTROL]
    return list(dict.fromkeys([token_id for token_id in declared if isinstance(token_id, int)] + named))


def _list_or_empty(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, list) else []


class _Source:
    """The tokenizer's keys of one file, read with their defaults."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(self._list("tokens", str))]
        self.types: list[int] = self._list("token_type", int) if "tokenizer.ggml.token_type" in metadata else [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise CheckpointError(f"the vocabulary has {len(self.tokens)} tokens and {len(self.types)} token types")
        if len(set(self.tokens)) != len(self.tokens):
            raise CheckpointError("the vocabulary lists a token twice")
        self.special = frozenset(i for i, kind in enumerate(self.types) if kind in (_CONTROL, _UNKNOWN))
        self.user_defined = frozenset(i for i, kind in enumerate(self.types) if kind == _USER_DEFINED)

    def byte_level_bpe(self) -> Vocabulary:
        from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors

        pre = pre_tokenizer(self._get("pre", "default"))
        merges = [_halves(merge) for merge in self._list("merges", str)]
        vocabulary = {token: token_id for token_id, token in enumerate(self.tokens)}
        try:
            tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.whole_words_first))
        except Exception as error:  # tokenizers raises Exception itself, for a merge of tokens that are not listed
            raise CheckpointError(f"the vocabulary's merges do not fit its tokens: {error}") from error
        words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.add_special_tokens([AddedToken(self.tokens[i], normalized=False, special=True) for i in sorted(self.special)])
        tokenizer.add_tokens([AddedToken(self.tokens[i], normalized=False) for i in sorted(self.user_defined)])
        before, after = self._around(pre.adds_bos, bos=self._id("bos"), eos=self._id("eos"))
        names = {self.tokens[token_id]: token_id for token_id in before + after}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(self.tokens[i] for i in before), "$A", *(self.tokens[i] for i in after)], special_tokens=list(names.items())
        )
        return self._vocabulary(
            encode=lambda text, add_special_tokens: tokenizer.encode(text, add_special_tokens=add_special_tokens).ids,
            byte_level=True,
            strips_leading_space=False,
            bos=self._id("bos"),
            eos=self._id("eos"),
        )

    def sentencepiece(self) -> Vocabulary:
        scores = self._list("scores", (int, float))
        if len(scores) != len(self.tokens):
            raise CheckpointError(f"the vocabulary has {len(self.tokens)} tokens and {len(scores)} scores")
        bos, eos = self._id("bos", 1), self._id("eos", 2)
        before, after = self._around(True, bos, eos)
        space_prefix = self._get("add_space_prefix", True)
        encoder = SentencePiece(
            pieces=self.tokens,
            scores=scores,
            added={self.tokens[i]: i for i in self.special | self.user_defined},
            prefix=before,
            suffix=after,
            unknown_id=self._id("unknown", 0),
            space_prefix=space_prefix,
        )
        return self._vocabulary(encode=encoder.encode, byte_level=False, strips_leading_space=space_prefix, bos=bos, eos=eos)

    def _vocabulary(self, *, encode: Any, byte_level: bool, strips_leading_space: bool, bos: int | None, eos: int | None) -> Vocabulary:
        ids = {"bos": bos, "eos": eos, "unk": self._id("unknown"), "pad": self._id("padding")}
        ends = [token_id for token_id in end_token_ids(self._metadata) if token_id < len(self.tokens)]
        return Vocabulary(
            encode=encode,
            piece=self.tokens.__getitem__,
            size=len(self.tokens),
            byte_level=byte_level,
            strips_leading_space=strips_leading_space,
            verbatim_ids=self.special | self.user_defined,
            special_ids=self.special,
            bos_token_id=bos,
            eos_token_id=eos,
            eos_token_ids=tuple(dict.fromkeys([*([] if eos is None else [eos]), *ends])),
            named_tokens={f"{name}_token": self.tokens[token_id] for name, token_id in ids.items() if token_id is not None},
            chat_templates=self._chat_templates(),
        )

    def _chat_templates(self) -> dict[str, str]:
        key = "tokenizer.chat_template"
        named = {name[len(key) + 1 :]: text for name, text in self._metadata.items() if name.startswith(f"{key}.")}
        if key in self._metadata:
            named["default"] = self._metadata[key]
        return {name: text for name, text in named.items() if isinstance(text, str)}

    def _around(self, adds_bos: bool, bos: int | None, eos: int | None) -> tuple[list[int], list[int]]:
        """What goes before and after a prompt."""
        before = [bos] if bos is not None and self._get("add_bos_token", adds_bos) else []
        after = [eos] if eos is not None and self._get("add_eos_token", False) else []
        return before, after

    def _get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _id(self, name: str, default: int | None = None) -> int | None:
        token_id = self._get(f"{name}_token_id", default)
        return token_id if isinstance(token_id, int) and 0 <= token_id < len(self.tokens) else None

    def _list(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        values = self._get(key, None)
        if not isinstance(values, list) or not values or not isinstance(values[0], kind):
            raise CheckpointError(f"the file's metadata lacks 'tokenizer.ggml.{key}', without which its text cannot be read")
        return values


def _halves(merge: str) -> tuple[str, str]:
    """A merge is written as its two halves with a space between; the first may itself begin with a space."""
    middle = merge.find(" ", 1)
    return merge[:middle], merge[middle + 1 :]
