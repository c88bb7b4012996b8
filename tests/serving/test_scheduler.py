"""The scheduler alone, with a storage that is a dictionary and a model that is a formula.

The storage maps a slot to what would be computed there: the salt and all tokens up to it. Whatever is
planned, a chunk must find its own past in its slots, whoever was preempted, cancelled or evicted in between.
"""

import importlib
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from companion.paging import BlockManager
from companion.serving.scheduler import Refused, Scheduler

BIT = st.integers(0, 1)
PROMPTS = st.builds(
    lambda k, n, t: [k] * n + t, BIT, st.sampled_from([6, 9, 3, 1, 0]), st.lists(BIT, max_size=5)
)
PROMPTS = PROMPTS.filter(bool)


def next_token(tokens):
    return sum(i * t for i, t in enumerate(tokens)) % 3


class Play:
    """A scheduler, its storage, and the check of every step."""

    def __init__(self, num_blocks, block_size, running, budget, prefix=True):
        self.manager = BlockManager(num_blocks, block_size, prefix=prefix)
        self.scheduler = Scheduler(self.manager, max_running=running, max_tokens_per_step=budget)
        self.slots, self.jobs, self.steps, self.ids = {}, {}, 0, 0
        self.chunk = budget - running + 1  # tokens that the oldest prompt gets in a step at least

    def add(self, prompt, n, salt=()):
        self.ids += 1
        job = self.scheduler.add(self.ids, prompt, n, salt)
        # The oldest computes `chunk` tokens or samples one in every step, and is not preempted any more.
        need = [-(-j.prompt // self.chunk) + j.max_new_tokens - 1 for j in [*self.jobs, job]]
        self.jobs[job] = self.steps + sum(need)
        return job

    def end(self, job):
        self.scheduler.finish(job)
        del self.jobs[job]

    def step(self, carry_out=True, push=True):
        scheduler = self.scheduler
        before = {j: j.todo for j in scheduler.running}
        plan = scheduler.plan()
        scheduler.check()
        assert 0 < plan.tokens <= scheduler.max_tokens_per_step or not self.jobs
        assert plan.copies == []
        planned = {c.job: c for c in plan.chunks}
        assert len(planned) == len(plan.chunks) and all(j.state == "running" for j in planned)
        for job, todo in before.items():  # decodes wait for nobody
            assert todo > 1 or job in planned or job in plan.preempted
        if self.jobs:
            oldest = min(self.jobs, key=lambda j: j.number)
            assert planned[oldest].count >= min(oldest.todo, self.chunk)
        for job in plan.preempted:  # the last arrived went, and is the first to come back
            assert all(job.number > other.number for other in scheduler.running)
        assert not (plan.preempted and plan.admitted)
        if not carry_out:
            return plan
        self.steps += 1
        for chunk in plan.chunks:
            job, table = chunk.job, chunk.job.seq.table
            for p in range(chunk.stop):
                mine = (job.extra, tuple(job.tokens[: p + 1]))
                assert p >= chunk.start or self.slots[table.slot(p)] == mine
                self.slots[table.slot(p)] = mine
        for chunk in plan.chunks:
            scheduler.commit(chunk)
            assert chunk.samples == (chunk.job.todo == 0)
            if chunk.samples and push:
                job = chunk.job
                scheduler.push(job, next_token(job.tokens))
                if len(job.tokens) == job.prompt + job.max_new_tokens:
                    self.end(job)
        assert all(self.steps < last for last in self.jobs.values()), "somebody starves"
        return plan


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        size=st.sampled_from([2, 1, 3, 4]),
        blocks=st.sampled_from([6, 9, 12, 4, 20]),
        running=st.integers(1, 4),
        more=st.sampled_from([0, 1, 3, 10]),
        prefix=st.sampled_from([True, True, False]),
    )
    def start(self, size, blocks, running, more, prefix):
        self.play = Play(blocks, size, running, running + more, prefix)

    @rule(prompt=PROMPTS, n=st.integers(1, 7), salt=st.sampled_from([(), (), ("a",)]))
    def add(self, prompt, n, salt):
        blocks, size = self.play.manager.pool.num_blocks, self.play.manager.block_size
        if -(-(len(prompt) + n - 1) // size) > blocks:
            with pytest.raises(Refused, match=f"the pool has {blocks}"):
                self.play.scheduler.add("big", prompt, n, salt)
        else:
            self.play.add(prompt, n, salt)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.play.step()

    @rule()
    def a_plan_that_is_dropped_is_made_again(self):
        first = self.play.step(carry_out=False)
        again = self.play.step(carry_out=False)
        # In another order, perhaps: a prompt of one token, admitted by now, stands among the decodes.
        assert all(chunk in again.chunks for chunk in first.chunks)

    @precondition(lambda self: getattr(self, "play", None) and self.play.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        self.play.end(data.draw(st.sampled_from(list(self.play.jobs))))

    @invariant()
    def agrees(self):
        if hasattr(self, "play"):
            self.play.scheduler.check()
            known = [*self.play.scheduler.running, *self.play.scheduler.waiting]
            assert sorted(j.number for j in known) == sorted(j.number for j in self.play.jobs)

    def teardown(self):
        if hasattr(self, "play"):
            while self.play.jobs:
                self.play.step()
            assert self.play.manager.num_free == self.play.manager.pool.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# --- decisions, one by one ---------------------------------------------------------------------------


def counts(plan):
    return [(c.job.id, c.start, c.count, c.samples) for c in plan.chunks]


def test_decodes_come_first_and_prompts_share_what_is_left():
    play = Play(32, 4, running=4, budget=8)
    play.add([0], 5)
    play.step()
    play.add([1] * 9, 2)
    play.add([2] * 5, 2)
    assert counts(play.step()) == [(1, 1, 1, True), (2, 0, 7, False)]
    assert counts(play.step()) == [(1, 2, 1, True), (2, 7, 2, True), (3, 0, 5, True)]


def test_the_last_arrived_gives_way_and_comes_back_to_what_is_left_of_it():
    play = Play(4, 2, running=2, budget=8)
    a, b = play.add([0, 1, 0], 4), play.add([1, 1, 1], 4)  # two blocks each: the pool is full
    # b must wait although its blocks are free: a will need one of them.
    assert counts(play.step()) == [(a.id, 0, 3, True)] and play.manager.num_free == 2
    play = Play(5, 2, running=3, budget=8)
    a, b = play.add([0], 7), play.add([1], 7)
    seen = [play.step() for _ in range(7)]
    gave = [p for p in seen if p.preempted]
    assert [j.id for p in gave for j in p.preempted] == [b.id] and b.preemptions == 1
    kept = len(b.tokens)
    assert kept > 1 and next(play.scheduler.waiting) is b
    c = play.add([1], 2)
    assert [j.id for j in play.scheduler.waiting] == [b.id, c.id]
    while b in play.jobs:
        play.step()
    assert b.work < 1 + 6 + kept  # something of it had survived


def test_a_prompt_that_is_cached_still_computes_its_last_block():
    play = Play(16, 2, running=2, budget=16)
    play.add([0, 1, 0, 1], 1)
    play.step()
    job = play.add([0, 1, 0, 1], 1)
    assert counts(play.step()) == [(job.id, 2, 2, True)] and job.cached == 2
    job = play.add([0, 1, 0, 1, 1], 1)
    assert counts(play.step()) == [(job.id, 4, 1, True)] and job.cached == 4


def test_what_is_not_computed_is_not_found():
    play = Play(32, 2, running=3, budget=6)
    first, second = play.add([0] * 8, 1), play.add([0] * 8, 1)
    assert counts(play.step()) == [(first.id, 0, 6, False)]
    # By now three blocks are written; the fourth is not.
    assert counts(play.step()) == [(first.id, 6, 2, True), (second.id, 6, 2, True)]
    twins = [play.add([1] * 3, 1), play.add([1] * 3, 1)]
    play.step()
    assert [j.cached for j in twins] == [0, 0]  # admitted in the same step: each computes its own


def test_half_read_prompts_do_not_wait_for_one_another():
    play = Play(8, 2, running=4, budget=5)
    jobs = [play.add([k] * 12, 2) for k in range(4)]
    while play.jobs:
        play.step()
        assert sum(j.state == "running" for j in jobs) <= 1 and not any(j.preemptions for j in jobs)


def test_a_token_that_was_not_pushed_is_computed_again():
    play = Play(8, 2, running=2, budget=5)
    job = play.add([0, 1, 0, 1], 3)
    play.step(push=False)
    assert counts(play.step()) == [(job.id, 3, 1, True)]


def test_a_step_costs_the_same_however_many_wait():
    """Calls are counted, no time is taken."""

    def calls(waiting):
        play, seen = Play(64, 4, running=3, budget=30), []
        for _ in range(waiting):
            play.add([1] * 9, 4)
        sys.setprofile(lambda frame, event, argument: seen.append(event))
        try:
            plan = play.scheduler.plan()
            for chunk in plan.chunks:
                play.scheduler.commit(chunk)
            play.scheduler.finish(next(play.scheduler.waiting))
        finally:
            sys.setprofile(None)
        assert len(plan.admitted) == 3 and play.scheduler.num_waiting == waiting - 4
        return len(seen)

    calls(10)
    assert calls(10) == calls(1000)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("a", [], 3), "prompt must .* at least one token"),
        (("a", [-1], 3), "prompt must be token ids"),
        (("a", [1], 0), r"\bmax_new_tokens\b.*\b0\b"),
        (("a", [1], True), r"\bmax_new_tokens\b.*\bTrue\b"),
        (("there", [1], 3), "has not ended yet"),
        (("waits", [1], 3), "has not ended yet"),
        (("a", [1] * 15, 3), "up to 5 blocks of 4; the pool has 4"),
        (("a", [1] * 11, 2), "is 13; the model is made for at most 12"),
    ],
)
def test_what_is_refused_changes_nothing(arguments, message):
    scheduler = Scheduler(BlockManager(4, 4), max_running=1, max_tokens_per_step=8, max_length=12)
    if "blocks" in message:
        scheduler.max_length = None
    scheduler.add("there", [1, 2], 2)
    scheduler.plan()
    scheduler.add("waits", [1, 2], 2)
    with pytest.raises(ValueError, match=message) as raised:
        scheduler.add(*arguments)
    assert isinstance(raised.value, Refused) == ("made for" in message or "pool" in message)
    assert [j.id for j in scheduler.running] == ["there"] and [j.id for j in scheduler.waiting] == ["waits"]
    scheduler.check()


def test_the_largest_that_fits_is_served():
    play = Play(4, 4, running=2, budget=3)
    play.add([1] * 14, 3)  # 16 slots: the third token is sampled and never stored
    while play.jobs:
        play.step()
    with pytest.raises(Refused):
        play.add([1] * 14, 4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_running": 0}, r"\bmax_running\b.*\b0\b"),
        ({"max_running": 9, "max_tokens_per_step": 8}, "max_tokens_per_step must .* at least 9, got 8"),
        ({"max_length": 0}, r"\bmax_length\b.*\b0\b"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(BlockManager(4, 4), **options)


def test_no_torch_is_imported():
    code = (
        "import companion.serving.scheduler, companion.engine as e, sys\n"
        "e.simulate, e.Scheduler, e.Step\n"
        "print(sorted({'torch', 'numpy', 'jaxtyping'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_loads_from_where_it_is_said_to_be():
    engine = importlib.import_module("companion.engine")
    assert all(getattr(engine, name).__name__ == name for name in engine.__all__)
    assert set(engine._TORCH) <= set(engine.__all__)
