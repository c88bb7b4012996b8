"""Continuous batching: requests come and go while every step serves all that run.

    with Engine(model, num_blocks=256, tokenizer=tokenizer) as engine:
        engine.add(Request(tokenizer.encode("Once upon a time"), max_new_tokens=32))
        for completion in engine.run():
            print(completion.text)

A step is: plan (`Scheduler`), one pass of the model over all its tokens (`forward`), one sampled token for
every request whose prompt is read, then text and callbacks.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable

from ..attend.step import Workspace
from ..caches.paged import PagedStorage
from ..checks import require
from ..generate import TextStream, greedy
from ..generate.loop import Decodes, as_prompts, record, tell
from ..model import Decoder
from ..serving.records import Job, Part, Step
from ..serving.scheduler import Scheduler
from .forward import choose, compute
from .request import Completion, Event, Request, Sample, fresh


class _Live:
    """A request that has not ended: what the scheduler knows of it, what it has said, how it chooses."""

    def __init__(self, request: Request, job: Job, sampler: Sample, stops: set[int], stream, out: Completion):
        self.request, self.job, self.sampler, self.stops = request, job, sampler, stops
        self.stream, self.out, self.last_s = stream, out, out.arrival_s


class Engine:
    """Serves requests on one model and one pool of num_blocks blocks of block_size tokens.

    max_running: requests that hold blocks at a time. max_tokens_per_step: tokens computed in a step, decodes
    first; it bounds how long a prompt can hold up the others. prefix_caching: whether prompts use what is
    cached of them. sampler: for requests without their own. tokenizer: needed for text and stop strings.
    history: how many of the last steps are kept. clock: seconds, for tests.

    Attributes to read: `scheduler`, `storage`, `manager`; `history`, a deque of `Step`; `completions`, by id,
    of the requests that ended and were not taken yet; `closed`.

    Whatever the others do, a request gets the tokens that it would get alone, up to the rounding of the
    model's precision. A call that raises has changed nothing.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int = 16,
        *,
        max_running: int = 8,
        max_tokens_per_step: int = 256,
        prefix_caching: bool = True,
        sampler: Sample = greedy,
        tokenizer: Decodes | None = None,
        history: int = 10_000,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.tokenizer, self.sampler = model, tokenizer, sampler
        self.storage = PagedStorage(
            model.spec,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
            prefix=prefix_caching,
        )
        self.manager = self.storage.manager
        self.scheduler = Scheduler(
            self.manager,
            max_running=max_running,
            max_tokens_per_step=max_tokens_per_step,
            max_length=model.spec.max_context,
        )
        self.history: deque[Step] = deque(maxlen=history)
        self.completions: dict[Hashable, Completion] = {}
        self.closed = False
        self._live: dict[Hashable, _Live] = {}
        self._due: deque[tuple[_Live, int | Exception, float]] = (
            deque()
        )  # sampled or failed, and not yet told
        self._workspace, self._stepping, self._steps, self._ids = Workspace(), False, 0, 0
        self._finished: list[tuple[Hashable, str]] = []
        self._clock, self._zero = clock, clock()

    # --- requests ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> Hashable:
        """Put a request at the end of the queue; returns its id.

        Raises `Refused` (a ValueError) for one that could never be served, with the reason; ValueError for
        an empty prompt, ids outside the vocabulary, an id in use (of a request that has not ended or whose
        completion was not taken), stop strings without a tokenizer, a sampler made for several rows.
        """
        self._open("add")
        request.check()
        prompts, single = as_prompts(self.model, request.prompt_ids)
        require(single, "prompt_ids", "one prompt", request.prompt_ids)
        require(self.tokenizer is not None or not request.stop, "tokenizer", "given for stop strings", None)
        stream = TextStream(self.tokenizer, request.stop) if self.tokenizer is not None else None
        sampler = fresh(self.sampler if request.sampler is None else request.sampler)
        stops = set(self.model.stop_ids if request.stop_ids is None else request.stop_ids)
        id = self._new_id(request.id)
        salt = () if request.salt is None else (request.salt,)
        job = self.scheduler.add(id, prompts[0], request.max_new_tokens, salt)
        out = Completion(len(prompts[0]), id=id, number=job.number, arrival_s=self._now())
        self._live[id] = _Live(request, job, sampler, stops, stream, out)
        if request.id is None:
            self._ids = id + 1
        return id

    def cancel(self, id: Hashable) -> bool:
        """End a request now: no token of it is told after this. False if it had ended; else ValueError.

        May be called in a callback.
        """
        self._open("cancel")
        if id in self.completions:
            return False
        require(id in self._live, "id", "that of a request", id)
        self._end(self._live[id], "cancelled")
        return True

    def take(self, id: Hashable) -> Completion:
        """The completion of a request that has ended; the engine forgets it. ValueError if there is none."""
        require(id in self.completions, "id", "that of a request that has ended", id)
        return self.completions.pop(id)

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def run(self) -> list[Completion]:
        """Step until every request has ended; all completions not taken yet, in order of arrival."""
        self._open("run")
        while self._live:
            self.step()
        return [self.take(id) for id in sorted(self.completions, key=lambda i: self.completions[i].number)]

    def close(self) -> None:
        """Cancel what has not ended, give every block back. Afterwards only completions can be read."""
        for live in list(self._live.values()):
            self._end(live, "cancelled")
        self._due.clear()
        self.closed = True

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- a step ------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Compute one step for all that run; the tokens that came out, in order of arrival.

        Without anything to do it returns []. What fails for one request ends it with "error" (its sampler,
        its callback, logits that are no numbers); an exception of the model ends those requests for which it
        comes again when each is computed alone. Raises ValueError after `close`, and in a callback.
        """
        self._open("step")
        if self._stepping:
            raise ValueError("step: called within a step; a callback may add and cancel requests")
        self._stepping = True
        try:
            events = self._tell()  # what an interrupted step had still to tell
            if self._live:
                self._step(events)
            return events
        finally:
            self._stepping = False

    def _step(self, events: list[Event]) -> None:
        started = self._now()
        plan = self.scheduler.plan()
        lives = {c.job.id: self._live[c.job.id] for c in plan.chunks}
        for live in lives.values():
            if live.out.queue_s is None:
                live.out.queue_s = started - live.out.arrival_s
        planned = self._now()
        self.storage.copy(plan.copies)
        results = compute(self.model, self.storage, plan.chunks, self._workspace)
        computed = self._now()
        rows = []
        for chunk, result in zip(plan.chunks, results):
            if not isinstance(result, Exception):
                self.scheduler.commit(chunk)
            if result is not None:
                rows.append((lives[chunk.job.id], result))
        committed = self._now()
        self._due.extend(
            (live, *said)
            for (live, _), said in zip(rows, choose([(live.sampler, row) for live, row in rows]))
        )
        sampled = self._now()
        step = Step(
            self._steps, started, parts=[Part(c.job.id, c.start, c.count, c.samples) for c in plan.chunks]
        )
        self._steps += 1
        step.admitted, step.preempted = [j.id for j in plan.admitted], [j.id for j in plan.preempted]
        step.scheduler_s = planned - started + committed - computed
        step.model_s, step.sampler_s = computed - planned, sampled - committed
        try:
            events += self._tell()
        finally:
            self._note(step)

    def _note(self, step: Step) -> None:
        pool = self.manager.pool
        step.running, step.waiting = len(self.scheduler.running), self.scheduler.num_waiting
        step.blocks_free, step.blocks_cached = pool.num_free, pool.num_cached
        step.blocks_live = pool.num_blocks - pool.num_free
        step.finished, self._finished = self._finished, []
        step.seconds = self._now() - step.start_s
        self.history.append(step)

    def _tell(self) -> list[Event]:
        """Record and hand out what was sampled, one by one: a callback may cancel those that follow."""
        events: list[Event] = []
        now = self._now()
        while self._due:
            live, id, logprob = self._due.popleft()
            out = live.out
            if out.finish_reason is not None:  # cancelled meanwhile
                continue
            if isinstance(id, Exception):
                self._end(live, "error", id)
                self._call(live, Event(out.id, None, "", "error", len(out.tokens)), events)
                continue
            out.logprobs.append(logprob)
            record(out, id, now - live.last_s, live.stops, live.request.max_new_tokens)
            live.last_s = now
            self.scheduler.push(live.job, id)
            piece = tell(out, id, live.stops, live.stream) if live.stream else ""
            if out.finish_reason:
                self._end(live, out.finish_reason)
            self._call(live, Event(out.id, id, piece, out.finish_reason, len(out.tokens) - 1), events)
        return events

    def _call(self, live: _Live, event: Event, events: list[Event]) -> None:
        """Hand an event out. A callback that raises ends its request and nothing else."""
        events.append(event)
        try:
            if live.request.on_token is not None:
                live.request.on_token(event)
        except Exception as error:
            if live.out.finish_reason is None:
                self._end(live, "error", error)
                events.append(Event(event.id, None, "", "error", len(live.out.tokens)))
            elif live.out.error is None:
                live.out.error = error  # it had ended already: its reason stays

    def _end(self, live: _Live, reason: str, error: Exception | None = None) -> None:
        """The one way out: blocks back, books closed."""
        out, job = live.out, live.job
        out.finish_reason, out.error, out.finished_s = reason, error, self._now()
        out.cached_tokens, out.computed_tokens = job.cached or 0, job.work
        out.preemptions = job.preemptions
        if live.stream is not None:
            out.text = live.stream.text
        self.scheduler.finish(job)
        del self._live[out.id]
        self.completions[out.id] = out
        self._finished.append((out.id, reason))

    # --- help --------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._clock() - self._zero

    def _open(self, call: str) -> None:
        if self.closed:
            raise ValueError(f"{call}: this engine is closed")

    def _new_id(self, id: Hashable | None) -> Hashable:
        if id is None:
            id = self._ids
            while id in self._live or id in self.completions:
                id += 1
            return id
        require(id not in self._live and id not in self.completions, "id", "no other request's", id)
        return id
