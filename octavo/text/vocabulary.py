"""What a tokenizer is made of, wherever it was read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Vocabulary:
    """One vocabulary with its rules. `from_folder` and `from_gguf` of `Tokenizer` fill it; `Tokenizer` gives it its methods."""

    encode: Callable[[str, bool], list[int]]
    """Text to ids; the flag asks for the BOS and EOS that the model wants around a prompt."""
    piece: Callable[[int], str | None]
    """The text under which a token is listed; asked only for ids below `size`."""
    size: int
    byte_level: bool
    """Pieces spell bytes in GPT-2's alphabet; otherwise SentencePiece's way, a low line for a space and <0xAB> for a byte."""
    strips_leading_space: bool
    """The encoder puts a space before text, so a decoded text drops one."""
    verbatim_ids: frozenset[int]
    """Tokens added on top of the learned ones; their piece is their text, unescaped. `special_ids` are among them."""
    special_ids: frozenset[int]
    """Tokens that steer the model and are no part of the text."""
    bos_token_id: int | None
    eos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every token that ends an answer: end of text, of turn and of message."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token` and the like, as chat templates use them."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Templates by name; `default` is the one used where nothing else is asked."""
