"""The scheduler for a page in a browser: arrivals in, the timeline out, as JSON. Standard library only."""

from collections.abc import Iterator
from dataclasses import asdict
from math import fsum

from ..checks import choice, number, require, whole
from ..serving.records import Part, Step
from ..serving.simulation import Arrival, Seconds, Served, Timeline, roofline, simulate
from . import TOKENS, Words, answer, counted, known, said

LIMITS = {"num_blocks": 65536, "requests": 200, "tokens": TOKENS, "steps": 4000}
OPTIONS = ("block_size", "max_running", "max_tokens_per_step", "prefix_caching", "max_length")
ROOFLINE = ("weights", "kv", "compute_dtype", "efficiency", "compute_efficiency", "overhead_seconds")


def _option(name: str, value: object) -> object:
    if name == "prefix_caching":
        require(isinstance(value, bool), name, "true or false", value)
        return value
    return None if name == "max_length" and value is None else whole(name, value, 1)


def _seconds(cost: object) -> Seconds:
    cost = known("cost", cost, ("step_s", "token_s", "model", "hardware", *ROOFLINE))
    if "model" in cost or "hardware" in cost:
        given = {k: v for k, v in cost.items() if k in ROOFLINE}
        if "step_s" in cost or "token_s" in cost:
            raise ValueError("cost: give model and hardware, or step_s and token_s")
        for key in ("model", "hardware"):
            require(isinstance(cost.get(key), str), key, "a name", cost.get(key), owner="cost")
        return roofline(cost["model"], cost["hardware"], **given)
    step = number("step_s", cost.get("step_s", 0.02), 0, 1e9, owner="cost")
    token = number("token_s", cost.get("token_s", 0.001), 0, 1e9, owner="cost")
    return lambda parts: step + token * sum(p.count for p in parts)


def _prompt(words: Words, prompt: object, prefix: object, at: int) -> list[int]:
    """A text, a list of words, or a number of tokens, behind a prefix that others may share."""
    head: list[object] = []
    if prefix is not None:
        prefix = known("prefix", prefix, ("name", "tokens"))
        n = words.count(whole("prefix tokens", prefix.get("tokens"), 1))
        head = [f"prefix {prefix.get('name')!r} {i}" for i in range(n)]
    if isinstance(prompt, int):
        n = words.count(whole("prompt", prompt, 0))
        return words.tokens(head + [f"prompt {at} {i}" for i in range(n)])
    return words.tokens(head + words.read("prompt", prompt))


def _arrivals(requests: object) -> list[Arrival]:
    fits = isinstance(requests, list) and len(requests) <= LIMITS["requests"]
    require(fits, "requests", f"a list of at most {LIMITS['requests']}", requests)
    words, out = Words(), []
    for i, r in enumerate(requests):
        keys = ("id", "at_s", "prompt", "prefix", "new_tokens", "max_new_tokens", "salt")
        r = known(f"request {i}", r, keys)
        at, id, salt = r.get("at_s", 0), r.get("id", str(i)), r.get("salt")
        number("at_s", at, 0, owner=f"request {i}")
        require(isinstance(id, str), "id", "a text", id, owner=f"request {i}")
        require(salt is None or isinstance(salt, str), "salt", "a text or null", salt, owner=f"request {i}")
        new = words.count(whole("new_tokens", r.get("new_tokens"), 1))
        most = r.get("max_new_tokens")
        most = None if most is None else whole("max_new_tokens", most, 1)
        prompt = _prompt(words, r.get("prompt"), r.get("prefix"), i)
        out.append(Arrival(at, prompt, new, id, most, () if salt is None else (salt,)))
    return out


# --- requests from a few numbers --------------------------------------------------------------------------

# Eighths of the length that was asked for, of prompts and of replies, in turns.
MIXES = {
    "alike": ((8,), (8,)),
    "prompts": ((6, 10, 4, 8), (8,)),
    "replies": ((8,), (2, 8, 4, 16)),
    "long": ((8,), (8,)),  # and the last one's prompt is sixteen times as long
    "shared": ((8,), (8,)),  # and all prompts begin with the same three quarters
}


def _traffic(given: object, seconds: Seconds) -> list[dict]:
    """`count` requests, one every `spacing` steps: a step is what one request alone takes for a token."""
    given = known("traffic", given, ("count", "spacing", "prompt", "reply", "mix"))
    count = whole("count", given.get("count"), 1, LIMITS["requests"])
    prompt, reply = (whole(k, given.get(k), 1, LIMITS["tokens"]) for k in ("prompt", "reply"))
    spacing = whole("spacing", given.get("spacing", 0), 0, LIMITS["tokens"])
    mix = choice("mix", given.get("mix", "alike"), MIXES)
    every, (prompts, replies), requests = spacing * seconds([Part("", prompt, 1, True)]), MIXES[mix], []
    for i in range(count):
        name = chr(65 + i % 26) + str(i // 26 or "")
        request = {"id": name, "at_s": i * every, "prompt": max(1, prompt * prompts[i % len(prompts)] // 8)}
        request["new_tokens"] = max(1, reply * replies[i % len(replies)] // 8)
        if mix == "long" and i == count - 1:
            request["prompt"] *= 16
        if mix == "shared" and (same := prompt * 3 // 4):
            request |= {"prompt": prompt - same, "prefix": {"name": mix, "tokens": same}}
        requests.append(request)
    return requests


# --- what the server decided in every step, in sentences, and whom it kept waiting -----------------------


class _Reader:
    """Follows the requests through the steps: who computes what, and who waits for what."""

    def __init__(self, served: list[Served], most: int, seats: int) -> None:
        self.served, self.most, self.seats = served, most, seats
        self.next = 0
        self.here: dict = {}  # id -> its place in served, in order of arrival; an id may come again later
        self.running: set = set()
        self.high = [0] * len(served)  # tokens that were in the cache at some time
        self.again = [0] * len(served)  # tokens computed once more
        self.open: dict[int, dict] = {}
        self.waits: list[dict] = []  # kind: waiting (never ran) or back (was sent back)

    def read(self, step: Step) -> dict:
        while self.next < len(self.served) and self.served[self.next].arrival_s <= step.start_s:
            one = self.served[self.next]
            if one.refused is None:
                self.here[one.id] = self.next
                self._wait(self.next, "waiting", one.arrival_s)
            self.next += 1
        self.running = (self.running | set(step.admitted)) - set(step.preempted)
        parts = [self._part(p) for p in step.parts]
        computing = {p["row"] for p in parts}
        for row in self.here.values():
            if row in computing:
                self._close(row, step.start_s)
            else:
                self._wait(row, "back" if self.high[row] else "waiting", step.start_s)
        decided = list(self._decided(step, parts))
        for id, _ in step.finished:
            self.running.discard(id)
            del self.here[id]
        return {"parts": parts, "decided": decided}

    def _wait(self, row: int, kind: str, at: float) -> None:
        if row not in self.open or self.open[row]["kind"] != kind:
            self._close(row, at)
            self.open[row] = {"row": row, "kind": kind, "start_s": at}

    def _close(self, row: int, at: float) -> None:
        wait = self.open.pop(row, None)
        if wait is not None and wait["start_s"] < at:
            self.waits.append(wait | {"end_s": at})

    def _part(self, p: Part) -> dict:
        row, stop = self.here[p.id], p.start + p.count
        again = max(0, min(self.high[row], stop) - p.start)
        self.again[row] += again
        self.high[row] = max(self.high[row], stop)
        kind = "again" if again else "decode" if p.start >= self.served[row].prompt_tokens else "prefill"
        return asdict(p) | {"row": row, "kind": kind, "again": again}

    def _decided(self, step: Step, parts: list[dict]) -> Iterator[str]:
        if back := step.preempted:
            yield f"No block is free: {said(back, 'gives', 'give')} all back, to be computed again."
        new, prompts = set(step.admitted), [p for p in parts if p["kind"] == "prefill"]
        if writing := [p["id"] for p in parts if p["kind"] == "decode" and p["id"] not in new]:
            yield f"{said(writing, 'writes one token', 'write one token each')}."
        whole = [p for p in prompts if p["id"] in new and p["count"] == self.served[p["row"]].prompt_tokens]
        if whole[1:]:
            counts = said([p["count"] for p in whole], "", "tokens, read in one step.")
            yield f"{said([p['id'] for p in whole], '', 'enter')} with prompts of {counts}"
        for p in parts:
            who, n = p["id"], counted(p["count"])
            if who in new:
                who += f" enters, finds {counted(p['start'])} in the cache," if p["start"] else " enters"
                who += " and"
            if p["kind"] == "again":
                yield f"{who} computes {n}, {p['again']} of them once more."
            elif p["kind"] == "prefill" and not (p in whole and whole[1:]):
                left = self.served[p["row"]].prompt_tokens - p["start"] - p["count"]
                rest = f", {left} are left" if left else ", and writes its first token"
                yield f"{who} reads {n} of its prompt{rest}."
            elif p["kind"] == "decode" and p["id"] in new:
                yield f"{who} writes one token."
        if queue := [id for id in self.here if id not in self.running]:
            why = "too few blocks are free for its tokens and for those who will grow"
            if back:
                why = "nobody enters in a step that took blocks back"
            elif step.tokens == self.most:
                why = f"all {counted(self.most)} of the step are taken"
            elif len(self.running) == self.seats:
                why = f"all {self.seats} seats are taken"
            yield f"{queue[0]} waits: {why}.{f' {len(queue) - 1} more behind it.' if queue[1:] else ''}"
        if step.finished:
            yield f"{said([id for id, _ in step.finished], 'ends', 'end')}."


def _mean(values: list[float]) -> float | None:
    return fsum(values) / len(values) if values else None


def _summary(timeline: Timeline, most: int, seats: int) -> dict:
    reader = _Reader(timeline.served, most, seats)
    steps = [asdict(s) | {"tokens": s.tokens, "decodes": s.decodes} | reader.read(s) for s in timeline.steps]
    requests = [
        asdict(s) | {"itl_mean_s": _mean(s.itl_s), "itl_max_s": max(s.itl_s, default=None), "again": again}
        for s, again in zip(timeline.served, reader.again)
    ]
    first = [s.ttft_s for s in timeline.served if s.ttft_s is not None]
    between = [t for s in timeline.served for t in s.itl_s]
    return {
        "steps": steps,
        "requests": requests,
        "waits": reader.waits,
        "seconds": timeline.seconds,
        "tokens_per_second": timeline.tokens_per_second,
        "totals": {
            "steps": len(steps),
            "tokens": sum(s.new_tokens for s in timeline.served),
            "computed": sum(s.tokens for s in timeline.steps),
            "again": sum(reader.again),
            "preemptions": sum(s.preemptions for s in timeline.served),
            "refused": sum(s.refused is not None for s in timeline.served),
            "blocks_live_max": max((s.blocks_live for s in timeline.steps), default=0),
            "ttft_mean_s": _mean(first),
            "ttft_max_s": max(first, default=None),
            "itl_mean_s": _mean(between),
            "itl_max_s": max(between, default=None),
        },
    }


def _played(data: dict) -> dict:
    known("request", data, ("num_blocks", *OPTIONS, "cost", "requests", "traffic"))
    whole("num_blocks", data.get("num_blocks"), 1, LIMITS["num_blocks"])
    if "traffic" in data and "requests" in data:
        raise ValueError("request: give requests or traffic")
    seconds, options = _seconds(data.get("cost", {})), {"max_running": 8, "max_tokens_per_step": 256}
    options |= {k: _option(k, data[k]) for k in OPTIONS if k in data}
    requests = _traffic(data["traffic"], seconds) if "traffic" in data else data.get("requests", [])
    options |= {"num_blocks": data["num_blocks"], "max_steps": LIMITS["steps"]}
    timeline = simulate(_arrivals(requests), seconds, **options)
    return _summary(timeline, options["max_tokens_per_step"], options["max_running"])


def live(request: str) -> str:
    """Play requests on the engine's scheduler with a made-up clock, and tell every step.

    The request and the reply are JSON. A request:

        {"num_blocks": 64, "block_size": 16, "max_running": 8, "max_tokens_per_step": 256,
         "prefix_caching": true, "max_length": null,
         "cost": {"step_s": 0.02, "token_s": 0.001},
         "requests": [{"id": "A", "at_s": 0, "prompt": 300, "new_tokens": 40, "max_new_tokens": 64,
                       "prefix": {"name": "system", "tokens": 128}, "salt": null}, ...]}

    Instead of two numbers, `cost` may name what gives them, and `traffic` make the requests, one every
    `spacing` steps of one request alone; the mixes are "alike", "prompts", "replies", "long" and "shared":

        "cost": {"model": "llama-3.1-8b", "hardware": "h100-sxm", "overhead_seconds": 0.0, ...}
        "traffic": {"count": 4, "spacing": 2, "prompt": 8, "reply": 20, "mix": "prompts"}

    A prompt is a number of tokens, a text split at spaces, or a list of words. The reply:

        {"ok": true, "result": {"steps": [...], "requests": [...], "waits": [...], "seconds": ...,
                                "tokens_per_second": ..., "totals": {...}}}
        {"ok": false, "error": "..."}

    A step is as in `companion.engine.Step`, with `decided`, what the scheduler decided in sentences; its
    parts have `row`, the request's place in `requests`, `kind` (prefill, decode, or again: computed before
    and lost), and how many were computed `again`. A request is as in `companion.serving.simulation.Served`
    (finish_reason "refused" with the reason, if it could never be served). A wait has `row`, `kind` (waiting,
    back), `start_s` and `end_s`. An error says what in the request makes no sense.
    """
    return answer(request, _played)
