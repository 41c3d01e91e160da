"""Text to token ids and back, for every kind of vocabulary Octavo reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import InvalidValueError
from octavo.text.vocabulary import Vocabulary


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others are numbered from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """Encodes prompts and chats, decodes answers.

    A token stands for bytes, and a text is its tokens' bytes read as UTF-8, each malformed sequence becoming one U+FFFD. That is
    what `tokenizers` does for byte-level vocabularies, and for SentencePiece ones wherever their byte tokens form characters;
    where they do not it makes each byte of the run a U+FFFD, which no stream could do without taking text back.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._token_bytes: dict[int, bytes] = {}
        self.vocab_size = vocabulary.size
        self.special_ids = vocabulary.special_ids
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_id = vocabulary.eos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        self.strips_leading_space = vocabulary.strips_leading_space

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From an HF folder. Raises CheckpointError where `tokenizer.json` is missing or cannot be read."""
        from octavo.text.folder_vocabulary import vocabulary_from_folder

        return cls(vocabulary_from_folder(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file's metadata. Raises CheckpointError where its vocabulary is missing, inconsistent or of an unknown kind."""
        from octavo.text.gguf_vocabulary import vocabulary_from_gguf

        return cls(vocabulary_from_gguf(metadata))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt; names of special tokens in it become those tokens. The flag adds the BOS and EOS the model wants.

        Raises InvalidValueError for text that is no Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidValueError(f"the prompt holds half a character, {text[error.start]!r}, at position {error.start}") from error
        return self._vocabulary.encode(text, add_special_tokens)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True, continuation: bool = False) -> str:
        """Text of these ids; those beyond the vocabulary stand for nothing.

        A SentencePiece vocabulary marks the start of a text with a space of its own, which is dropped here; `continuation` keeps
        it, for ids that follow other text.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join([self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped])
        if self.strips_leading_space and not continuation:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, which may be part of a character; nothing for an id beyond the vocabulary."""
        if (known := self._token_bytes.get(token_id)) is None:
            known = self._token_bytes[token_id] = self._spelled(token_id)
        return known

    def _spelled(self, token_id: int) -> bytes:
        piece = self._vocabulary.piece(token_id) if 0 <= token_id < self.vocab_size else ""
        if not piece:
            return b""
        if token_id in self._vocabulary.verbatim_ids:
            return piece.encode()
        if self._vocabulary.byte_level:
            spelled = [_BYTES.get(character) for character in piece]
            return piece.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(byte[1])
        return piece.replace("\u2581", " ").encode()

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, in Jinja; None for a model that has none."""
        return self._vocabulary.chat_templates.get("default")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation. `variables` (`tools`, `chat_template`, any other) are the template's; `chat_template` replaces it.

        Raises ChatTemplateError where there is no template, or it refuses these messages.
        """
        from octavo.text.chat_template import render

        templates = self._vocabulary.chat_templates
        named = templates.get("tool_use") if variables.get("tools") else None
        template = variables.pop("chat_template", None) or named or self.chat_template
        return render(template, messages, add_generation_prompt=add_generation_prompt, **{**self._vocabulary.named_tokens, **variables})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Ids of a conversation, with one BOS if the model wants any, whether the template writes it or not, and no EOS at the end."""
        return self.encode_templated(self.apply_chat_template(messages, add_generation_prompt, **variables))

    def encode_templated(self, text: str) -> list[int]:
        """Ids of a text that a chat template made, as `encode_chat` gives them."""
        ids = self.encode(text, add_special_tokens=False)
        wants_bos = self.bos_token_id is not None and self.encode("", add_special_tokens=True)[:1] == [self.bos_token_id]
        return [self.bos_token_id, *ids] if wants_bos and ids[:1] != [self.bos_token_id] else ids  # type: ignore[list-item]
