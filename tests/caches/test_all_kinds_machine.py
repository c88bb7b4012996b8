"""Any sequence of operations: paged, forked, cropped and prefix-shared caches equal the plain one, and every
block comes back. All of it lives on one small pool of float64 blocks that starts as NaN, in disorder."""

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from companion.caches import PagedCache, PagedStorage, make_cache
from companion.cost import ModelSpec

FULL = ModelSpec(
    name="tiny", architecture="llama", layers=2, d_model=16, heads=6, kv_heads=2, head_dim=32, ffn=8, vocab=32
)
WINDOW = dataclasses.replace(FULL, window=5, layer_types=("sliding", "full"))
MOST, STEP = 26, 6
SHAPE = {"max_tokens": MOST, "dtype": torch.float64}


def keys_of(tokens, spec):
    """Keys and values of a text, from the text alone: what two prompts share is then the same."""
    rows = []
    for i, t in enumerate(tokens):
        g = torch.Generator().manual_seed(1000 * i + t)
        rows.append(
            torch.randn(2, spec.layers, spec.kv_heads, spec.head_dim, generator=g, dtype=torch.float64)
        )
    x = torch.stack(rows, dim=3) if rows else torch.zeros(2, spec.layers, 2, 0, 32, dtype=torch.float64)
    return x  # (k or v, layer, heads, n, D)


class AllKinds(RuleBasedStateMachine):
    @initialize(window=st.booleans(), size=st.sampled_from([1, 2, 4, 5]), blocks=st.integers(12, 30))
    def start(self, window, size, blocks):
        self.spec = WINDOW if window else FULL
        self.storage = PagedStorage(self.spec, num_blocks=blocks, block_size=size, dtype=torch.float64)
        for t in (*self.storage.k, *self.storage.v):
            t.fill_(math.nan)
        self.manager = self.storage.manager
        ids = self.manager.pool.allocate(blocks)
        self.manager.pool.free(ids[::2] + ids[1::2][::-1])
        self.random = torch.Generator().manual_seed(size)
        self.pairs = []  # (paged, [others that must agree with it])
        self.texts = []  # (sequence, its cache)
        self.prompts = []

    def draw(self, batch, S, lengths):
        made = [torch.randn(batch, h, S, 32, generator=self.random, dtype=torch.float64) for h in (6, 2, 2)]
        for x in made:
            for b, n in enumerate(lengths):
                x[b, :, n:] = math.nan
        return made

    def new_plain(self, batch):
        caches = [make_cache("contiguous", self.spec, batch=batch, **SHAPE)]
        if self.spec.window:
            caches.append(make_cache("sliding", self.spec, batch=batch, step=STEP, **SHAPE))
        return caches

    @precondition(lambda self: len(self.pairs) < 3)
    @rule(batch=st.integers(1, 3))
    def new(self, batch):
        self.pairs.append(
            (PagedCache(self.spec, batch=batch, storage=self.storage, **SHAPE), self.new_plain(batch))
        )

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def step(self, data):
        cache, others = data.draw(st.sampled_from(self.pairs))
        S = data.draw(st.integers(0, STEP))
        rows = cache.row_lengths()
        lengths = [data.draw(st.integers(0, min(S, MOST - n))) for n in rows]
        if data.draw(st.booleans()) and max(rows) + S <= MOST:
            lengths = [S] * len(rows)
        q, k, v = self.draw(cache.batch, S, lengths)
        for layer in range(2):
            free = self.manager.num_free, [list(cache._tables.ids(b)) for b in range(cache.batch)]
            try:
                cache.append(layer, k, v, lengths=lengths)
            except ValueError:  # PoolFull, or more than the pool could ever give
                assert layer == 0 and cache.row_lengths() == rows
                assert free == (
                    self.manager.num_free,
                    [list(cache._tables.ids(b)) for b in range(cache.batch)],
                )
                return
            got = cache.attend(layer, q)
            for other in others:
                other.append(layer, k, v, lengths=lengths)
                want = other.attend(layer, q)
                for b, n in enumerate(lengths):
                    torch.testing.assert_close(got[b, :, :n], want[b, :, :n], rtol=0, atol=1e-9)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), back=st.integers(0, STEP))
    def crop(self, data, back):
        cache, others = data.draw(st.sampled_from(self.pairs))
        keep = [max(0, n - data.draw(st.integers(0, back))) for n in cache.row_lengths()]
        cache.crop(keep)
        for other in list(others):
            try:
                other.crop(keep)
            except ValueError:  # several crops in a row reach further back than a ring does
                others.remove(other)

    @precondition(lambda self: 0 < len(self.pairs) < 4)
    @rule(data=st.data())
    def fork(self, data):
        cache, others = data.draw(st.sampled_from(self.pairs))
        self.pairs.append((cache.fork(), [c.fork() for c in others]))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def free(self, data):
        cache, _ = self.pairs.pop(data.draw(st.integers(0, len(self.pairs) - 1)))
        cache.free()
        with pytest.raises(ValueError, match="freed"):
            cache.fork()

    # --- rows that share a prefix through the manager -----------------------------------------------------

    def run(self, cache, tokens, start):
        """Tokens start .. of a text through the cache, against plain attention over the whole text."""
        x = keys_of(tokens, self.spec)
        q = torch.randn(1, 6, len(tokens) - start, 32, generator=self.random, dtype=torch.float64)
        plain = make_cache("contiguous", self.spec, **SHAPE)
        for layer in range(2):
            k, v = x[:, layer][:, None]
            assert cache.row_lengths(layer) == [start]
            cache.append(layer, k[:, :, start:], v[:, :, start:])
            plain.append(layer, k, v)
            got, want = cache.attend(layer, q), plain.attend(layer, q)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
            for have, all in zip(cache.read(layer), (k, v)):
                assert torch.equal(have, all)

    @precondition(lambda self: len(self.texts) < 4)
    @rule(
        data=st.data(),
        salt=st.sampled_from([(), ("x",)]),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=7),
    )
    def prompt(self, data, salt, more):
        old = data.draw(st.sampled_from([*self.prompts, ([], salt)]))[0]
        tokens = (old + more)[:MOST]
        try:
            seq = self.manager.allocate(tokens, salt)
        except ValueError:  # the pool is full, or too small for ever
            return
        assert seq.shared <= len(tokens) - 1
        known = [p for p, s in self.prompts if s == salt]
        common = [
            sum(1 for i in range(min(len(p), len(tokens))) if p[: i + 1] == tokens[: i + 1]) for p in known
        ]
        assert seq.shared <= max(common, default=0)  # never what only another salt has seen
        cache = PagedCache(self.spec, storage=self.storage, sequences=[seq], **SHAPE)
        self.run(cache, tokens, seq.shared)
        self.manager.register(seq)
        self.prompts.append((tokens, salt))
        self.texts.append((seq, cache))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=3), keep=st.integers(0, 4))
    def grow(self, data, more, keep):
        """Drafts are cropped, others are appended; a prefix that others read stays as it is."""
        seq, cache = data.draw(st.sampled_from(self.texts))
        n = max(0, len(seq) - keep)
        cache.crop(n)
        assert len(seq) == n
        if n + len(more) > MOST:
            return
        try:
            self.storage.copy(self.manager.append(seq, more))
        except ValueError:  # the pool is full, or too small for ever
            assert len(seq) == n
            return
        self.run(cache, list(seq.tokens), n)
        if data.draw(st.booleans()):
            self.manager.register(seq)
            self.prompts.append((list(seq.tokens), seq.extra))

    @precondition(lambda self: 0 < len(self.texts) < 4)
    @rule(data=st.data())
    def fork_text(self, data):
        _, cache = data.draw(st.sampled_from(self.texts))
        twin = cache.fork()
        self.texts.append((twin._tables.entries[0], twin))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def finish(self, data):
        _, cache = self.texts.pop(data.draw(st.integers(0, len(self.texts) - 1)))
        cache.free()

    @invariant()
    def the_pool_is_sound(self):
        if not hasattr(self, "pairs"):
            return
        pool = self.manager.pool
        pool.check()
        self.manager.index.check()
        if not self.pairs:
            self.manager.check()  # plain tables are unknown to the manager
        held = [
            i
            for c in [p for p, _ in self.pairs] + [c for _, c in self.texts]
            for b in range(c.batch)
            for i in c._tables.ids(b)
        ]
        assert all(pool.ref_count(i) == held.count(i) for i in range(self.storage.num_blocks))
        for cache, others in self.pairs:
            assert all(c.row_lengths(i) == cache.row_lengths(i) for c in others for i in range(2))

    def teardown(self):
        if hasattr(self, "pairs"):
            for cache in [p for p, _ in self.pairs] + [c for _, c in self.texts]:
                cache.free()
            self.manager.check()
            assert self.manager.num_free == self.storage.num_blocks


TestAllKinds = AllKinds.TestCase
TestAllKinds.settings = settings(
    max_examples=40,
    stateful_step_count=22,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=[Phase.generate],
)
