"""How bytes come from an endpoint: HTTP with the standard library, behind three small protocols.

A test puts its own `Transport` in this one's place, with its own clock, and no socket is opened.
"""

import http.client
import socket
import ssl
from collections.abc import Mapping
from typing import Protocol, runtime_checkable
from urllib.parse import SplitResult

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
        if self._url.scheme == "https":
            raw = http.client.HTTPSConnection(
                host, port, timeout=timeout, context=ssl.create_default_context()
            )
        else:
            raw = http.client.HTTPConnection(host, port, timeout=timeout)
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
            raise TransportError(
                "dropped", f"the connection was lost before an answer ({_short(e)})"
            ) from None

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
