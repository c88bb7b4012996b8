"""What came back for one request: its times, its tokens, and what went wrong."""

import statistics
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from .points import Point, Run
from .transport import Clock, EventStream, EventTooLong, Reply, TransportError, object_of, one_line, said

# What a fault is called, and what it says to whoever reads the report.
FAULTS = {
    "unreachable": "no connection",
    "timeout": "nothing came in time",
    "dropped": "the stream was cut off",
    "malformed": "what came is no stream of tokens",
    "empty": "the answer has no token",
    "unauthorized": "the key was refused",
    "missing": "no such model or path",
    "refused": "the request was refused",
    "busy": "too many requests",
    "loading": "the server is not ready",
    "server": "the server failed",
}
STATUS = {401: "unauthorized", 403: "unauthorized", 404: "missing", 429: "busy", 503: "loading"}  # HTTP's
LATER = ("busy", "loading", "unreachable", "dropped", "server")  # worth another try after a while
HOPELESS = ("unauthorized", "missing", "refused")  # the next request would fare no better


@dataclass(frozen=True)
class Fault:
    """Why a request brought no answer.

    kind: a name of `companion.lab.answers.FAULTS`: "unreachable", "timeout", "dropped", "malformed", "empty",
        "unauthorized", "missing", "refused", "busy", "loading" or "server".
    detail: one line, the server's own where it said something.
    status: HTTP's.
    """

    kind: str
    detail: str
    status: int | None = None

    def __str__(self) -> str:
        status = f", status {self.status}" if self.status else ""
        return f"{FAULTS[self.kind]}{status}: {self.detail}"


@dataclass
class Answer:
    """One request. Seconds by the client's clock, from the moment the request was sent.

    ttft_s      the first event with text in it, reasoning included; not the headers, nor an event with a role
    arrivals_s  every event with text
    itl_s       seconds per token after the first; None with fewer than two events, or after a fault.
                itl_low_s and itl_high_s bound it: where the server merges tokens into one event, how many
                the first one held is not known. Without merging the three are equal
    tokens      the server's count (counted_by "usage"), else the number of events ("events"), which is too
                low if it merges
    prompt_tokens, cached_tokens   as the server reports them, else None
    connect_s   what setting up the connection took; in no other time
    done        whether the stream ended with [DONE]; some servers never send it
    attempts    requests sent, with the ones before this that were turned away; waited_s, pauses between them
    timings     the server's own, where it sends them (llama.cpp), else None
    """

    fault: Fault | None = None
    sent_s: float = 0.0
    connect_s: float = 0.0
    ttft_s: float | None = None
    arrivals_s: list[float] = field(default_factory=list)
    itl_s: float | None = None
    itl_low_s: float | None = None
    itl_high_s: float | None = None
    tokens: int = 0
    counted_by: str = "events"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    done: bool = False
    merged: bool = False
    attempts: int = 1
    waited_s: float = 0.0
    timings: dict | None = None

    @property
    def ok(self) -> bool:
        """True without a fault."""
        return self.fault is None

    @property
    def finished_s(self) -> float | None:
        """When the last token came, by the client's clock."""
        return self.sent_s + self.arrivals_s[-1] if self.arrivals_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between neighbouring events: stalls show here. An event may hold several tokens."""
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:])]

    def settle(self, usage: dict | None) -> None:
        """Count the tokens and divide the time among them, when the stream has ended."""
        events = len(self.arrivals_s)
        self.tokens = events
        if usage:
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict):
                self.cached_tokens = _count(details.get("cached_tokens"))
            counted = _count(usage.get("completion_tokens"))
            if counted is not None and counted >= events:
                self.tokens, self.counted_by = counted, "usage"
        if events < 2:
            return
        # A stop token is counted, but has no text and so no event.
        silent = self.finish_reason == "stop" and self.tokens == events + 1
        spread = self.arrivals_s[-1] - self.arrivals_s[0]
        shown = self.tokens - silent
        self.merged = shown > events
        # Each event holds at least one token: the first one, 1 to shown - (events - 1) of them.
        self.itl_s = spread * events / (shown * (events - 1))
        self.itl_low_s = spread / (self.tokens - 1)
        self.itl_high_s = spread / (events - 1)
        if not self.merged:
            self.itl_low_s = self.itl_high_s = self.itl_s


def _count(value) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


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


def refusal(reply: Reply, limits: Limits, key: str) -> Fault:
    """Why a reply of another status than 200 is no answer."""
    kind = STATUS.get(reply.status, "server" if reply.status >= 500 else "refused")
    try:
        detail = said(read_body(reply, limits.clock, limits.gap_timeout), key)
    except TransportError as e:
        detail = str(e)
    if 300 <= reply.status < 400:
        detail = "it points elsewhere, and that is not followed; give the address that it points to"
    return Fault(kind, detail, reply.status)


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


MEANT = 64  # tokens that a chat's template has in common with every other; more of a cold prompt is a cache's


def summary(point: Point, answers: list[Answer]) -> Run:
    """One run out of the answers of a batch: medians of times, the rate while all of them were writing."""
    if fault := next((a.fault for a in answers if a.fault), None):
        return Run(fault=str(fault))
    cached = [a.cached_tokens for a in answers if a.cached_tokens is not None]
    prompts = [a.prompt_tokens for a in answers if a.prompt_tokens is not None]
    if point.variant != "warm" and cached and max(cached) > max(MEANT, point.context // 10):
        return Run(fault=f"the server's prefix cache answered for {max(cached)} tokens of a new prompt")
    steps = [a.itl_s for a in answers if a.itl_s is not None]
    notes = []
    if len(prompts) < len(answers):
        notes.append("the server reports no usage: lengths are the ones aimed at, tokens are events")
    if any(a.merged for a in answers):
        notes.append("the server merges tokens: times per token are averages")
    if point.variant == "warm" and not cached:
        notes.append("the server does not say what it had cached")
    return Run(
        ttft_s=statistics.median(a.ttft_s for a in answers),
        itl_s=statistics.median(steps) if steps else None,
        steps_s=[g for a in answers for g in a.gaps_s],
        context=round(statistics.fmean(prompts)) if prompts else None,
        tokens=sum(a.tokens for a in answers),
        tokens_per_second=together(answers),
        cached_tokens=max(cached) if cached else None,
        note="; ".join(notes),
    )


def together(answers: list[Answer]) -> float | None:
    """Tokens per second of all answers in the time when each of them was being written; None without such."""
    if any(len(a.arrivals_s) < 2 for a in answers):
        return None
    begin = max(a.sent_s + a.arrivals_s[0] for a in answers)
    end = min(a.finished_s for a in answers)
    if end <= begin:
        return None
    tokens = 0.0
    for a in answers:
        inside = sum(begin < a.sent_s + t <= end for t in a.arrivals_s)
        tokens += inside * a.tokens / len(a.arrivals_s) if a.merged else inside
    return tokens / (end - begin)
