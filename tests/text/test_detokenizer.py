from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer

IDS = st.lists(st.integers(0, 2500), max_size=40)
BYTE_IDS = st.lists(st.integers(3, 258), max_size=40)  # the byte tokens of the SentencePiece vocabulary, bytes of the other


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    """The deltas of `ids` pushed in pieces of these sizes, the rest one by one."""
    detokenizer, deltas, position = Detokenizer(tokenizer, prompt, skip_special_tokens=skip), [], 0
    for size in sizes + [1] * len(ids):
        deltas.append(detokenizer.push(ids[position : position + size]))
        position += size
    return [*deltas, detokenizer.finish()]


@given(st.data())
def test_deltas_joined_are_the_decoded_answer(bpe_tokenizer: Tokenizer, spm_tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([bpe_tokenizer, spm_tokenizer]))
    ids, prompt = data.draw(IDS | BYTE_IDS), data.draw(st.just([]) | IDS | BYTE_IDS)
    sizes, skip = data.draw(st.lists(st.integers(0, 5), max_size=5)), data.draw(st.booleans())
    continuation = any(tokenizer.token_bytes(i) for i in prompt if not (skip and i in tokenizer.special_ids))
    joined = "".join(stream(tokenizer, prompt, ids, sizes, skip))
    assert joined == tokenizer.decode(ids, skip, continuation=continuation)
    text = tokenizer.decode(prompt, skip)
    if not text.endswith("\ufffd"):
        assert text + joined == tokenizer.decode(prompt + ids, skip)


def test_a_continuation_keeps_its_space(spm_tokenizer: Tokenizer) -> None:
    prompt, answer = spm_tokenizer.encode("hello"), spm_tokenizer.encode(" big world", add_special_tokens=False)
    whole = spm_tokenizer.encode("hello big world")
    assert "".join(stream(spm_tokenizer, prompt, whole[len(prompt) :], [])) == " big world"
    assert stream(spm_tokenizer, [], whole, [])[1] == "hello"
    assert spm_tokenizer.decode(answer, continuation=not spm_tokenizer.strips_leading_space).endswith(" big world")


def test_a_character_comes_whole(bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode("\U0001fae0", add_special_tokens=False)
    assert len(ids) > 1
    deltas = stream(bpe_tokenizer, [], ids, [])
    assert "".join(deltas) == "\U0001fae0"
    assert [delta for delta in deltas if delta] == ["\U0001fae0"]


def test_an_answer_cut_within_a_character_ends_as_decoding_does(bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode("a\U0001fae0", add_special_tokens=False)[:-1]
    *deltas, rest = stream(bpe_tokenizer, [], ids, [])
    assert ("".join(deltas), rest) == ("a", "\ufffd")


def test_an_endless_run_of_invalid_bytes_is_not_held(spm_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(spm_tokenizer)
    stray = spm_tokenizer.encode("\u0416", add_special_tokens=False)[-1]  # a continuation byte
    assert spm_tokenizer.token_bytes(stray) == b"\x96"
    for _ in range(1000):
        assert detokenizer.push([stray]) == "\ufffd"
    assert detokenizer.finish() == ""
