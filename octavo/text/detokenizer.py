"""Text of an answer while it grows, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from octavo.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one answer's token ids into text as they come.

    For any ids, split in any way, the deltas joined are `tokenizer.decode(ids, skip_special_tokens, continuation=...)`, where
    `continuation` is whether the prompt has any text. So an answer keeps the space with which a SentencePiece vocabulary marks its
    first word, as it does in vLLM, and prompt text + answer text is the text of the whole wherever the prompt ends on a whole
    character. A prompt that ends within one leaves the answer's first bytes to be read on their own.

    A token's bytes go through an incremental UTF-8 decoder, so each costs the same however long the answer, and at most the
    three bytes of an unfinished character are held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._drops_space = tokenizer.strips_leading_space and not any(map(self._bytes, prompt_ids))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        data = b"".join(map(self._bytes, token_ids))
        if self._drops_space and data:
            data = data.removeprefix(b" ")
            self._drops_space = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What was held back, as U+FFFD, if the answer ends within a character."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
