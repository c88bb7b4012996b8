"""Reading an answer: the events of a stream with the times at which they came, or the body of a refusal."""

from typing import Protocol, runtime_checkable

from .answers import Answer, Fault
from .clock import Clock
from .messages import object_of, one_line, said
from .sse import EventStream, EventTooLong
from .transport import Reply, TransportError

BODY = 1 << 16  # bytes read of an answer that is no stream
_TEXT = ("content", "reasoning_content", "reasoning")  # where a delta may carry generated text


@runtime_checkable
class Limits(Protocol):
    """The clock, and the seconds that a stream may take: see `Endpoint`."""

    clock: Clock
    first_timeout: float
    gap_timeout: float
    total_timeout: float


def read_stream(reply: Reply, answer: Answer, limits: Limits, key: str) -> Fault | None:
    """Read events to the end, noting when each text came."""
    kind = reply.headers.get("content-type", "")
    if kind and "event-stream" not in kind:
        body = read_body(reply, limits.clock, limits.gap_timeout)
        return Fault("malformed", f"content type {one_line(kind, key)!r}: {said(body, key)}")
    events, usage = EventStream(), None
    while True:
        timeout = limits.first_timeout if answer.ttft_s is None else limits.gap_timeout
        since = answer.sent_s if answer.ttft_s is None else limits.clock.now()
        left = min(since + timeout, answer.sent_s + limits.total_timeout) - limits.clock.now()
        if left <= 0:
            what = f"total_timeout={limits.total_timeout:g} s is over"
            if answer.ttft_s is None:
                what = f"no text within {min(timeout, limits.total_timeout):g} s"
            raise TransportError("timeout", what)
        try:
            piece = reply.read(left)
        except TransportError:
            if answer.finish_reason is None:
                raise
            break  # the answer is whole; only what follows it is missing
        now = limits.clock.now() - answer.sent_s
        try:
            whole = events.feed(piece) if piece else events.close()
        except EventTooLong as e:
            return Fault("malformed", str(e))
        for data in whole:
            if data.strip() == "[DONE]":
                answer.done = True
                continue
            event = object_of(data)
            if event is None:
                return Fault("malformed", f"an event that is no JSON object: {one_line(data, key)!r}")
            if event.get("error"):
                return Fault("server", said(data.encode(), key))
            if _text(event, answer):
                answer.arrivals_s.append(now)
                if answer.ttft_s is None:
                    answer.ttft_s = now
            if isinstance(event.get("usage"), dict):
                usage = event["usage"]
            if isinstance(event.get("timings"), dict):
                answer.timings = event["timings"]
        if answer.done or not piece:
            break
    answer.settle(usage)
    if not answer.done and answer.finish_reason is None:
        return Fault("dropped", f"it ended after {len(answer.arrivals_s)} events, with no finish_reason")
    if not answer.arrivals_s:
        return Fault("empty", f"finish_reason {answer.finish_reason!r} and no text")
    return None


def read_body(reply: Reply, clock: Clock, timeout: float) -> bytes:
    """The body of an answer that is no stream, its beginning if it is long."""
    until, parts, size = clock.now() + timeout, [], 0
    while size < BODY and (left := until - clock.now()) > 0:
        piece = reply.read(left)
        if not piece:
            break
        parts.append(piece)
        size += len(piece)
    return b"".join(parts)[:BODY]


def _text(event: dict, answer: Answer) -> bool:
    """Whether this event carries generated text, which is added to the answer."""
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    choice = choices[0]
    if isinstance(reason := choice.get("finish_reason"), str) and reason:
        answer.finish_reason = reason
    delta = choice.get("delta")
    found = [delta.get(name) for name in _TEXT] if isinstance(delta, dict) else [choice.get("text")]
    text = "".join(part for part in found if isinstance(part, str))
    answer.text += text
    return bool(text)
