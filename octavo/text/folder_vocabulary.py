"""The vocabulary of an HF folder: `tokenizer.json`, and what lies beside it.

BOS and EOS are added where the file's own post-processor says; flags beside it (`add_bos_token`) are ignored, as in transformers 5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError
from octavo.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def vocabulary_from_folder(folder: Path) -> Vocabulary:
    """Raises CheckpointError where `tokenizer.json` is missing or damaged, or decodes in a way not known."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no tokenizer.json, the only form of tokenizer that is read from a folder")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise CheckpointError(f"{path} is damaged: {error}") from error
    try:
        return _vocabulary(tokenizer, folder)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{folder}: what lies beside tokenizer.json is not in the form expected ({error!r})") from error


def _vocabulary(tokenizer: Tokenizer, folder: Path) -> Vocabulary:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    named = {name: text for name in _NAMED_TOKENS if (text := _text(config.get(name))) is not None}
    ids = {name: tokenizer.token_to_id(text) for name, text in named.items()}
    _add_missing_tokens(tokenizer, config)
    added = tokenizer.get_added_tokens_decoder()
    byte_level, strips_leading_space = _decoding(tokenizer, folder / "tokenizer.json")
    eos = ids.get("eos_token")
    return Vocabulary(
        encode=lambda text, add_special_tokens: tokenizer.encode(text, add_special_tokens=add_special_tokens).ids,
        piece=tokenizer.id_to_token,
        size=_size(tokenizer),
        byte_level=byte_level,
        strips_leading_space=strips_leading_space,
        verbatim_ids=frozenset(added),
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        bos_token_id=ids.get("bos_token"),
        eos_token_id=eos,
        eos_token_ids=() if eos is None else (eos,),
        named_tokens=named,
        chat_templates=_chat_templates(folder, config),
    )


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that a fine-tune listed in its configuration alone."""
    from tokenizers import AddedToken

    for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(token["content"]) is None:
            tokenizer.add_tokens(
                [AddedToken(token["content"], normalized=token.get("normalized", False), special=token.get("special", False))]
            )


def _decoding(tokenizer: Tokenizer, path: Path) -> tuple[bool, bool]:
    """Whether pieces spell bytes in GPT-2's alphabet, and whether a text's first space is the encoder's own."""
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {"type": "none"}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if kinds & {"ByteFallback", "Metaspace"}:
        strips = any(step["type"] == "Strip" and step["start"] for step in steps)
        return False, strips or any(step.get("prepend_scheme", "never") != "never" for step in steps)
    raise CheckpointError(f"{path} decodes by {', '.join(sorted(kinds))}; supported: ByteLevel, ByteFallback, Metaspace")


def _size(tokenizer: Tokenizer) -> int:
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    if tokenizer.id_to_token(count - 1) is not None:
        return count
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # the ids have holes


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return {"default": beside.read_text(encoding="utf-8")}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if template else {}


def _text(token: Any) -> str | None:
    """A token is named by its text, or by an object that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
