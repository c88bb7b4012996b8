"""The engine over a tiny float64 model: every request gets what it would get alone."""

import pytest
import torch
from engine_models import MODEL, OPTIONS, PROMPTS, WINDOWED, Faulty, Letters, alone, tiny_decoder
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from companion.caches.paged import PagedStorage
from companion.engine import Engine, Request
from companion.engine.forward import PackedStep, Span
from companion.generate import Sampler
from companion.paging import blocks_needed


def same(completion, expected):
    assert completion.tokens == expected.tokens and completion.finish_reason == expected.finish_reason
    assert completion.logprobs == pytest.approx(expected.logprobs, rel=0, abs=1e-11)


def empty(engine, num_blocks):
    engine.scheduler.check()
    assert engine.unfinished == engine.scheduler.unfinished == 0
    assert engine.manager.num_free == num_blocks and not engine.manager.sequences


# --- any sequence of calls -----------------------------------------------------------------------------


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.sampled_from([5, 7, 10, 25]),
        size=st.sampled_from([2, 3, 4]),
        running=st.integers(1, 4),
        more=st.sampled_from([0, 2, 12]),
        prefix=st.booleans(),
        windowed=st.booleans(),
    )
    def start(self, blocks, size, running, more, prefix, windowed):
        self.blocks, self.windowed, self.steps = blocks, windowed, 0
        self.engine = Engine(
            WINDOWED if windowed else MODEL,
            blocks,
            size,
            max_running=running,
            max_tokens_per_step=running + more,
            prefix_caching=prefix,
        )
        self.chunk = more + 1
        self.asked = {}  # id -> (prompt, n, seed)
        self.heard = {}  # id -> tokens told
        self.cancelled = {}  # id -> tokens told by then
        self.latest = {}  # id -> the step by which it has ended
        self.reasons = {}

    @rule(
        prompt=st.sampled_from(PROMPTS),
        n=st.integers(1, 7),
        seed=st.sampled_from([None, None, 3]),
        salt=st.sampled_from([None, None, "a"]),
        kills=st.sampled_from([0, 0, 0, 1, 2]),
        breaks=st.sampled_from([0, 0, 0, 2]),
    )
    def add(self, prompt, n, seed, salt, kills, breaks):
        """kills, breaks: the token at which it cancels the oldest, or at which its callback raises."""
        size = self.engine.manager.block_size
        request = Request(
            prompt,
            n,
            stop_ids=(),
            sampler=None if seed is None else Sampler(**OPTIONS, seed=seed),
            salt=salt,
            on_token=lambda event: self.on_token(event, kills, breaks),
        )
        if blocks_needed(len(prompt) + n - 1, size) > self.blocks:
            with pytest.raises(ValueError, match=f"the pool has {self.blocks}"):
                self.engine.add(request)
            return
        id = self.engine.add(request)
        self.asked[id], self.heard[id] = (prompt, n, seed), []
        live = [self.asked[i] for i in self.latest if i not in self.reasons] + [(prompt, n, seed)]
        self.latest[id] = self.steps + sum(-(-len(p) // self.chunk) + m - 1 for p, m, _ in live)

    def on_token(self, event, kills, breaks):
        assert event.id not in self.reasons, "a token after the end"
        self.heard[event.id].append(event.token)
        if event.finish_reason:
            self.reasons[event.id] = event.finish_reason
        if len(self.heard[event.id]) == kills:
            live = [i for i in self.asked if i not in self.reasons]
            if live:
                self.cancel(live[0])
        if len(self.heard[event.id]) == breaks:
            self.reasons.setdefault(event.id, "error")
            raise KeyError("a user's own fault")

    def cancel(self, id):
        assert self.engine.cancel(id)
        self.reasons[id], self.cancelled[id] = "cancelled", len(self.heard[id])

    @precondition(lambda self: any(i not in self.reasons for i in getattr(self, "asked", ())))
    @rule(data=st.data())
    def cancel_one(self, data):
        self.cancel(data.draw(st.sampled_from([i for i in self.asked if i not in self.reasons])))

    @rule(times=st.integers(1, 3))
    def step(self, times):
        for _ in range(times):
            self.steps += bool(self.engine.unfinished)
            self.engine.step()
            late = [i for i, last in self.latest.items() if i not in self.reasons and self.steps >= last]
            assert not late, f"{late} starve"

    @invariant()
    def agrees(self):
        if not hasattr(self, "engine"):
            return
        self.engine.scheduler.check()
        assert {i: c.finish_reason for i, c in self.engine.completions.items()} == self.reasons
        for id, told in self.heard.items():
            prompt, n, seed = self.asked[id]
            expected = alone(prompt, n, seed, self.windowed)
            assert told == expected.tokens[: len(told)]
            done = self.engine.completions.get(id)
            if done is not None:
                assert done.tokens == told and len(done.logprobs) == len(told)
                assert done.logprobs == pytest.approx(expected.logprobs[: len(told)], rel=0, abs=1e-11)
                assert done.finish_reason != "length" or len(told) == n
                assert len(told) == self.cancelled.get(id, len(told))

    def teardown(self):
        if hasattr(self, "engine"):
            while self.engine.unfinished:
                self.step(1)
            self.agrees()
            assert set(self.reasons) == set(self.asked)
            empty(self.engine, self.blocks)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("prefix", [True, False])
def test_every_pool_that_holds_the_largest_request(windowed, prefix):
    size, n = 3, 8
    smallest = blocks_needed(max(map(len, PROMPTS)) + n - 1, size)
    enough = sum(blocks_needed(len(p) + n - 1, size) for p in PROMPTS)
    preemptions = 0
    for blocks in range(smallest, enough + 1):
        engine = Engine(
            WINDOWED if windowed else MODEL, blocks, size, max_tokens_per_step=11, prefix_caching=prefix
        )
        for prompt in PROMPTS:
            engine.add(Request(prompt, n, stop_ids=()))
        for prompt, completion in zip(PROMPTS, engine.run(), strict=True):
            same(completion, alone(prompt, n, windowed=windowed))
            preemptions += completion.preemptions
        empty(engine, blocks)
    assert preemptions > 5
    with pytest.raises(ValueError, match="up to"):
        Engine(MODEL, smallest - 1, size).add(Request(PROMPTS[3], n))


# --- what else decides about tokens -------------------------------------------------------------------


def test_samplers_draw_as_if_alone():
    engine = Engine(MODEL, 40, 4, sampler=Sampler(**OPTIONS, seed=7))
    mine = Sampler(**OPTIONS, seed=9)
    for prompt in PROMPTS:
        engine.add(Request(prompt, 6, stop_ids=()))
        engine.add(Request(prompt, 6, stop_ids=(), sampler=mine))  # one object, started afresh for each
    done = engine.run()
    for i, prompt in enumerate(PROMPTS):
        same(done[2 * i], alone(prompt, 6, 7))
        same(done[2 * i + 1], alone(prompt, 6, 9))


def test_stop_ids_strings_and_text():
    free = alone(PROMPTS[3], 8)
    stop = free.tokens[3]
    text = Letters().decode(free.tokens)
    engine = Engine(MODEL, 40, 4, tokenizer=Letters())
    pieces = []
    engine.add(Request(PROMPTS[3], 8, id="ids", stop_ids=[stop]))
    engine.add(Request(PROMPTS[3], 8, id="text", stop_ids=(), stop=[text[2:4]]))
    engine.add(Request(PROMPTS[3], 8, id="all", stop_ids=(), on_token=lambda e: pieces.append(e.text)))
    ids, cut, whole = engine.run()
    at = free.tokens.index(stop)
    assert (ids.tokens, ids.finish_reason, ids.text) == (free.tokens[: at + 1], "stop", text[:at])
    at = text.index(text[2:4])
    assert (cut.finish_reason, cut.text) == ("stop", text[:at]) and cut.tokens == free.tokens[: at + 2]
    assert whole.text == text == "".join(pieces) and whole.finish_reason == "length"


def test_the_model_s_own_stop_ids():
    model = tiny_decoder()
    model.stop_ids = (alone(PROMPTS[0], 3).tokens[0],)
    engine = Engine(model, 9, 4)
    engine.add(Request(PROMPTS[0], 3))
    (done,) = engine.run()
    assert done.finish_reason == "stop" and len(done.tokens) == 1


def test_a_prefix_is_computed_once_and_a_salt_keeps_it_apart():
    engine = Engine(MODEL, 40, 2)
    prompt = PROMPTS[3]
    for salt in (None, None, "a", "a"):
        engine.add(Request(prompt, 2, stop_ids=(), salt=salt))
        (done,) = engine.run()
        same(done, alone(prompt, 2))
        engine.history.clear()
        engine.add(Request(prompt, 1, stop_ids=(), salt=salt, id="again"))
        (again,) = engine.run()
        assert again.cached_tokens == 8 and again.computed_tokens == 1  # not the last block: 9 tokens
        assert [p.count for s in engine.history for p in s.parts] == [1]
        assert done.cached_tokens in (0, 8)
    engine.add(Request(prompt, 1, salt="b"))
    assert engine.run()[0].cached_tokens == 0
    off = Engine(MODEL, 40, 2, prefix_caching=False)
    for _ in range(2):
        off.add(Request(prompt, 1))
        assert off.run()[0].cached_tokens == 0


@torch.inference_mode()
def test_whatever_unused_slots_hold():
    for windowed in (False, True):
        engine = Engine(WINDOWED if windowed else MODEL, 30, 4, max_tokens_per_step=9)
        for store in (*engine.storage.k, *engine.storage.v):
            store.fill_(float("nan"))
        for prompt in PROMPTS:
            engine.add(Request(prompt, 7, stop_ids=()))
        for prompt, done in zip(PROMPTS, engine.run(), strict=True):
            same(done, alone(prompt, 7, windowed=windowed))


@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"softmax_scale": 0.3}, {"sinks": True}])
@pytest.mark.parametrize("window", [None, 3])
def test_a_packed_step_attends_as_the_reference(extra, window):
    """Decodes, and chunks in neighbouring and in scattered blocks, against each row alone in float64."""
    from companion.attention import sdpa

    model = tiny_decoder(window=window)
    storage = PagedStorage(model.spec, num_blocks=30, block_size=4, dtype=torch.float64)
    for store in (*storage.k, *storage.v):
        store.fill_(float("nan"))
    manager, g = storage.manager, torch.Generator().manual_seed(0)
    manager.allocate([8])  # block 0 belongs to another, and holds NaN
    scattered = manager.allocate([9])
    seqs = [manager.allocate([k] * n) for k, n in enumerate((3, 8, 1))]
    manager.append(scattered, [9] * 10)
    spans = [(3 - 1, 3), (8 - 1, 8), (0, 1), (5, 11), (0, 6)]
    tables = [s.table for s in seqs] + [scattered.table, manager.allocate([7] * 6).table]
    k, v = ([torch.randn(2, stop, 4, generator=g, dtype=torch.float64) for _, stop in spans] for _ in "kv")
    for (start, _), table, key, value in zip(spans, tables, k, v):
        slots = torch.tensor(table.slots(0, start), dtype=torch.long)
        storage.write(1, slots, key[:, :start], value[:, :start])
        if start % 4:  # whoever wrote them made the rest of the block finite
            rest = torch.arange(table.ids[start // 4] * 4 + start % 4, table.ids[start // 4] * 4 + 4)
            zeros = torch.zeros(2, len(rest), 4, dtype=torch.float64)
            storage.write(1, rest, zeros, zeros)
    step = PackedStep(storage, [Span(t, a, b) for t, (a, b) in zip(tables, spans)])
    new = [torch.cat([x[:, a:b].transpose(0, 1)[:, :, None] for x, (a, b) in zip(y, spans)]) for y in (k, v)]
    step.append(1, *new)
    q = torch.randn(step.batch, 4, 1, 4, generator=g, dtype=torch.float64)
    if extra.get("sinks"):
        extra = {"sinks": torch.randn(4, generator=g, dtype=torch.float64)}
    out, at = step.attend(1, q, **extra), 0
    limits = (window - 1, 0) if window else (-1, -1)
    for (a, b), key, value in zip(spans, k, v):
        mine = q[at : at + b - a, :, 0].transpose(0, 1)[None]
        exact = sdpa(mine, key[None], value[None], causal=True, window_size=limits, **extra)
        torch.testing.assert_close(
            out[at : at + b - a, :, 0].transpose(0, 1)[None], exact, rtol=0, atol=1e-12
        )
        at += b - a
    assert step.row_lengths() == [p for a, b in spans for p in range(a, b)]


# --- faults belong to somebody ------------------------------------------------------------------------


def two(model, **options):
    """A bad request (it holds token 11) between two good ones."""
    engine = Engine(model, 40, 4, **options)
    events = []
    for id, prompt in (("a", PROMPTS[2]), ("bad", (1, 2, 3, 4, 11, 2)), ("c", PROMPTS[3])):
        engine.add(Request(prompt, 5, id=id, stop_ids=(), on_token=events.append))
    a, bad, c = engine.run()
    same(a, alone(PROMPTS[2], 5))
    same(c, alone(PROMPTS[3], 5))
    empty(engine, 40)
    return engine, bad, [e for e in events if e.id == "bad"]


def test_a_model_that_raises_for_one_request():
    model = Faulty(raises=lambda ids: 11 in ids)
    engine, bad, events = two(model)
    assert bad.finish_reason == "error" and str(bad.error) == "out of luck" and bad.tokens == []
    assert [(e.token, e.finish_reason) for e in events] == [(None, "error")]
    assert [1, 2, 3, 4, 11, 2] in model.passes  # it was tried alone


def test_a_model_that_raises_when_many_are_together():
    engine, bad, _ = two(Faulty(raises=lambda ids: len(ids) > 9))
    same(bad, alone((1, 2, 3, 4, 11, 2), 5))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_stream_that_is_no_number_is_found_by_nobody(value):
    """In a first chunk, which gives no token yet: its blocks must not enter the prefix cache."""

    def spoil(ids, x):
        if not done and 11 in ids:
            x = x.clone()
            x[ids.index(11), 0, 3] = value
        return x

    done = False
    engine, bad, events = two(Faulty(spoil=spoil), max_tokens_per_step=14)
    assert bad.finish_reason == "error" and "NaN or infinity" in str(bad.error) and len(events) == 1
    done = True
    engine.add(Request((1, 2, 3, 4, 11, 2), 5, stop_ids=()))
    (again,) = engine.run()
    same(again, alone((1, 2, 3, 4, 11, 2), 5))


def test_logits_that_are_no_numbers():
    count = 0

    def bend(logits):
        nonlocal count
        count += 1
        if count == 3:
            logits[1] = float("nan")
        return logits

    engine, bad, _ = two(Faulty(bend=bend))
    assert bad.finish_reason == "error" and "hold NaN" in str(bad.error)
    assert bad.tokens == alone((1, 2, 3, 4, 11, 2), 5).tokens[:2]


@pytest.mark.parametrize("choose", [lambda logits: [99], lambda logits: 1 / 0, lambda logits: [-1]])
def test_a_sampler_that_fails(choose):
    engine = Engine(MODEL, 20, 4)
    engine.add(Request(PROMPTS[2], 4, stop_ids=()))
    engine.add(Request(PROMPTS[3], 4, sampler=choose))
    good, bad = engine.run()
    same(good, alone(PROMPTS[2], 4))
    assert bad.finish_reason == "error" and isinstance(bad.error, (ValueError, ZeroDivisionError))
    empty(engine, 20)


def test_an_interrupt_loses_nothing():
    """Ctrl-C in a callback: the step's other tokens are told by the next step."""
    engine, heard = Engine(MODEL, 20, 4), []

    def once(event):
        if not heard:
            heard.append(event)
            raise KeyboardInterrupt

    engine.add(Request(PROMPTS[2], 4, stop_ids=(), on_token=once))
    engine.add(Request(PROMPTS[3], 4, stop_ids=(), on_token=heard.append))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.scheduler.check()
    for done, prompt in zip(engine.run(), PROMPTS[2:4]):
        same(done, alone(prompt, 4))
    assert len(heard) == 5 and len(engine.history) == 4


@pytest.mark.parametrize("where", ["through", "head"])
def test_an_interrupt_of_the_model_loses_nothing(where, monkeypatch):
    engine = Engine(MODEL, 20, 4)
    for prompt in PROMPTS[2:4]:
        engine.add(Request(prompt, 4, stop_ids=()))
    engine.step()

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MODEL, where, stop)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.scheduler.check()
    for done, prompt in zip(engine.run(), PROMPTS[2:4]):
        same(done, alone(prompt, 4))


# --- the rest of the door ------------------------------------------------------------------------------


def test_callbacks_may_add_cancel_and_close_but_not_step():
    engine, seen = Engine(MODEL, 30, 4), []

    def first(event):
        seen.append(event)
        if event.index == 1:
            assert engine.cancel("b") and engine.cancel(event.id)
            assert not engine.cancel("b")
            engine.add(Request(PROMPTS[0], 2, id="late", stop_ids=()))
            with pytest.raises(ValueError, match="within a step"):
                engine.step()

    engine.add(Request(PROMPTS[2], 6, id="a", stop_ids=(), on_token=first))
    engine.add(Request(PROMPTS[3], 6, id="b", stop_ids=()))
    assert [e.id for e in engine.step()] == ["a", "b"]
    assert [e.id for e in engine.step()] == ["a"]  # b's second token was sampled, and is not told
    a, b, late = engine.run()
    assert (a.finish_reason, len(a.tokens), b.finish_reason, len(b.tokens)) == (
        "cancelled",
        2,
        "cancelled",
        1,
    )
    same(late, alone(PROMPTS[0], 2))
    engine.add(Request(PROMPTS[2], 6, stop_ids=(), on_token=lambda e: engine.close()))
    engine.add(Request(PROMPTS[2], 6, id="other", stop_ids=()))
    assert len(engine.step()) == 1 and engine.closed
    assert {c.finish_reason for c in engine.completions.values()} == {"cancelled"}
    empty(engine, 30)


def test_after_close_only_completions_can_be_read():
    with Engine(MODEL, 30, 4) as engine:
        engine.add(Request(PROMPTS[2], 6, id="a", stop_ids=()))
        engine.step()
    empty(engine, 30)
    for call in (engine.step, engine.run, lambda: engine.add(Request((1,))), lambda: engine.cancel("a")):
        with pytest.raises(ValueError, match="this engine is closed"):
            call()
    engine.close()
    assert engine.take("a").tokens == alone(PROMPTS[2], 6).tokens[:1]
    with pytest.raises(ValueError, match="id must be that of a request"):
        engine.take("a")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt_ids": ()}, "prompt_ids must be at least one token"),
        ({"prompt_ids": [13]}, "prompt_ids must .* 0 to 12, got 13"),
        ({"prompt_ids": [-1]}, "prompt_ids must .* 0 to 12, got -1"),
        ({"prompt_ids": "text"}, "prompt_ids must be token ids.* got text"),
        ({"prompt_ids": None}, "prompt_ids must be token ids, got None"),
        ({"prompt_ids": [[1], [2]]}, "prompt_ids must be one prompt"),
        ({"max_new_tokens": 0}, r"\bmax_new_tokens\b.*\b0\b"),
        ({"id": "a"}, "id must be no other request's, got 'a'"),
        ({"id": "done"}, "id must be no other request's, got 'done'"),
        ({"id": [1]}, r"id must be hashable.* got \[1\]"),
        ({"stop": ["x"]}, "tokenizer must .* got None"),
        ({"sampler": Sampler(seed=[1, 2])}, r"seed must .* got \[1, 2\]"),
        ({"sampler": 3}, "sampler must .* got 3"),
        ({"on_token": 3}, "on_token must .* got 3"),
        ({"stop_ids": 3}, "stop_ids must .* got 3"),
        ({"prompt_ids": [1] * 15, "max_new_tokens": 3}, "up to 5 blocks of 4; the pool has 4"),
        ({"prompt_ids": [1] * 60, "max_new_tokens": 5}, "is 65; the model is made for at most 64"),
    ],
)
def test_what_is_refused_leaves_the_others_alone(changes, message):
    engine = Engine(MODEL, 4, 4)
    engine.add(Request(PROMPTS[0], 1, id="done", stop_ids=()))
    engine.step()
    engine.add(Request(PROMPTS[2], 4, id="a", stop_ids=()))
    engine.step()
    before = engine.manager.num_free, len(engine.history), set(engine.completions)
    request = Request([1], 3)
    for name, value in changes.items():  # past the tests' own check of types
        setattr(request, name, value)
    with pytest.raises(ValueError, match=message):
        engine.add(request)
    assert (engine.manager.num_free, len(engine.history), set(engine.completions)) == before
    engine.take("done")
    (done,) = engine.run()
    same(done, alone(PROMPTS[2], 4))
    assert engine.add(Request([1], 1)) == 0  # no number was used up
    with pytest.raises(ValueError, match="id must be that of a request"):
        engine.cancel("unknown")


def test_times_and_records():
    clock = iter(range(1000))
    engine = Engine(MODEL, 5, 2, max_running=2, max_tokens_per_step=6, clock=lambda: float(next(clock)))
    for id, prompt in (("a", PROMPTS[1]), ("b", PROMPTS[0]), ("c", PROMPTS[4])):
        engine.add(Request(prompt, 6, id=id, stop_ids=()))
    done = engine.run()
    steps = list(engine.history)
    assert [s.index for s in steps] == list(range(len(steps)))
    told = sum(p.sampled for s in steps for p in s.parts)
    assert told == sum(len(c.tokens) for c in done) == 18
    for c in done:
        parts = [p for s in steps for p in s.parts if p.id == c.id]
        assert c.computed_tokens == sum(p.count for p in parts)
        assert c.preemptions == sum(s.preempted.count(c.id) for s in steps)
        assert sum(s.admitted.count(c.id) for s in steps) == 1 + c.preemptions
        first = next(s for s in steps if any(p.id == c.id for p in s.parts))
        assert c.queue_s == first.start_s - c.arrival_s
        assert c.arrival_s < c.arrival_s + c.queue_s < c.arrival_s + c.ttft_s <= c.finished_s
        assert len(c.itl_s) == len(c.tokens) - 1 and min(c.itl_s) > 0
        assert c.arrival_s + c.ttft_s + sum(c.itl_s) < c.finished_s
    assert [f for s in steps for f in s.finished] == sorted(
        ((c.id, "length") for c in done), key=lambda f: {c.id: c.finished_s for c in done}[f[0]]
    )
    for s in steps:
        assert s.blocks_live + s.blocks_free == 5 and s.running <= 2 and s.tokens <= 6
        assert s.seconds >= s.scheduler_s + s.model_s + s.sampler_s > 0
    assert sum(c.preemptions for c in done) > 0


def test_cached_decoding_of_one_row_equals_a_full_pass():
    """An oracle without any cache."""
    engine = Engine(MODEL, 30, 4, max_tokens_per_step=8)
    for prompt in PROMPTS:
        engine.add(Request(prompt, 5, stop_ids=()))
    for prompt, done in zip(PROMPTS, engine.run()):
        logits = MODEL(torch.tensor([list(prompt) + done.tokens]))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == done.tokens
        exact = torch.log_softmax(logits, -1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        assert done.logprobs == pytest.approx(exact.tolist(), abs=1e-11)
