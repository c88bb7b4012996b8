"""Who computes what in the next step: a queue, a list of running requests, a budget of tokens. No tensors.

    scheduler = Scheduler(BlockManager(num_blocks, block_size), max_running=8, max_tokens_per_step=256)
    job = scheduler.add("a", prompt, max_new_tokens=32)
    while scheduler.unfinished:
        plan = scheduler.plan()
        for chunk in plan.chunks:
            ...                         # compute job.tokens[chunk.start : chunk.stop], write keys and values
            scheduler.commit(chunk)     # the next prompt may find them from here on
            if chunk.samples:
                scheduler.push(chunk.job, token)    # or scheduler.finish(chunk.job)

One rule for every request: it has tokens (the prompt, then what was sampled), of which the first `computed`
are in the cache, and computing the last one gives the next. A decode is a request with one token to compute,
a prompt one with many, a preempted request one that starts again from what the prefix cache still has of it.

What is decided, in this order:

1. Whoever has one token to compute gets it: no prompt delays a decode by more than the budget of a step.
2. If the pool has no block for it, the last arrived running request gives up its blocks and goes to the front
   of the queue, tokens kept.
3. What is left of the budget goes to the prompts that have begun, the oldest first, in chunks.
4. What is still left admits requests from the queue, strictly in order. All slots of its tokens are reserved
   when a request is admitted, and a block for each request that will grow is left over: so a prompt that has
   begun can always be finished, and many half-read prompts cannot wait for one another.

Why nobody starves: running requests arrived before waiting ones (2 and 4 keep it so), so the victim of 2 is
never the oldest while there is another, and alone it has its blocks, for what exceeds the pool was refused.
The oldest request computes at least one token of its prompt or samples one in every step.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator

from ..checks import must, require, whole
from ..paging import BlockManager, PoolFull, blocks_needed
from ..paging.prefix import Extra, as_tokens, encode_extra
from .records import Chunk, Job, Plan


class Refused(ValueError):
    """A request that can never be served by this engine; the message says why."""


class Scheduler:
    """First come, first served, over the blocks of one manager. A step costs O(running), however many wait.

    max_running: requests that hold blocks at a time. max_tokens_per_step: tokens computed in a step, at least
    max_running, so that every decode has its place in each. max_length: most tokens of prompt and reply, or
    None.

    Attributes to read: `running` and `waiting` (both in order of arrival), `manager`.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_running: int = 8,
        max_tokens_per_step: int = 256,
        max_length: int | None = None,
    ) -> None:
        self.manager, self.max_running = manager, whole("max_running", max_running, 1)
        # A token for each request that decodes.
        self.max_tokens_per_step = whole("max_tokens_per_step", max_tokens_per_step, max_running)
        self.max_length = None if max_length is None else whole("max_length", max_length, 1)
        self.running: list[Job] = []
        self._waiting: OrderedDict[Hashable, Job] = OrderedDict()  # both ends and the middle in O(1)
        self._arrivals = 0

    @property
    def waiting(self) -> Iterator[Job]:
        """Those that hold no blocks, the next to be admitted first."""
        return iter(self._waiting.values())

    @property
    def num_waiting(self) -> int:
        """How many hold no blocks."""
        return len(self._waiting)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self.running)

    # --- requests come and go ----------------------------------------------------------------------------

    def add(self, id: Hashable, prompt: Iterable[int], max_new_tokens: int, extra: Extra = ()) -> Job:
        """A request at the end of the queue.

        extra: what it may share a prefix under, besides the tokens (`companion.paging.PrefixIndex`).
        Raises `Refused` (a ValueError) for what can never be served, and ValueError for what is no request:
        an empty prompt, tokens that are no ids, max_new_tokens below 1, an id that waits or runs.
        """
        tokens = as_tokens("prompt", prompt)[:]
        encode_extra(extra)
        whole("max_new_tokens", max_new_tokens, 1)
        require(tokens, "prompt", "at least one token to continue", prompt)
        ended = id not in self._waiting and all(job.id != id for job in self.running)
        require(ended, "id", "no request's that has not ended yet", id)
        reason = self.refusal(len(tokens), max_new_tokens)
        if reason:
            raise Refused(reason)
        job = Job(id, self._arrivals, tokens, len(tokens), max_new_tokens, tuple(extra))
        self._arrivals += 1
        self._waiting[id] = job
        return job

    def refusal(self, prompt: int, max_new_tokens: int) -> str | None:
        """Why a request of so many tokens could never be served; None if it can."""
        pool, total = self.manager.pool, prompt + max_new_tokens
        asked = f"prompt of {prompt} tokens plus max_new_tokens={max_new_tokens}"
        if self.max_length is not None and total > self.max_length:
            return f"{asked} is {total}; the model is made for at most {self.max_length}"
        need = blocks_needed(total - 1, pool.block_size)
        if need > pool.num_blocks:
            return f"{asked} takes up to {need} blocks of {pool.block_size}; the pool has {pool.num_blocks}"
        return None

    def finish(self, job: Job) -> None:
        """The request has ended, for whatever reason: its blocks go back, now."""
        if job.state == "running":
            self.running.remove(job)
            self.manager.free(job.seq)
        elif job.state == "waiting":
            del self._waiting[job.id]
        job.state, job.seq = "ended", None

    # --- a step ------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What to compute next; empty only if nothing is unfinished.

        Slots are reserved here. A plan that was never carried out is no harm: the next one repeats it, as it
        repeats the last token of a request whose next one was not pushed.
        """
        plan = Plan()
        for job in self.running:
            job.computed = min(job.computed, len(job.tokens) - 1)
        for job in list(self.running):
            if job.todo == 1 and job.state == "running" and self._extend(job, plan):
                plan.chunks.append(Chunk(job, job.computed, 1, True))
        left = self.max_tokens_per_step - len(plan.chunks)
        for job in self.running:
            if job.todo > 1 and left:
                left -= self._read(job, left, plan)
        # Blocks that a preemption set free belong to those who are older: nobody enters in such a step.
        while left and self._waiting and len(self.running) < self.max_running and not plan.preempted:
            job = next(iter(self._waiting.values()))
            if not self._admit(job):
                break
            plan.admitted.append(job)
            left -= self._read(job, left, plan)
        return plan

    def commit(self, chunk: Chunk) -> None:
        """The chunk's keys and values are written: from now on they can be found by others."""
        job = chunk.job
        job.computed = chunk.stop
        job.work += chunk.count
        self.manager.register(job.seq, job.computed)

    def push(self, job: Job, token: int) -> None:
        """A token was sampled: it is the next to compute."""
        job.tokens.append(token)

    def _extend(self, job: Job, plan: Plan) -> bool:
        """A slot for the last token, at the cost of whoever came last; False if that is the job itself."""
        while len(job.seq) < len(job.tokens):
            try:
                plan.copies += self.manager.append(job.seq, job.tokens[-1])
            except PoolFull:
                plan.preempted.append(self._preempt())
                if job.state == "waiting":
                    return False
        return True

    def _preempt(self) -> Job:
        job = self.running.pop()
        self.manager.free(job.seq)
        job.seq, job.computed, job.state = None, 0, "waiting"
        job.preemptions += 1
        self._waiting[job.id] = job
        self._waiting.move_to_end(job.id, last=False)
        return job

    def _read(self, job: Job, left: int, plan: Plan) -> int:
        """A chunk of a prompt, as long as what is left of the budget allows."""
        count = min(job.todo, left)
        plan.chunks.append(Chunk(job, job.computed, count, count == job.todo))
        return count

    def _admit(self, job: Job) -> bool:
        # A block for each that will need one more. A pool with nobody running has it: see `refusal`.
        growing = sum(self._grows(other, len(other.seq)) for other in self.running)
        try:
            job.seq = self.manager.allocate(
                job.tokens, job.extra, spare=growing + self._grows(job, len(job.tokens))
            )
        except PoolFull:
            return False
        del self._waiting[job.id]
        self.running.append(job)
        job.state, job.computed = "running", job.seq.shared
        if job.cached is None:
            job.cached = job.seq.shared
        return True

    def _grows(self, job: Job, held: int) -> bool:
        size = self.manager.block_size
        return -(-held // size) < -(-job.most // size)

    def check(self) -> None:
        """Raise BrokenInvariant on the first of these that fails. O(everything): for tests.

        1. The manager's own (`BlockManager.check`); its sequences are those of the running requests.
        2. Running and waiting requests, one after the other, stand in order of arrival.
        3. No more than max_running run, and every request's state says where it is.
        4. A running request has slots for all its tokens, or all but the last; what is computed is reserved.
        5. A waiting request holds no block.
        """
        self.manager.check()
        waiting = list(self._waiting.values())
        held = {id(s) for s in self.manager.sequences}
        must(held == {id(j.seq) for j in self.running}, "sequences that no running request owns")
        numbers = [j.number for j in self.running + waiting]
        must(numbers == sorted(set(numbers)), "requests are not in order of arrival: {}", numbers)
        must(len(self.running) <= self.max_running, "{} requests run", len(self.running))
        for job in self.running:
            n = len(job.seq)
            must(job.state == "running", "{} runs and says {}", job.id, job.state)
            must(job.seq.tokens == job.tokens[:n], "{}: the cache is told other tokens", job.id)
            must(len(job.tokens) - 1 <= n and job.computed <= n, "{}: {} slots reserved", job.id, n)
            must(len(job.tokens) <= job.most + 1, "{} has {} tokens", job.id, len(job.tokens))
        for job in waiting:
            must(job.state == "waiting" and job.seq is None, "{} waits and says {}", job.id, job.state)
            must(job.computed == 0, "{} waits with computed tokens", job.id)
