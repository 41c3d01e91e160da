"""SentencePiece encoding from scores, as llama.cpp does it.

Neighbouring symbols whose union is a piece are merged, the highest score first and the leftmost of equals, until none are left;
a character that is no piece becomes its bytes. Written here because `tokenizers` needs a list of merges, which a GGUF file lacks
and which takes seconds to derive for a vocabulary as large as Gemma's; this needs one dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from octavo.errors import InvalidValueError

SPACE = "\u2581"
_MEMO_WORDS = 1 << 15
_MEMO_LENGTH = 32


class SentencePiece:
    """Encoder over pieces and scores, both by id. Tokens in `added` are found in the text before all else, the longest first."""

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        added: Mapping[str, int],
        prefix: Sequence[int],
        suffix: Sequence[int],
        unknown_id: int | None,
        space_prefix: bool,
    ) -> None:
        self._ids = {piece: token_id for token_id, piece in enumerate(pieces)}
        self._scores = scores
        self._added = _AddedTokens(added)
        self._prefix, self._suffix = list(prefix), list(suffix)
        self._unknown_id = unknown_id
        self._space_prefix = space_prefix
        # No piece joins a word to the space after it (two spaces aside), so words are merged alone, and remembered.
        words_stand_alone = not re.search(f"[^{SPACE}\0]{SPACE}", "\0".join(pieces))
        self._words = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+" if words_stand_alone else "(?s:.+)")
        self._memo: dict[str, list[int]] = {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises InvalidValueError for a character that the vocabulary cannot spell."""
        ids = list(self._prefix) if add_special_tokens else []
        after_special = True
        for part in self._added.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                spaced = " " + part if self._space_prefix and after_special else part
                for word in self._words.findall(spaced.replace(" ", SPACE)):
                    ids += self._encode_word(word)
            after_special = isinstance(part, int)
        return ids + self._suffix if add_special_tokens else ids

    def _encode_word(self, word: str) -> list[int]:
        if (ids := self._memo.get(word)) is None:
            ids = [token_id for piece in self._merge(word) for token_id in self._spell(piece)]
            if len(word) <= _MEMO_LENGTH:
                if len(self._memo) >= _MEMO_WORDS:
                    self._memo.clear()
                self._memo[word] = ids
        return ids

    def _merge(self, word: str) -> Iterator[str]:
        ids, scores = self._ids, self._scores
        symbols = list(word)  # a symbol merged into its left neighbour is left empty
        before, after = list(range(-1, len(symbols) - 1)), list(range(1, len(symbols) + 1))

        def candidate(left: int, right: int) -> list[tuple[float, int, int, str]]:
            if left < 0 or right >= len(symbols):
                return []
            union = symbols[left] + symbols[right]
            return [(-scores[ids[union]], left, right, union)] if union in ids else []

        queue = [entry for left in range(len(symbols) - 1) for entry in candidate(left, left + 1)]
        heapify(queue)
        while queue:
            _, left, right, union = heappop(queue)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != union:
                continue  # one of the two has merged elsewhere since
            symbols[left], symbols[right] = union, ""
            after[left] = after[right]
            if after[right] < len(symbols):
                before[after[right]] = left
            for entry in candidate(before[left], left) + candidate(left, after[left]):
                heappush(queue, entry)
        return filter(None, symbols)

    def _spell(self, piece: str) -> list[int]:
        if (token_id := self._ids.get(piece)) is not None:
            return [token_id]
        spelled = [self._ids.get(f"<0x{byte:02X}>", self._unknown_id) for byte in piece.encode()]
        if None in spelled:
            raise InvalidValueError(f"the model's vocabulary cannot spell {piece!r}: it has neither byte tokens nor an unknown token")
        return [token_id for token_id in spelled if token_id is not None]


class _AddedTokens:
    """Finds added tokens in text, the leftmost first and of those the longest.

    A table by the first two characters rather than one regular expression, which would try thousands of alternatives at each position.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        lengths: dict[str, set[int]] = {}
        for text in ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(of_start, reverse=True) for start, of_start in lengths.items()}
        starts = sorted(lengths, key=len, reverse=True)
        self._candidate = re.compile("|".join(map(re.escape, starts)) or r"(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """The text in order, as stretches of plain text and ids of added tokens."""
        begin = position = 0
        while match := self._candidate.search(text, position):
            start = match.start()
            end = next((end for end in self._ends(text, start) if text[start:end] in self._ids), None)
            if end is None:
                position = start + 1
                continue
            if start > begin:
                yield text[begin:start]
            yield self._ids[text[start:end]]
            begin = position = end
        if begin < len(text):
            yield text[begin:]

    def _ends(self, text: str, start: int) -> Iterator[int]:
        for prefix in dict.fromkeys((text[start : start + 2], text[start])):
            for length in self._lengths.get(prefix, ()):
                yield start + length
