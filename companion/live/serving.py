"""The scheduler for a page in a browser: arrivals in, the timeline out, as JSON. Standard library only."""

import json

from ..checks import choice, number, require, whole
from ..serving.records import Part
from ..serving.simulation import Arrival, Seconds, roofline, simulate
from .steps import summary

LIMITS = {"num_blocks": 65536, "requests": 200, "tokens": 65536, "steps": 4000}
OPTIONS = ("block_size", "max_running", "max_tokens_per_step", "prefix_caching", "max_length")
DTYPES = ("weights", "kv", "compute_dtype")
ROOFLINE = (*DTYPES, "efficiency", "compute_efficiency", "overhead_seconds")


def _known(owner: str, given: object, accepted: tuple[str, ...]) -> dict:
    require(isinstance(given, dict), owner, "an object", given)
    if unknown := sorted(set(given) - set(accepted)):
        raise ValueError(
            f"{owner} must have keys of {', '.join(accepted)}, got {', '.join(map(repr, unknown))}"
        )
    return given


def _option(name: str, value: object) -> object:
    if name == "prefix_caching":
        require(isinstance(value, bool), name, "true or false", value)
        return value
    return None if name == "max_length" and value is None else whole(name, value, 1)


def _seconds(cost: object) -> Seconds:
    cost = _known("cost", cost, ("step_s", "token_s", "model", "hardware", *ROOFLINE))
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


class _Words:
    """Numbers for the words of prompts: each different one is a token."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[type, object], int] = {}
        self.seen = 0

    def count(self, n: int) -> int:
        self.seen += n
        require(self.seen <= LIMITS["tokens"], "requests", f"of at most {LIMITS['tokens']} tokens", self.seen)
        return n

    def number(self, word: object) -> int:
        return self.numbers.setdefault((type(word), word), len(self.numbers))

    def prompt(self, prompt: object, prefix: object, at: int) -> list[int]:
        """A text, a list of words, or a number of tokens, behind a prefix that others may share."""
        head: list[object] = []
        if prefix is not None:
            prefix = _known("prefix", prefix, ("name", "tokens"))
            n = self.count(whole("prefix tokens", prefix.get("tokens"), 1))
            head = [f"prefix {prefix.get('name')!r} {i}" for i in range(n)]
        if isinstance(prompt, str):
            prompt = prompt.split()
        elif isinstance(prompt, int):
            prompt = [f"prompt {at} {i}" for i in range(self.count(whole("prompt", prompt, 0)))]
        elif not isinstance(prompt, list) or any(type(t) not in (int, str) for t in prompt):
            raise ValueError(f"prompt must be a text, a list of words, or a number of tokens, got {prompt!r}")
        return [self.number(w) for w in head + prompt[: self.count(len(prompt))]]


def _arrivals(requests: object) -> list[Arrival]:
    fits = isinstance(requests, list) and len(requests) <= LIMITS["requests"]
    require(fits, "requests", f"a list of at most {LIMITS['requests']}", requests)
    words, out = _Words(), []
    for i, r in enumerate(requests):
        keys = ("id", "at_s", "prompt", "prefix", "new_tokens", "max_new_tokens", "salt")
        r = _known(f"request {i}", r, keys)
        at, id, salt = r.get("at_s", 0), r.get("id", str(i)), r.get("salt")
        number("at_s", at, 0, owner=f"request {i}")
        require(isinstance(id, str), "id", "a text", id, owner=f"request {i}")
        require(salt is None or isinstance(salt, str), "salt", "a text or null", salt, owner=f"request {i}")
        new = words.count(whole("new_tokens", r.get("new_tokens"), 1))
        most = r.get("max_new_tokens")
        most = None if most is None else whole("max_new_tokens", most, 1)
        prompt = words.prompt(r.get("prompt"), r.get("prefix"), i)
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
    given = _known("traffic", given, ("count", "spacing", "prompt", "reply", "mix"))
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
    try:
        data = _known("request", json.loads(request), ("num_blocks", *OPTIONS, "cost", "requests", "traffic"))
        whole("num_blocks", data.get("num_blocks"), 1, LIMITS["num_blocks"])
        if "traffic" in data and "requests" in data:
            raise ValueError("request: give requests or traffic")
        seconds, options = _seconds(data.get("cost", {})), {"max_running": 8, "max_tokens_per_step": 256}
        options |= {k: _option(k, data[k]) for k in OPTIONS if k in data}
        requests = _traffic(data["traffic"], seconds) if "traffic" in data else data.get("requests", [])
        options |= {"num_blocks": data["num_blocks"], "max_steps": LIMITS["steps"]}
        timeline = simulate(_arrivals(requests), seconds, **options)
        result = summary(timeline, options["max_tokens_per_step"], options["max_running"])
        reply: dict = {"ok": True, "result": result}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reply = {"ok": False, "error": str(error)}
    return json.dumps(reply)
