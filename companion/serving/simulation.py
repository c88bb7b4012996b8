"""The engine's scheduler without a model: a clock that a cost model turns. Standard library only.

    seconds = roofline("llama-3.1-8b", "h100-sxm")
    timeline = simulate([Arrival(0.0, 512, 64), Arrival(0.1, 2048, 64)], seconds, num_blocks=4096)
    timeline.tokens_per_second, timeline.served[0].ttft_s

What an engine decides does not depend on what the model says, only on how long it takes to say it. So this is
the prediction to make before measuring: the same `Scheduler`, the same `Step`s as in `Engine.history`.

"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ..checks import number, positive, whole
from ..cost import (
    HardwareSpec,
    ModelSpec,
    kv_bytes,
    prefill_attention_flops,
    prefill_flops,
    weight_bytes_read,
)
from ..cost.registry import resolve_hardware, resolve_model
from ..paging import BlockManager
from ..paging.prefix import Extra
from .records import Job, Part, Step
from .scheduler import Refused, Scheduler

Seconds = Callable[[Sequence[Part]], float]


@dataclass(frozen=True)
class Arrival:
    """A request at a time. prompt: token ids, or how many (then they are like no other prompt's).

    new_tokens: how many it will sample before it stops; max_new_tokens: what it may (None: the same).
    """

    at_s: float
    prompt: Sequence[int] | int
    new_tokens: int
    id: Hashable | None = None
    max_new_tokens: int | None = None
    extra: Extra = ()


@dataclass
class Served:
    """What a request would see; as in `companion.engine.Completion`. A refused one has the reason."""

    id: Hashable
    prompt_tokens: int
    arrival_s: float
    finish_reason: str | None = None
    refused: str | None = None
    new_tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    finished_s: float | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0


@dataclass
class Timeline:
    """All steps, and all requests in order of arrival."""

    steps: list[Step]
    served: list[Served]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return self.steps[-1].start_s + self.steps[-1].seconds if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of the whole time."""
        return sum(s.new_tokens for s in self.served) / self.seconds if self.steps else 0.0


def roofline(
    model: ModelSpec | str,
    hardware: HardwareSpec | str,
    *,
    weights: str = "bf16",
    kv: str = "bf16",
    compute_dtype: str | None = None,
    efficiency: float = 1.0,
    compute_efficiency: float = 1.0,
    overhead_seconds: float = 0.0,
) -> Seconds:
    """Seconds of a step of decodes and chunks together, by the formula of `companion.cost.decode_step`.

    max(held / bandwidth, products / peak) + max(cache / bandwidth, attention / peak) + overhead: weights
    are read once for all tokens, each request's cache once. efficiency: share of the bandwidth that is
    reached; compute_efficiency: of the peak.
    """
    spec, device = resolve_model(model), resolve_hardware(hardware)
    number("overhead_seconds", overhead_seconds, 0)
    bandwidth = device.bandwidth * positive("efficiency", efficiency, 1)
    reached = positive("compute_efficiency", compute_efficiency, 1)
    peak = device.peak(compute_dtype or device.default_compute) * reached

    def seconds(parts: Sequence[Part]) -> float:
        tokens = sum(p.count for p in parts)
        held = weight_bytes_read(spec, tokens, weights)
        attention = sum(prefill_attention_flops(spec, p.count, cached=p.start) for p in parts)
        products = sum(prefill_flops(spec, p.count, cached=p.start, logits="last") for p in parts) - attention
        cache = sum(kv_bytes(spec, p.start + p.count, dtype=kv, step=p.count) for p in parts)
        read, look = max(held / bandwidth, products / peak), max(cache / bandwidth, attention / peak)
        return float(read + look + overhead_seconds)

    return seconds


def simulate(
    arrivals: Iterable[Arrival],
    seconds: Seconds,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_running: int = 8,
    max_tokens_per_step: int = 256,
    prefix_caching: bool = True,
    max_length: int | None = None,
    max_steps: int = 1_000_000,
) -> Timeline:
    """Play the arrivals; a step takes `seconds(parts)`. A request joins at the first step after its arrival.

    Raises ValueError for arrivals that make no sense and for more than max_steps steps.
    """
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, prefix=prefix_caching),
        max_running=max_running,
        max_tokens_per_step=max_tokens_per_step,
        max_length=max_length,
    )
    coming = sorted(enumerate(arrivals), key=lambda pair: pair[1].at_s)
    play = _Play(scheduler, seconds, [Served(*_first(i, a)) for i, a in coming], [a for _, a in coming])
    while play.unfinished:
        if len(play.steps) == max_steps:
            raise ValueError(f"max_steps={max_steps}; {play.unfinished} requests have not ended by then")
        play.step()
    return Timeline(play.steps, play.served)


def _first(i: int, a: Arrival) -> tuple[Hashable, int, float]:
    count = a.prompt if isinstance(a.prompt, int) else len(a.prompt)
    number("at_s", a.at_s, 0)
    whole("new_tokens", a.new_tokens)
    if a.max_new_tokens is not None:
        whole("max_new_tokens", a.max_new_tokens, a.new_tokens)
    return (i if a.id is None else a.id), count, a.at_s


class _Play:
    def __init__(self, scheduler: Scheduler, seconds: Seconds, served: list[Served], arrivals: list[Arrival]):
        self.scheduler, self.seconds, self.served, self.arrivals = scheduler, seconds, served, arrivals
        self.steps: list[Step] = []
        self.now = Fraction(0)  # exact, so that a timeline does not depend on the order of sums
        self.next = 0
        self.of: dict[Job, tuple[Served, Arrival]] = {}
        self.last: dict[Job, float] = {}

    @property
    def unfinished(self) -> int:
        return self.scheduler.unfinished + len(self.arrivals) - self.next

    def step(self) -> None:
        if not self.scheduler.unfinished and self.next < len(self.arrivals):
            self.now = max(self.now, Fraction(self.arrivals[self.next].at_s))  # idle until then
        while self.next < len(self.arrivals) and self.arrivals[self.next].at_s <= self.now:
            self._arrive(self.served[self.next], self.arrivals[self.next])
            self.next += 1
        if not self.scheduler.unfinished:
            return
        plan, step = self.scheduler.plan(), Step(len(self.steps), float(self.now))
        step.parts = [Part(c.job.id, c.start, c.count, c.samples) for c in plan.chunks]
        step.admitted, step.preempted = [j.id for j in plan.admitted], [j.id for j in plan.preempted]
        step.model_s = step.seconds = self.seconds(step.parts)
        number("seconds", step.seconds, 0)
        for chunk in plan.chunks:
            out = self.of[chunk.job][0]
            if out.queue_s is None:
                out.queue_s = float(self.now) - out.arrival_s
        self.now += Fraction(step.seconds)
        for chunk in plan.chunks:
            self.scheduler.commit(chunk)
            if chunk.samples:
                self._sampled(chunk.job, step)
        pool = self.scheduler.manager.pool
        step.running, step.waiting = len(self.scheduler.running), self.scheduler.num_waiting
        step.blocks_free, step.blocks_cached = pool.num_free, pool.num_cached
        step.blocks_live = pool.num_blocks - pool.num_free
        self.steps.append(step)

    def _arrive(self, out: Served, a: Arrival) -> None:
        # Ids of prompts that are like no other: far from those that a caller would use.
        prompt = a.prompt if not isinstance(a.prompt, int) else _own(self.next, 0, a.prompt)
        try:
            job = self.scheduler.add(out.id, prompt, a.max_new_tokens or a.new_tokens, a.extra)
        except Refused as reason:
            out.finish_reason, out.refused = "refused", str(reason)
        else:
            self.of[job] = (out, a)
            self.last[job] = a.at_s

    def _sampled(self, job: Job, step: Step) -> None:
        out, a = self.of[job]
        passed = float(self.now) - self.last[job]
        if out.new_tokens:
            out.itl_s.append(passed)
        else:
            out.ttft_s = passed
        self.last[job] = float(self.now)
        self.scheduler.push(job, _own(job.number, job.prompt + out.new_tokens, 1)[0])
        out.new_tokens += 1
        if out.new_tokens == a.new_tokens:
            out.finish_reason = "length" if a.new_tokens == job.max_new_tokens else "stop"
            out.finished_s = float(self.now)
            out.cached_tokens, out.computed_tokens = job.cached or 0, job.work
            out.preemptions = job.preemptions
            self.scheduler.finish(job)
            step.finished.append((job.id, out.finish_reason))


def _own(number: int, start: int, count: int) -> list[int]:
    """Token ids that belong to one request alone, as far as 32 bits go."""
    return [2**31 + (number * 65537 + start + i) * 2654435761 % 2**31 for i in range(count)]
