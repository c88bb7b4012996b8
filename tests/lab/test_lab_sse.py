"""Server-sent events: whatever the pieces, the same events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from companion.lab.transport import EventStream, EventTooLong

STREAM = (
    'data: {"a": "häß 😀"}\n\n: a comment\n\nevent: x\r\ndata: two\r\ndata: lines\r\n\r\n'
    "data:no space\n\nid: 7\n\ndata:\n\ndata: cr\r\rdata: [DONE]\n\n"
).encode()
EVENTS = ['{"a": "häß 😀"}', "two\nlines", "no space", "cr", "[DONE]"]


def fed(pieces):
    stream, out = EventStream(), []
    for piece in pieces:
        out += stream.feed(piece)
    return out + stream.close()


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_pieces_of_any_size_give_the_same_events(cuts):
    cuts = [0, *sorted(cuts), len(STREAM)]
    assert fed(STREAM[a:b] for a, b in zip(cuts, cuts[1:])) == EVENTS


def test_byte_by_byte_with_a_byte_order_mark():
    assert fed(bytes([b]) for b in b"\xef\xbb\xbf" + STREAM) == EVENTS


def test_an_event_comes_out_with_the_piece_that_ends_it():
    stream = EventStream()
    assert stream.feed(b"data: 1\n") == []
    assert stream.feed(b"\n") == ["1"]
    assert stream.feed(b"data: 2\n\ndata: 3\n\ndata: 4") == ["2", "3"]


def test_the_end_of_the_stream_ends_an_event():
    stream = EventStream()
    assert stream.feed(b"data: 1\ndata: 2") == []
    assert stream.close() == ["1\n2"]


def test_bytes_that_are_no_text_do_not_stop_it():
    assert fed([b"data: \xff\xfe\n\n"]) == ["\ufffd\ufffd"]


@pytest.mark.parametrize("line", [b"data: " + b"x" * 200, b"data: xxxxx\n" * 30])
def test_an_event_without_end_is_refused(line):
    stream = EventStream(limit=100)
    with pytest.raises(EventTooLong, match="100 bytes"):
        stream.feed(line)


def test_many_events_are_not_one_long_event():
    stream = EventStream(limit=100)
    assert len(stream.feed(b"data: xxxxxxxxxx\n\n" * 100)) == 100
