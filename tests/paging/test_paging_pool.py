"""The pool: reference counts, the order in which free blocks go out, and that no call depends on its size."""

import copy
import sys
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from paging_plain import load, pool_state

from companion.paging import BlockPool, BrokenInvariant, PoolFull

plain = load()


def full_of_cached(num_blocks, block_size=4, **options):
    """A pool whose blocks are all free and cached, 0 next to be evicted."""
    pool = BlockPool(num_blocks, block_size, **options)
    ids = pool.allocate(num_blocks)
    pool.keep(ids)
    pool.free(ids)
    return pool


# --- what it hands out ------------------------------------------------------------------------------------


def test_every_block_is_handed_out_once_and_comes_back():
    pool = BlockPool(5, 4)
    ids = pool.allocate(2) + pool.allocate(3)
    assert sorted(ids) == [0, 1, 2, 3, 4] and pool.num_free == 0
    pool.free(ids)
    assert pool.num_free == 5 and [pool.ref_count(i) for i in ids] == [0] * 5
    assert sorted(pool.allocate(5)) == [0, 1, 2, 3, 4]
    pool.check()


def test_allocate_is_all_or_nothing():
    pool = BlockPool(4, 4)
    pool.allocate(3)
    before = pool_state(pool)
    with pytest.raises(PoolFull, match="n=2; 1 of the pool's 4 blocks are free"):
        pool.allocate(2)
    with pytest.raises(ValueError, match="^n must .* to 4, got 5") as never:
        pool.allocate(5)
    assert not isinstance(never.value, PoolFull)  # waiting would not help
    assert pool_state(pool) == before and pool.allocate(0) == []
    assert pool.allocate(1) == [3]


def test_empty_blocks_go_first_then_unused_then_the_cached_one_freed_longest_ago():
    pool = BlockPool(6, 4)
    a, b, c, d = pool.allocate(4)
    pool.keep([a, b])
    pool.free([b])
    pool.free([a, c, d])
    assert pool.eviction_order() == [b, a]
    assert pool.allocate(1) == [d]  # the last one freed without content
    assert pool.allocate(3) == [c, 4, 5]
    assert pool.allocate(1) == [b] and pool.allocate(1) == [a]
    pool.check()


def test_eviction_is_in_the_order_of_freeing_and_says_so():
    told = []
    pool = full_of_cached(6, on_forget=told.extend)
    pool.take([2, 4])  # out of the middle
    pool.free([4, 2])
    assert pool.eviction_order() == [0, 1, 3, 5, 4, 2]
    assert pool.allocate(3) == [0, 1, 3] and told == [0, 1, 3]
    assert pool.evict(1) == [5] and told == [0, 1, 3, 5]
    assert pool.evict() == [4, 2] and pool.evict() == [] and pool.num_cached == 0
    assert sorted(pool.allocate(3)) == [2, 4, 5] and told == [0, 1, 3, 5, 4, 2]  # they were empty by now
    pool.check()


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_cached_block_leaves_the_order_from_either_end_and_the_middle(where):
    pool = full_of_cached(3)
    pool.take([where])
    pool.check()
    left = [i for i in range(3) if i != where]
    assert pool.eviction_order() == left and pool.ref_count(where) == 1 and pool.is_kept(where)
    pool.free([where])
    assert pool.eviction_order() == [*left, where]
    pool.take([0, 1, 2])
    assert pool.eviction_order() == [] and pool.num_free == 0
    pool.check()


def test_the_block_that_became_first_can_leave_too():
    pool = full_of_cached(4)
    assert pool.allocate(1) == [0]
    pool.take([1])
    pool.check()
    assert pool.evict(1) == [2] and pool.eviction_order() == [3]
    pool.take([3])
    pool.check()
    pool.free([3, 1])
    assert pool.eviction_order() == [3, 1]


def test_references():
    pool = BlockPool(3, 4)
    (a, b) = pool.allocate(2)
    pool.fork([a, a, b])
    assert (pool.ref_count(a), pool.ref_count(b), pool.ref_count(2)) == (3, 2, 0)
    pool.free([a, b, a])
    assert (pool.ref_count(a), pool.ref_count(b), pool.num_free) == (1, 1, 1)
    assert pool.writable(a) and not pool.is_kept(a) and not pool.writable(2)
    pool.keep([a])
    assert not pool.writable(a)  # others could read it
    pool.forget(a)
    assert pool.writable(a)
    pool.fork([a])
    assert not pool.writable(a)
    pool.check()


def test_forgetting_a_free_block_makes_it_empty():
    pool = full_of_cached(3)
    pool.forget(1)
    assert pool.eviction_order() == [0, 2] and pool.num_free == 3 and pool.allocate(1) == [1]
    with pytest.raises(ValueError, match="^id must .* kept, got 1"):
        pool.forget(1)
    pool.check()


# --- bad input --------------------------------------------------------------------------------------------


def prepared(kind=plain.BlockPool):
    """Blocks 0 (one reference), 1 (two), 2 (cached), 3 (empty), 4 and 5 (unused)."""
    pool = kind(6, 4)
    ids = pool.allocate(4)
    pool.fork([1])
    pool.keep([2])
    pool.free([2, 3])
    assert ids == [0, 1, 2, 3]
    return pool


BAD_IDS = [
    [3], [2], [4], [6], [-1], [0, 0], [1, 1, 1], [0, 1, 3], [1, 0, 1, 0], [0, 99], [10**30], [-(10**30)],
    ["0"], [0.0], [None], [True], [0, [1]], 0, None, "0", 1.5,
]  # fmt: skip


@pytest.mark.parametrize("ids", BAD_IDS, ids=repr)
def test_a_bad_free_raises_and_changes_nothing(ids):
    pool = prepared()
    before = pool_state(pool)
    with pytest.raises(ValueError, match="ids"):
        pool.free(ids)
    assert pool_state(pool) == before
    pool.check()


@pytest.mark.parametrize(
    "call, name",
    [
        *[(lambda p, i=i: p.fork(i), "ids") for i in ([3], [2], [0, 4], [0, 6], [-1], [1.0], None)],
        *[(lambda p, i=i: p.take(i), "ids") for i in ([3], [2, 3], [0, 4], [2, 6], [-1], ["2"], 5)],
        *[(lambda p, i=i: p.keep(i), "ids") for i in ([3], [2], [0, 4], [6], [-6], [None])],
        *[(lambda p, i=i: p.forget(i), "id") for i in (0, 3, 4, 6, -1, 1.0, None, True)],
        *[(lambda p, n=n: p.allocate(n), "n") for n in (-1, 1.0, "1", None, True, 5, 7, 10**30)],
        *[(lambda p, n=n: p.evict(n), "n") for n in (-1, 1.0, "1", True)],
        *[(lambda p, i=i: p.ref_count(i), "id") for i in (-1, 6, 1.0, None, True)],
        *[(lambda p, i=i: p.is_kept(i), "id") for i in (-1, 6, "2")],
        *[(lambda p, i=i: p.writable(i), "id") for i in (-1, 6, "2")],
    ],
)
def test_every_bad_call_names_its_argument_and_changes_nothing(call, name):
    pool = prepared()
    before = pool_state(pool)
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        call(pool)
    assert pool_state(pool) == before
    pool.check()


@pytest.mark.parametrize("num_blocks, block_size, name", [
    (0, 4, "num_blocks"), (-1, 4, "num_blocks"), (1.0, 4, "num_blocks"), (True, 4, "num_blocks"),
    (2**31, 4, "num_blocks"), (4, 0, "block_size"), (4, -4, "block_size"), (4, "4", "block_size"),
    (4, None, "block_size"),
])  # fmt: skip
def test_a_pool_that_makes_no_sense(num_blocks, block_size, name):
    with pytest.raises(ValueError, match=name):
        plain.BlockPool(num_blocks, block_size)


# --- against lists and dictionaries -----------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """The same calls on the pool and on plain lists; the ids handed out are predicted exactly."""

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks):
        self.told = []
        self.pool = BlockPool(num_blocks, 3, on_forget=self.told.extend)
        self.n = num_blocks
        self.refs, self.kept, self.empty, self.order, self.unused = {}, set(), [], [], 0

    def refuses(self, call, *arguments):
        before = pool_state(self.pool)
        with pytest.raises(ValueError):
            call(*arguments)
        assert pool_state(self.pool) == before

    @rule(n=st.integers(0, 6))
    def allocate(self, n):
        free = self.n - len(self.refs)
        if n > free:
            return self.refuses(self.pool.allocate, n)
        cut = max(0, len(self.empty) - n)
        expected, self.empty = self.empty[cut:], self.empty[:cut]
        while len(expected) < n and self.unused < self.n:
            expected.append(self.unused)
            self.unused += 1
        evicted = self.order[: n - len(expected)]
        del self.order[: len(evicted)]
        self.kept -= set(evicted)
        self.told.clear()
        assert self.pool.allocate(n) == expected + evicted and self.told == evicted
        self.refs |= dict.fromkeys(expected + evicted, 1)

    @rule(ids=st.lists(st.integers(-1, 9), max_size=6))
    def free(self, ids):
        if any(ids.count(i) > self.refs.get(i, 0) for i in ids):
            return self.refuses(self.pool.free, ids)
        self.pool.free(ids)
        for i in ids:
            self.refs[i] -= 1
            if not self.refs[i]:
                del self.refs[i]
                (self.order if i in self.kept else self.empty).append(i)

    @rule(data=st.data())
    def free_live_ones(self, data):
        held = [i for i, r in self.refs.items() for _ in range(r)]
        self.free(data.draw(st.permutations(held))[: data.draw(st.integers(0, len(held)))])

    @rule(ids=st.lists(st.integers(-1, 9), max_size=4))
    def fork(self, ids):
        if any(i not in self.refs for i in ids):
            return self.refuses(self.pool.fork, ids)
        self.pool.fork(ids)
        for i in ids:
            self.refs[i] += 1

    @rule(ids=st.lists(st.integers(-1, 9), max_size=4))
    def take(self, ids):
        if any(i not in self.refs and i not in self.order for i in ids):
            return self.refuses(self.pool.take, ids)
        self.pool.take(ids)
        for i in ids:
            self.refs[i] = self.refs.get(i, 0) + 1
            if i in self.order:
                self.order.remove(i)

    @rule(ids=st.lists(st.integers(0, 9), max_size=4))
    def keep(self, ids):
        if any(i not in self.refs for i in ids):
            return self.refuses(self.pool.keep, ids)
        self.pool.keep(ids)
        self.kept |= set(ids)

    @rule(data=st.data())
    def keep_everything(self, data):
        self.keep(list(self.refs))

    @rule(i=st.integers(-1, 9))
    def forget(self, i):
        if i not in self.kept:
            return self.refuses(self.pool.forget, i)
        self.told.clear()
        self.pool.forget(i)
        assert self.told == [i]
        self.kept.remove(i)
        if i in self.order:
            self.order.remove(i)
            self.empty.append(i)

    @rule(n=st.none() | st.integers(0, 3))
    def evict(self, n):
        expected = self.order[:n]
        assert self.pool.evict(n) == expected
        del self.order[:n]
        self.kept -= set(expected)
        self.empty += expected

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert [self.pool.ref_count(i) for i in range(self.n)] == [self.refs.get(i, 0) for i in range(self.n)]
        assert self.pool.eviction_order() == self.order and self.pool.num_cached == len(self.order)
        assert self.pool.num_free == self.n - len(self.refs)
        assert {i for i in range(self.n) if self.pool.is_kept(i)} == self.kept

    def teardown(self):
        """Every block comes back."""
        if hasattr(self, "pool"):
            self.pool.free([i for i, r in self.refs.items() for _ in range(r)])
            assert sorted(self.pool.allocate(self.n)) == list(range(self.n))
            self.pool.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


# --- check() must be able to fail -------------------------------------------------------------------------


def set_refs(value):
    def change(p):
        p._refs[0] = value

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: setattr(p, "_used", 7), "7 blocks were handed out of 6"),
        (lambda p: p._kept.append(0), "for 4 blocks"),
        (set_refs(-1), r"\[0\] have negative"),
        (lambda p: p._empty.append(3), "twice among the empty"),
        (lambda p: p._empty.append(0), r"\[0\] are both live and empty"),
        (lambda p: p._order.extend([0]), r"\[0\] are both live and cached"),
        (lambda p: p._order.extend([3]), r"\[3\] are both empty and cached"),
        (set_refs(0), r"\[0\] are neither live nor free"),
        (lambda p: p._empty.pop(), r"\[3\] are neither live nor free"),
        (lambda p: p._order.remove(2), r"\[2\] are neither live nor free"),
        (lambda p: p._kept.__setitem__(2, 0), "waits for eviction whose content is not kept"),
        (lambda p: p._kept.__setitem__(3, 1), "an empty block's content is kept"),
        (lambda p: p._order.extend([2]), "links disagree at block 2"),  # twice: a chain that bites its tail
        (lambda p: p._order._after.__setitem__(2, 2), "goes on to block 2 after the 1 it counts"),
        (lambda p: setattr(p._order, "_count", 0), "goes on to block 2 after the 0"),
        (lambda p: setattr(p._order, "_count", 2), "holds 1 blocks but counts 2"),
        (lambda p: setattr(p._order, "_last", 0), "ends at block 2 but says 0"),
        (lambda p: p._order._before.__setitem__(2, 1), "links disagree at block 2"),
        (lambda p: setattr(p._order, "_first", 10**6), "leads to block 1000000"),
        (lambda p: p._order._before.__setitem__(0, 2), "2 blocks say that they are in the order, 1 are"),
    ],
)
def test_check_finds_each_kind_of_damage(change, message):
    pool = prepared(BlockPool)
    pool.check()
    change(pool)
    with pytest.raises(BrokenInvariant, match=message):
        pool.check()


def test_check_counts_what_is_free(monkeypatch):
    pool = prepared(BlockPool)
    monkeypatch.setattr(BlockPool, "num_free", 5)
    with pytest.raises(BrokenInvariant, match="num_free=5, live=2"):
        pool.check()


# --- its size does not matter -----------------------------------------------------------------------------


def lines(call, *arguments):
    """Lines of the room's Python that a call runs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line" and "paging" in frame.f_globals["__name__"]
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*arguments)
    finally:
        sys.settrace(old)
    return count


@pytest.mark.parametrize(
    "call",
    [
        lambda p, n: p.take([n // 2]),
        lambda p, n: p.allocate(3),
        lambda p, n: p.evict(2),
        lambda p, n: p.forget(n // 2),
        lambda p, n: (p.take([5, 7]), p.free([7, 5])),
        lambda p, n: p.num_free,
    ],
)
def test_no_call_runs_more_lines_in_a_larger_pool(call):
    counts = []
    for n in (64, 20_000):
        pool = plain.BlockPool(n, 4)
        ids = pool.allocate(n)
        pool.keep(ids)
        pool.free(ids)
        counts.append(lines(call, pool, n))
    assert counts[0] == counts[1] > 0


def test_a_pool_of_a_million_blocks_is_made_of_nothing():
    tracemalloc.start()
    try:
        pool = plain.BlockPool(1_000_000, 16)
        made = tracemalloc.get_traced_memory()[0]
        ids = pool.allocate(100)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert made < 4096 and used < 65536
    assert ids == list(range(100)) and pool.num_free == 999_900
    assert pool.allocate(999_900)[-1] == 999_999


def test_a_copy_lives_on_its_own():
    pool = prepared(BlockPool)
    other = copy.deepcopy(pool)
    other.free([0])
    other.allocate(3)
    other.check()
    pool.check()
    assert pool_state(pool) == pool_state(prepared(BlockPool)) != pool_state(other)
