"""A client that measures any OpenAI-compatible endpoint by streaming. Standard library only.

    from companion.lab import Endpoint
    answer = Endpoint("http://127.0.0.1:8000", "my-model").ask("Tell me of the sea.", max_tokens=64)
    answer.ttft_s, answer.itl_s, answer.tokens, answer.fault

What is timed is what a user sees: the first event with text in it, and the gaps after it. Headers, and the
event that only names a role, come earlier on some servers: after 15 ms, before a prefill of 3.4 s.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Lock

from ..checks import choice, near_names, whole
from .answers import HOPELESS, LATER, Answer, Fault, read_body, read_stream, refusal, summary
from .points import Point, Run, Shape, other_ending, prompt
from .transport import (
    PATHS,
    Clock,
    HTTPTransport,
    Reply,
    SystemClock,
    Transport,
    TransportError,
    address,
    seconds_to_wait,
)

KEY = "OPENAI_API_KEY"  # the environment variable that holds the key


class Endpoint:
    """One model behind one address.

    url          "http://host:8000", with or without "/v1" or a full path; no user name or key in it
    model        as the server calls it; None takes the only one that it lists
    key_env      environment variable with the key, read for each request; the key is never stored, and is cut
                 out of whatever a server says
    api          "chat", or "completions" for a server that has no chat template
    extra        fields added to each request, e.g. {"ignore_eos": True} (vLLM, llama.cpp)
    transport, clock   put others here to test
    connect_timeout, first_timeout, gap_timeout, total_timeout   seconds: for a connection, until the first
                 text, between two pieces after it, and for one request as a whole
    retries      how often a request that was turned away is sent again, after a pause that doubles or that
                 the server names (Retry-After); max_wait bounds a request's pauses together, in seconds
    limit        most requests in flight at once

    Raises ValueError for a url, a limit or an api that cannot be.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        key_env: str = KEY,
        api: str = "chat",
        extra: Mapping | None = None,
        transport: Transport | None = None,
        clock: Clock | None = None,
        connect_timeout: float = 10.0,
        first_timeout: float = 300.0,
        gap_timeout: float = 60.0,
        total_timeout: float = 1800.0,
        retries: int = 4,
        max_wait: float = 120.0,
        limit: int = 16,
    ):
        self.url, self._base, parts = address(url)
        self.model, self.api, self.key_env = model, choice("api", api, PATHS), key_env
        self.limit, self.retries = whole("limit", limit), whole("retries", retries, 0)
        self.extra, self.max_wait = dict(extra or {}), max_wait
        self.connect_timeout, self.first_timeout = connect_timeout, first_timeout
        self.gap_timeout, self.total_timeout = gap_timeout, total_timeout
        for name in ("connect_timeout", "first_timeout", "gap_timeout", "total_timeout", "max_wait"):
            if not (value := getattr(self, name)) > 0:  # without end is accepted
                raise ValueError(f"{name} must be seconds above 0, got {value!r}")
        self.clock = clock or SystemClock()
        self._transport = transport or HTTPTransport(parts)
        self._usage = True  # whether the server takes stream_options; one that refuses is not asked again

    def models(self) -> list[str] | None:
        """Names that the server lists, or None if it has no list. Waits while it is loading.

        Raises ValueError if it cannot be asked.
        """
        found: list[bytes] = []

        def read(reply: Reply) -> None:
            found.append(read_body(reply, self.clock, self.gap_timeout))

        fault = self._patiently(lambda answer: self._exchange("GET", "/models", None, answer, read)).fault
        if fault and fault.kind == "missing":
            return None
        if fault:
            raise ValueError(f"endpoint {self.url}: {fault}")
        try:
            return [str(row["id"]) for row in json.loads(found[0])["data"]]
        except (ValueError, TypeError, KeyError):
            return None

    def choose_model(self) -> str:
        """Check the model's name against the server's list, or take the only one listed; returns it.

        Raises ValueError, with near names, if the server lists others.
        """
        listed = self.models()
        if self.model is None:
            if not listed or len(listed) != 1:
                known = f"it lists {', '.join(listed)}" if listed else "it lists none"
                raise ValueError(f"model is not given, and {self.url} leaves no choice: {known}")
            self.model = listed[0]
        elif listed and self.model not in listed:
            near = near_names(self.model, listed) or listed[:4]
            raise ValueError(f"model {self.model!r} is not at {self.url}; it lists {', '.join(near)}")
        return self.model

    def ask(self, prompt: str, *, max_tokens: int, temperature: float = 0.0) -> Answer:
        """Send one prompt and time its answer. A fault is in the answer, never raised."""
        chat = [{"role": "user", "content": prompt}]
        asked = {"messages": chat} if self.api == "chat" else {"prompt": prompt}
        options = {"max_tokens": whole("max_tokens", max_tokens), "temperature": temperature}
        body = {"model": self.model, "stream": True} | options | asked | self.extra
        return self._patiently(lambda answer: self._once(body, answer))

    def ask_all(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int,
        concurrency: int = 1,
        on_answer: Callable[[int, Answer], None] | None = None,
    ) -> list[Answer]:
        """Send many prompts, `concurrency` at once; answers in the prompts' order.

        Nothing more is sent once a fault shows that it would be in vain; what was not sent says so.
        """
        if whole("concurrency", concurrency) > self.limit:
            raise ValueError(f"concurrency={concurrency!r}; this endpoint's limit is 1 to {self.limit}")
        answers: list[Answer | None] = [None] * len(prompts)
        workers = min(concurrency, len(prompts))
        rest, lock, hopeless = iter(range(workers, len(prompts))), Lock(), []
        ready = Barrier(max(1, workers))

        def work(i: int | None) -> None:
            ready.wait()  # so that the first requests leave together
            while i is not None:
                if hopeless:
                    answers[i] = Answer(fault=hopeless[0], attempts=0)
                else:
                    answers[i] = a = self.ask(prompts[i], max_tokens=max_tokens)
                    if a.fault and a.fault.kind in HOPELESS:
                        hopeless.append(a.fault)
                    if on_answer:
                        on_answer(i, a)
                with lock:
                    i = next(rest, None)

        with ThreadPoolExecutor(concurrency) as pool:
            try:
                for worker in [pool.submit(work, i) for i in range(workers)]:
                    worker.result()
            except BaseException:
                hopeless.append(Fault("refused", "given up"))  # what is in flight ends, nothing more is sent
                raise
        return answers

    def _patiently(self, once: Callable[[Answer], float | None]) -> Answer:
        """Try until it works, is hopeless, or patience ends. once(answer) returns the pause asked for."""
        attempts, waited, pause = 1, 0.0, 1.0
        while True:
            answer = Answer(attempts=attempts, waited_s=waited)
            asked = once(answer)
            wait = pause if asked is None else asked
            enough = attempts > self.retries or waited + wait > self.max_wait
            if answer.fault is None or answer.fault.kind not in LATER or enough:
                return answer
            self.clock.sleep(wait)
            attempts, waited, pause = attempts + 1, waited + wait, pause * 2

    # One request ------------------------------------------------------------------------------------------

    def _once(self, body: dict, answer: Answer) -> float | None:
        """Fill `answer`; returns the seconds that the server asked to wait for, if it did."""
        read = partial(read_stream, answer=answer, limits=self, key=self._key())
        sent = body | ({"stream_options": {"include_usage": True}} if self._usage else {})
        asked = self._exchange("POST", PATHS[self.api], sent, answer, read)
        refused = answer.fault and answer.fault.kind == "refused"
        if refused and self._usage and "stream_options" in answer.fault.detail:
            self._usage = False
            asked = self._exchange("POST", PATHS[self.api], body, answer, read)
        if answer.fault:
            answer.itl_s = answer.itl_low_s = answer.itl_high_s = None
        return asked

    def _exchange(
        self, method: str, path: str, body: dict | None, answer: Answer, read: Callable[[Reply], Fault | None]
    ) -> float | None:
        """Connect, send, `read` what comes back; into `answer`. Returns the pause asked for, as `_once`."""
        headers = {"Accept": "text/event-stream" if body else "application/json", "Connection": "close"}
        headers["User-Agent"] = "what-a-token-costs"
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        data = None
        if body is not None:
            headers["Content-Type"], data = "application/json", json.dumps(body).encode()
        connection = reply = None
        try:
            started = self.clock.now()
            connection = self._transport.connect(self.connect_timeout)
            answer.sent_s = self.clock.now()
            answer.connect_s = answer.sent_s - started
            try:
                reply = connection.request(method, self._base + path, headers, data, self.first_timeout)
            except ValueError:  # a key with a line break, or a character that no header may hold
                why = f"the key in {self.key_env} is no text that a header can carry"
                answer.fault = Fault("refused", why)
                return None
            answer.fault = read(reply) if reply.status == 200 else refusal(reply, self, key)
            return seconds_to_wait(reply) if reply.status != 200 else None
        except TransportError as e:
            n = len(answer.arrivals_s)
            where = f", after {n} events with text" if n else ", before the first token"
            answer.fault = Fault(e.kind, f"{e}{where if reply and body else ''}")
            return None
        finally:
            if connection:
                (reply or connection).close()

    def _key(self) -> str:
        return os.environ.get(self.key_env, "").strip()


class EndpointTarget:
    """Measures through `endpoint`. Lengths are the server's own count of tokens.

    shape: the model's, if it is known; with a device it gives predictions.
    session: makes the prompts differ from those of any other session, an earlier one of this study included.
    """

    def __init__(self, endpoint: Endpoint, *, shape: Shape | None = None, session: str = ""):
        self.endpoint, self.session = endpoint, session
        self.shapes = {} if shape is None else {"base": shape}
        self._per_word, self._fixed = 1.0, 0.0  # tokens per word of a prompt, and beside its words
        self._sent = 0

    def describe(self) -> dict:
        """Facts about what is measured, for the study's file: its kind, device and variants."""
        facts = {"kind": "endpoint", "url": self.endpoint.url, "model": self.endpoint.model}
        return facts | {"variants": {name: shape.to_dict() for name, shape in self.shapes.items()}}

    def warm_up(self) -> None:
        """Choose the model and count the tokens of two prompts, to aim at lengths. ValueError on a fault."""
        self.endpoint.choose_model()
        found = []
        for words in (16, 144):
            answer = self.endpoint.ask(self._prompt(words), max_tokens=2)
            if answer.fault:
                raise ValueError(f"endpoint {self.endpoint.url}: {answer.fault}")
            found.append(answer.prompt_tokens)
        if None not in found and found[1] > found[0]:
            self._per_word = (found[1] - found[0]) / 128
            self._fixed = found[0] - 16 * self._per_word

    def measure(self, point: Point) -> Run:
        """One run of `point`; where there is none, the run's `fault` says why."""
        if not point.prompt:
            return Run(fault="a server's cache cannot be filled from outside: points need prompt=True")
        if point.batch > self.endpoint.limit:
            return Run(fault=f"batch {point.batch} is more than the {self.endpoint.limit} requests allowed")
        words = max(1, round((point.context - self._fixed) / self._per_word))
        prompts = [self._prompt(words) for _ in range(point.batch)]
        if point.variant == "warm":
            known = self.endpoint.ask_all(prompts, max_tokens=1, concurrency=point.batch)
            if fault := next((a.fault for a in known if a.fault), None):
                return Run(fault=str(fault))
            prompts = [other_ending(p, f"{self.session}{self._sent}") for p in prompts]
        answers = self.endpoint.ask_all(prompts, max_tokens=point.new_tokens + 1, concurrency=point.batch)
        return summary(point, answers)

    def _prompt(self, words: int) -> str:
        self._sent += 1
        return prompt(words, f"{self.session}/{self._sent}")
