"""A server that a test writes: pieces of an answer at known moments, on a clock of its own."""

import json
import threading
from dataclasses import dataclass, field

from companion.lab.transport import TransportError


class ScriptedClock:
    """Seconds that pass only when someone waits. Each thread has a time of its own, as if they ran at once.

    A quarter of a second, an eighth: times of such steps are exact in binary, so tests compare with ==.
    """

    def __init__(self, start=1000.0):
        self._own, self._start = threading.local(), start

    def now(self) -> float:
        return getattr(self._own, "seconds", self._start)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self._own.seconds = self.now() + seconds


@dataclass
class Answered:
    """One answer: (seconds to wait, bytes) pieces; DROP or SILENCE may stand for bytes."""

    pieces: list = field(default_factory=list)
    status: int = 200
    headers: dict = field(default_factory=lambda: {"content-type": "text/event-stream"})
    headers_after: float = 0.0
    connect_after: float = 0.0


DROP, SILENCE, REFUSE = object(), object(), object()


class ScriptedTransport:
    """Gives out the script's answers in order, the last one again and again; notes what was asked.

    An object with answer(method, body) in the script makes its answers when it is asked.
    """

    def __init__(self, clock, *script):
        self.clock, self.script, self.asked, self.open, self.closed = clock, list(script), [], 0, 0
        self.most_open, self.on_request = 0, lambda: None
        self._lock = threading.Lock()

    def connect(self, timeout):
        with self._lock:
            answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if answer is REFUSE:
            raise TransportError("unreachable", "127.0.0.1:9: Connection refused")
        if not isinstance(answer, Answered):
            return ScriptedConnection(self, answer)
        if answer.connect_after > timeout:
            self.clock.sleep(timeout)
            raise TransportError("unreachable", f"did not answer within {timeout:g} s")
        self.clock.sleep(answer.connect_after)
        return ScriptedConnection(self, answer)

    @property
    def bodies(self):
        return [body for *_, body in self.asked]


class ScriptedConnection:
    def __init__(self, transport, answer):
        self.transport, self.answer = transport, answer
        with transport._lock:
            transport.open += 1
            transport.most_open = max(transport.most_open, transport.open)

    def request(self, method, path, headers, body, timeout):
        t = self.transport
        t.asked.append((method, path, dict(headers), json.loads(body) if body else None))
        t.on_request()
        if not isinstance(self.answer, Answered):
            with t._lock:
                self.answer = self.answer.answer(method, t.asked[-1][3])
        if self.answer.headers_after > timeout:
            t.clock.sleep(timeout)
            raise TransportError("timeout", f"no answer within {timeout:g} s")
        t.clock.sleep(self.answer.headers_after)
        return ScriptedReply(self)

    def close(self):
        with self.transport._lock:
            self.transport.open -= 1
            self.transport.closed += 1


class ScriptedReply:
    def __init__(self, connection):
        self.connection, self.clock = connection, connection.transport.clock
        self.status, self.headers = connection.answer.status, connection.answer.headers
        self._left = list(connection.answer.pieces)

    def read(self, timeout):
        assert timeout > 0
        if not self._left:
            return b""
        delay, piece = self._left[0]
        if piece is SILENCE or delay > timeout:
            self.clock.sleep(timeout)
            raise TransportError("timeout", f"nothing came for {timeout:g} s")
        self.clock.sleep(delay)
        self._left.pop(0)
        if piece is DROP:
            raise TransportError("dropped", "connection lost (reset)")
        return piece

    def close(self):
        self.connection.close()


def sse(*objects) -> bytes:
    """The bytes of events, one after another: objects as JSON, text as it is."""
    return b"".join(f"data: {o if isinstance(o, str) else json.dumps(o)}\n\n".encode() for o in objects)


def delta(text, **more):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}]}
DONE = "[DONE]"


def finish(reason="length", **more):
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], **more}


def usage(completion, prompt=20, cached=None):
    told = {"completion_tokens": completion, "prompt_tokens": prompt, "total_tokens": completion + prompt}
    if cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"choices": [], "usage": told}


def refusal(status, message="no", headers=None, shape="openai"):
    body = {"openai": {"error": {"message": message}}, "fastapi": {"detail": message}}.get(shape, message)
    text = body if isinstance(body, str) else json.dumps(body)
    return Answered([(0.0, text.encode())], status, {"content-type": "application/json", **(headers or {})})
