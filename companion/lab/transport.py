"""How bytes come from an endpoint: HTTP with the standard library, behind three small protocols.

A test puts its own `Transport` in this one's place, with its own clock, and no socket is opened.
"""

import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol, runtime_checkable
from urllib.parse import SplitResult, urlsplit

PIECE = 1 << 16  # bytes asked for at once; what has arrived is given out without waiting for more


class TransportError(Exception):
    """kind: "unreachable" (no connection), "timeout" (nothing came in time), "dropped" (cut off)."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@runtime_checkable
class Reply(Protocol):
    """An answer whose body arrives in pieces. headers: names in lower case."""

    status: int
    headers: Mapping[str, str]

    def read(self, timeout: float) -> bytes:
        """The next piece as it arrives, b"" at the end; TransportError after `timeout` seconds."""
        ...

    def close(self) -> None:
        """End the connection that it came by."""
        ...


@runtime_checkable
class Connection(Protocol):
    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> Reply: ...

    def close(self) -> None: ...


@runtime_checkable
class Transport(Protocol):
    def connect(self, timeout: float) -> Connection: ...


class HTTPTransport:
    """Connections to one host. No redirection is followed and no proxy asked: both would be timed."""

    def __init__(self, url: SplitResult):
        self._url = url

    def connect(self, timeout: float) -> "HTTPConnection":
        host, port = self._url.hostname, self._url.port
        raw = http.client.HTTPConnection(host, port, timeout=timeout)
        if self._url.scheme == "https":
            secure = ssl.create_default_context()
            raw = http.client.HTTPSConnection(host, port, timeout=timeout, context=secure)
        where = f"{host}:{raw.port}"
        try:
            raw.connect()
            raw.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except TimeoutError:
            raise TransportError("unreachable", f"{where} did not answer within {timeout:g} s") from None
        except ssl.SSLError as e:
            raise TransportError("unreachable", f"{where}: no secure connection ({e.reason})") from None
        except OSError as e:
            raise TransportError("unreachable", f"{where}: {e.strerror or e}") from None
        return HTTPConnection(raw)


class HTTPConnection:
    def __init__(self, raw: http.client.HTTPConnection):
        self._raw, self._socket = raw, raw.sock

    def request(self, method, path, headers, body, timeout) -> "HTTPReply":
        self._socket.settimeout(timeout)
        try:
            self._raw.request(method, path, body=body, headers=dict(headers))
            return HTTPReply(self._raw, self._socket)
        except TimeoutError:
            raise TransportError("timeout", f"no answer within {timeout:g} s") from None
        except (http.client.HTTPException, OSError) as e:
            lost = f"the connection was lost before an answer ({_short(e)})"
            raise TransportError("dropped", lost) from None

    def close(self) -> None:
        self._raw.close()


class HTTPReply:
    def __init__(self, connection: http.client.HTTPConnection, sock: socket.socket):
        self._raw, self._connection = connection.getresponse(), connection
        self._socket = sock  # http.client forgets it when the answer begins; time limits are set on it
        self.status = self._raw.status
        self.headers = {k.lower(): v for k, v in self._raw.getheaders()}

    def read(self, timeout: float) -> bytes:
        try:
            if not self._raw.isclosed():
                self._socket.settimeout(timeout)
            return self._raw.read1(PIECE)
        except TimeoutError:
            raise TransportError("timeout", f"nothing came for {timeout:g} s") from None
        except (http.client.HTTPException, OSError, ValueError) as e:
            raise TransportError("dropped", f"the connection was lost ({_short(e)})") from None

    def close(self) -> None:
        self._raw.close()
        self._connection.close()


def _short(e: Exception) -> str:
    return getattr(e, "strerror", None) or type(e).__name__


PATHS = {"chat": "/chat/completions", "completions": "/completions"}


def address(url: str) -> tuple[str, str, SplitResult]:
    """(what to show, path before /chat/completions, parts) of an address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("endpoint: put no key, user name or query into the address; the key has a variable")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ValueError(f"endpoint {url!r}; need an address such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/")
    for ending in PATHS.values():
        path = path.removesuffix(ending)
    path = path or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}", path, parts


def said(body: bytes, key: str) -> str:
    """The message in an error's body, in one line."""
    text = body.decode("utf-8", errors="replace")
    found = object_of(text)
    if found is not None:
        for name in ("error", "message", "detail"):
            inner = found.get(name)
            if isinstance(inner, dict):
                inner = inner.get("message")
            if inner:
                text = inner if isinstance(inner, str) else json.dumps(inner)
                break
    return one_line(text, key) or "it says nothing more"


def one_line(text: str, key: str) -> str:
    """One line of at most 200 printable characters, without the key."""
    if key:
        text = text.replace(key, "[key]")
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= 200 else line[:199] + "…"


def object_of(text: str) -> dict | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def seconds_to_wait(reply: Reply) -> float | None:
    """Retry-After, as seconds or as a date; None where there is none that can be read."""
    asked = reply.headers.get("retry-after", "")
    if asked.strip().isdigit():
        return float(asked)
    try:
        until = parsedate_to_datetime(asked)
        return max(0.0, (until - datetime.now(until.tzinfo or UTC)).total_seconds())
    except (TypeError, ValueError):
        return None


@runtime_checkable
class Clock(Protocol):
    """Seconds that only grow, and a way to let them pass."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's monotonic clock of highest resolution."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


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
