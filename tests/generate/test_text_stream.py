"""Streams of text: joined, the pieces are the text; none holds half a character or part of a stop string."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from companion.generate import TextStream

QUICK = settings(max_examples=300, deadline=None, database=None)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
CUTS = st.lists(st.integers(0, 130), max_size=40)


class Bytes:
    """A tokenizer whose tokens are given pieces of bytes; token i is the i-th piece."""

    def __init__(self, data, cuts):
        at = sorted({0, len(data), *(c for c in cuts if c < len(data))})
        self.pieces = [data[a:b] for a, b in zip(at, at[1:])]

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


def stream(tokenizer, count, stop=()):
    """All pieces, the one of `finish` last, and the stream."""
    s = TextStream(tokenizer, stop)
    pieces = []
    for i in range(count):
        pieces.append(s.feed(i))
        assert s.text == "".join(pieces)
        if s.done:
            return pieces, s
    return [*pieces, s.finish()], s


@QUICK
@given(TEXT, CUTS)
@example("👩‍👩‍👧é漢", list(range(40)))
@example("\ufffd", [1, 2])
@example("a\ufffdb", [1, 2, 3, 4])
def test_pieces_of_valid_text(text, cuts):
    tokenizer = Bytes(text.encode(), cuts)
    pieces, s = stream(tokenizer, len(tokenizer.pieces))
    assert "".join(pieces) == text == s.text and not s.done
    if "\ufffd" not in text:
        assert not any("\ufffd" in p for p in pieces)


@QUICK
@given(TEXT, CUTS)
def test_text_comes_as_soon_as_it_is_whole(text, cuts):
    """After every token, whatever whole characters the bytes so far make up have been given out."""
    if "\ufffd" in text:
        return
    tokenizer = Bytes(text.encode(), cuts)
    s = TextStream(tokenizer)
    for i in range(len(tokenizer.pieces)):
        s.feed(i)
        so_far = b"".join(tokenizer.pieces[: i + 1])
        if not tokenizer.decode(range(i + 1)).endswith("\ufffd"):
            assert s.text == so_far.decode()
        assert so_far.startswith(s.text.encode())


@QUICK
@given(st.binary(max_size=40), CUTS)
def test_pieces_of_bytes_that_are_no_text(data, cuts):
    """A model may say anything; then the whole is what decoding it in one go gives."""
    tokenizer = Bytes(data, cuts)
    pieces, _ = stream(tokenizer, len(tokenizer.pieces))
    assert "".join(pieces) == data.decode("utf-8", "replace")


def first_stop(text, stops):
    """Read one character at a time; cut before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        hits = [end - len(s) for s in stops if text[:end].endswith(s)]
        if hits:
            return text[: min(hits)], True
    return text, False


LETTERS = st.text("abcé🙂", max_size=14)


@QUICK
@given(LETTERS, CUTS, st.lists(st.text("abcé🙂", min_size=1, max_size=4), min_size=1, max_size=3))
@example("aabaabaac", [1, 2, 3], ["aabaac"])
@example("abcd", [1], ["bcd", "c"])
@example("xabcd", [], ["bcd", "c"])
@example("abab", list(range(9)), ["abb", "ba"])
def test_stop_strings_across_token_borders(text, cuts, stops):
    tokenizer = Bytes(text.encode(), cuts)
    pieces, s = stream(tokenizer, len(tokenizer.pieces), stops)
    want, done = first_stop(text, stops)
    assert ("".join(pieces), s.done) == (want, done)
    assert not any(stop in s.text for stop in stops)
    if s.done:
        assert s.feed(0) == "" and s.finish() == "" and s.text == want


def test_what_may_become_a_stop_string_is_held_back():
    tokenizer = Bytes(b"one<|two", range(9))
    s = TextStream(tokenizer, ["<|end|>"])
    assert [s.feed(i) for i in range(8)] == ["o", "n", "e", "", "", "<|t", "w", "o"]


def test_a_stop_string_in_one_token_with_half_a_character():
    tokenizer = Bytes("aSTOP🙂".encode(), [7])
    pieces, s = stream(tokenizer, 1, ["STOP"])
    assert "".join(pieces) == "a" and s.done


class Spaced:
    """Like the tokenizers that mark words by a space in front, and leave it out at the very beginning."""

    words = ["▁Hello", "▁world", "!", "▁", "▁▁x"]

    def decode(self, ids):
        return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")


@QUICK
@given(st.lists(st.integers(0, 4), max_size=8))
def test_tokenizers_that_write_a_first_token_differently(ids):
    s = TextStream(Spaced())
    pieces = [s.feed(i) for i in ids] + [s.finish()]
    assert "".join(pieces) == Spaced().decode(ids)


class Special(Bytes):
    """Token 99 is special: it is decoded to nothing."""

    def decode(self, ids):
        return super().decode([i for i in ids if i != 99])


def test_special_tokens_in_the_middle():
    tokenizer = Special("é🙂x".encode(), [1, 3, 4])
    s = TextStream(tokenizer)
    pieces = [s.feed(i) for i in (99, 0, 1, 99, 99, 2, 3, 99)] + [s.finish()]
    assert "".join(pieces) == "é🙂x"


@QUICK
@given(TEXT | st.text("the inn 12🙂é", max_size=30))
def test_with_the_real_tokenizer(smollm2, text):
    tokenizer = smollm2[1]
    ids = tokenizer.encode(text, special=False)
    s = TextStream(tokenizer)
    pieces = [s.feed(i) for i in ids] + [s.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in p for p in pieces)


@pytest.mark.parametrize("stop", ["stop", [""], ["a", ""]])
def test_stop_that_is_no_list_of_strings(stop):
    with pytest.raises(ValueError, match="stop must"):
        TextStream(Bytes(b"", []), stop)


def test_finish_twice_and_at_once():
    s = TextStream(Bytes(b"\xf0\x9f", [1]))
    assert s.finish() == ""
    assert s.feed(0) == "" and s.feed(1) == ""
    assert s.finish() == "\ufffd" and s.finish() == ""
