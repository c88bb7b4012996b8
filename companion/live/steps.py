"""What a simulated server decided in every step, in sentences for a reader, and whom it kept waiting."""

from collections.abc import Iterator
from dataclasses import asdict
from math import fsum

from ..serving.records import Part, Step
from ..serving.simulation import Served, Timeline


def _names(ids: list, one: str, many: str) -> str:
    """`A writes`, or `A, B and C write`."""
    *most, last = map(str, ids)
    return f"{', '.join(most)} and {last} {many}" if most else f"{last} {one}"


def _tokens(n: int) -> str:
    return f"{n} token{'s' * (n != 1)}"


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
            yield f"No block is free: {_names(back, 'gives', 'give')} all back, to be computed again."
        new, prompts = set(step.admitted), [p for p in parts if p["kind"] == "prefill"]
        if writing := [p["id"] for p in parts if p["kind"] == "decode" and p["id"] not in new]:
            yield f"{_names(writing, 'writes one token', 'write one token each')}."
        whole = [p for p in prompts if p["id"] in new and p["count"] == self.served[p["row"]].prompt_tokens]
        if whole[1:]:
            counts = _names([p["count"] for p in whole], "", "tokens, read in one step.")
            yield f"{_names([p['id'] for p in whole], '', 'enter')} with prompts of {counts}"
        for p in parts:
            who, n = p["id"], _tokens(p["count"])
            if who in new:
                who += f" enters, finds {_tokens(p['start'])} in the cache," if p["start"] else " enters"
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
                why = f"all {_tokens(self.most)} of the step are taken"
            elif len(self.running) == self.seats:
                why = f"all {self.seats} seats are taken"
            yield f"{queue[0]} waits: {why}.{f' {len(queue) - 1} more behind it.' if queue[1:] else ''}"
        if step.finished:
            yield f"{_names([id for id, _ in step.finished], 'ends', 'end')}."


def _mean(values: list[float]) -> float | None:
    return fsum(values) / len(values) if values else None


def summary(timeline: Timeline, most: int, seats: int) -> dict:
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
