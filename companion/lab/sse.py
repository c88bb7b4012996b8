"""Server-sent events out of bytes that arrive in pieces of any size.

A piece may end in the middle of a line, of a character or of a line ending; events are given out whole.
Only `data` matters to a client of language models: the other fields are read past. The format is that of
the HTML standard, section 9.2.
"""

LIMIT = 1 << 20  # bytes of one event; more is no token


class EventTooLong(ValueError):
    """An event that never ends would fill the memory."""


class EventStream:
    """Feed bytes, get the data of the events that became whole; a comment is no event."""

    def __init__(self, limit: int = LIMIT):
        self._limit, self._rest, self._lines = limit, b"", []
        self._held, self._first = 0, True

    def feed(self, piece: bytes) -> list[str]:
        """Data of each event that this piece completes, its lines joined by newlines."""
        buffer = self._rest + piece
        if self._first and buffer:
            if b"\xef\xbb\xbf".startswith(buffer[:3]) and len(buffer) < 3:
                self._rest = buffer
                return []
            buffer, self._first = buffer.removeprefix(b"\xef\xbb\xbf"), False
        events, start = [], 0
        while True:
            end, width = _line_end(buffer, start)
            if end < 0:
                break
            self._line(buffer[start:end], events)
            start = end + width
        self._rest = buffer[start:]
        if self._held + len(self._rest) > self._limit:
            raise EventTooLong(f"an event of more than {self._limit:,} bytes")
        return events

    def close(self) -> list[str]:
        """Data of an event that the end of the stream left without its empty line."""
        events: list[str] = []
        if self._rest:
            self._line(self._rest.removesuffix(b"\r"), events)
        self._line(b"", events)
        self._rest = b""
        return events

    def _line(self, line: bytes, events: list[str]) -> None:
        if not line:
            if data := "\n".join(self._lines):
                events.append(data)
            self._lines, self._held = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._held += len(value)
            self._lines.append(value.removeprefix(b" ").decode("utf-8", errors="replace"))


def _line_end(buffer: bytes, start: int) -> tuple[int, int]:
    """(where the line ends, bytes of its ending), or (-1, 0); a final CR waits for what follows it."""
    cr, lf = buffer.find(b"\r", start), buffer.find(b"\n", start)
    if cr < 0 or 0 <= lf < cr:
        return lf, 1
    if cr + 1 == len(buffer):
        return -1, 0
    return cr, 2 if buffer[cr + 1] == 0x0A else 1
