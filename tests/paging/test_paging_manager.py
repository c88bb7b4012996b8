"""The manager: what one atomic call does, what it refuses, and what is counted."""

import copy

import pytest
from paging_plain import load, manager_state

from companion.paging import BlockManager, BrokenInvariant, PoolFull

plain = load()
PROMPT = list(range(10, 30))


# --- prefixes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("blocks, more", [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1), (2, 0), (3, 1)])
def test_the_same_prompt_twice(size, blocks, more):
    """Lengths 0, 1, block - 1, block, block + 1 and more; what is found ends before the last token."""
    n = blocks * size + more
    manager = BlockManager(40, size)
    first = manager.allocate(range(n))
    assert first.shared == 0 and len(first.table.ids) == -(-n // size)
    manager.register(first)
    second = manager.allocate(range(n))
    assert second.shared == max(0, n - 1) // size * size == manager.lookup(range(n))
    k = second.shared // size
    assert second.table.ids[:k] == first.table.ids[:k]
    assert not set(second.table.ids[k:]) & set(first.table.ids)  # the last token has a slot of its own
    manager.check()
    manager.register(second)
    manager.free(first)
    assert manager.allocate(range(n)).shared == second.shared
    manager.check()


def test_what_is_not_registered_is_not_found():
    manager = BlockManager(20, 4)
    a = manager.allocate(PROMPT)
    assert manager.lookup(PROMPT) == 0
    assert manager.register(a, computed=11) == a.table.ids[:2] and a.registered == 2
    assert manager.lookup(PROMPT) == 8
    assert manager.register(a, computed=3) == [] and a.registered == 2  # it never goes back
    assert manager.register(a) == a.table.ids[2:] and manager.register(a) == []
    assert manager.lookup(PROMPT) == 16 and manager.lookup([*PROMPT, 1]) == 20
    manager.check()


def test_a_freed_but_cached_block_comes_back_to_life():
    manager = BlockManager(8, 4)
    a = manager.allocate(PROMPT[:12])
    manager.register(a)
    ids = a.table.ids[:]
    manager.free(a)
    assert manager.num_free == 8 and [manager.pool.ref_count(i) for i in ids] == [0, 0, 0]
    assert manager.pool.eviction_order() == ids[::-1]  # the tail goes first
    b = manager.allocate(PROMPT[:9])
    assert b.table.ids[:2] == ids[:2] and b.shared == 8
    assert [manager.pool.ref_count(i) for i in ids] == [1, 1, 0]
    assert manager.pool.eviction_order() == [ids[2]]
    c = manager.allocate(PROMPT[:9])
    assert [manager.pool.ref_count(i) for i in ids] == [2, 2, 0] and c.table.ids[2] != b.table.ids[2]
    manager.check()


def test_the_head_of_a_prompt_outlives_its_tail():
    """Eviction takes a freed prompt from its end, so that what is left of it can be found."""
    manager = BlockManager(6, 4)
    a = manager.allocate(PROMPT[:16])
    manager.register(a)
    manager.free(a)
    for left, n in ((4, 8), (3, 12), (2, 16), (1, 20)):
        other = manager.allocate(range(100, 100 + n))
        assert manager.lookup([*PROMPT[:16], 0]) == 4 * left
        manager.check()
        manager.free(other)


def test_least_recently_used_goes_first():
    manager = BlockManager(6, 4)
    seqs = [manager.allocate([k] * 4) for k in range(3)]
    for s in seqs:
        manager.register(s)
        manager.free(s)
    again = manager.allocate([0] * 5)  # prompt 0 is wanted again, and is now the youngest
    manager.free(again)
    assert manager.evict(1) == seqs[1].table.ids or manager.lookup([1] * 5) == 0
    assert [manager.lookup([k] * 5) for k in range(3)] == [4, 0, 4]
    manager.evict(1)
    assert [manager.lookup([k] * 5) for k in range(3)] == [4, 0, 0]
    manager.evict()
    assert manager.lookup([0] * 5) == 0 and len(manager.index) == 0
    manager.check()


def test_prompts_that_differ_in_salt_alone_never_share():
    manager = BlockManager(64, 4)
    salts = [(), ("alice",), ("bob",), ("alice", "adapter"), (b"alice",), (1,), (True,)]
    held = set()
    for round in range(2):
        for salt in salts:
            seq = manager.allocate(PROMPT[:9], salt)
            assert seq.shared == (8 if round else 0), (round, salt)
            manager.register(seq)
            if round == 0:
                assert not held & set(seq.table.ids)
                held |= set(seq.table.ids)
    manager.check()


def test_found_blocks_are_not_evicted_for_the_rest_of_their_own_prompt():
    """The pool is full of one cached prompt; a prompt that begins like it needs the room of its tail."""
    manager = BlockManager(4, 4)
    a = manager.allocate(PROMPT[:16])
    manager.register(a)
    ids = a.table.ids[:]
    manager.free(a)
    b = manager.allocate([*PROMPT[:8], 1, 2, 3, 4, 5, 6, 7, 8])
    assert b.table.ids[:2] == ids[:2] and sorted(b.table.ids) == sorted(ids)
    manager.check()


def test_found_blocks_are_not_evicted_even_if_their_turn_is_next():
    manager = BlockManager(4, 4)
    for prompt in (PROMPT[:8], [1] * 8):
        seq = manager.allocate(prompt)
        manager.register(seq)
        manager.free(seq)
    assert manager.pool.eviction_order() == [1, 0, 3, 2]
    seq = manager.allocate([*PROMPT[:8], *[2] * 8])
    assert seq.table.ids[:2] == [0, 1] and seq.shared == 8 and sorted(seq.table.ids) == [0, 1, 2, 3]
    manager.check()


def test_room_that_the_hit_itself_takes_is_not_counted_twice():
    """Three cached blocks are free; the prompt revives two of them, so one is left where two are needed."""
    manager = BlockManager(3, 4)
    a = manager.allocate(PROMPT[:8])
    manager.register(a)
    manager.free(a)
    holder = manager.allocate([1])
    before = manager_state(manager)
    with pytest.raises(PoolFull, match="prompt: 1 blocks are needed beyond 2 found, and 0 are free"):
        manager.allocate(PROMPT[:9])
    assert manager_state(manager) == before and manager.pool.num_cached == 2
    manager.check()
    manager.free(holder)
    assert manager.allocate(PROMPT[:9]).shared == 8


def test_without_prefixes_nothing_is_found_or_kept():
    manager = plain.BlockManager(8, 4, prefix=False)
    a = manager.allocate(PROMPT[:8])
    assert manager.register(a) == []
    manager.free(a)
    assert manager.lookup(PROMPT) == 0 and manager.pool.num_cached == 0
    assert manager.allocate(PROMPT[:8]).shared == 0
    with pytest.raises(ValueError, match="extra"):
        manager.allocate([1], "salt")
    manager.check()


# --- growing, forking, shrinking --------------------------------------------------------------------------


def test_the_sampled_token_joins_before_its_step():
    """A decode loop: append, run, register. At 16 tokens one block, at 17 two."""
    manager = BlockManager(4, 16)
    seq = manager.allocate(range(15))
    counts = []
    for token in range(3):
        assert manager.append(seq, token) == []
        counts.append(len(seq.table.ids))
        manager.register(seq)
    assert counts == [1, 2, 2] and len(seq) == 18 and seq.registered == 1
    assert seq.tokens.tolist() == [*range(15), 0, 1, 2]
    manager.check()


def test_a_fork_copies_one_block_when_it_parts():
    manager = BlockManager(8, 4)
    a = manager.allocate(PROMPT[:6])
    manager.register(a)
    b = manager.fork(a)
    manager.check()
    assert (b.shared, b.registered, b.tokens) == (0, 1, a.tokens) and b.tokens is not a.tokens
    source = a.table.ids[1]
    assert manager.append(b, [1, 2, 3]) == [(source, b.table.ids[1])]
    assert manager.append(a, 5) == [] and a.table.ids[1] == source and len(a) == 7 and len(b) == 9
    manager.register(b)
    manager.check()
    manager.free(a)
    manager.check()
    assert manager.append(b, 9) == []
    manager.free(b)
    assert manager.num_free == 8


def test_a_fork_keeps_its_salt():
    manager = BlockManager(8, 4)
    a = manager.allocate(PROMPT[:6], ("mine",))
    b = manager.fork(a)
    manager.append(b, [1, 2])
    manager.register(b)
    assert manager.lookup([*PROMPT[:6], 1, 2, 3], ("mine",)) == 8
    assert manager.lookup([*PROMPT[:6], 1, 2, 3]) == 0
    manager.check()


def test_both_halves_of_a_fork_may_register_their_common_blocks():
    manager = BlockManager(8, 4)
    a = manager.allocate(PROMPT[:9])
    b = manager.fork(a)
    assert manager.register(a) == a.table.ids[:2] and manager.register(b) == []
    assert b.registered == 2
    manager.check()


def test_rejected_drafts_are_cropped_and_written_over():
    manager = BlockManager(8, 4)
    a = manager.allocate(PROMPT[:7])
    manager.register(a)
    manager.append(a, [1, 2, 3])
    manager.register(a)  # too early: a draft's tokens are findable now
    assert manager.lookup([*PROMPT[:7], 1, 0]) == 8
    manager.crop(a, 7)
    assert a.registered == 1 and len(a.table.ids) == 2 and manager.lookup([*PROMPT[:7], 1, 0]) == 8
    manager.check()
    assert manager.append(a, 5) == []  # in place: the block's old content is gone, and cannot be found
    assert manager.lookup([*PROMPT[:7], 1, 0]) == 4
    manager.register(a)
    assert manager.lookup([*PROMPT[:7], 5, 0]) == 8
    manager.check()


def test_a_crop_into_a_block_that_another_shares_leaves_it_to_the_other():
    manager = BlockManager(8, 4)
    a = manager.allocate(PROMPT[:9])
    manager.register(a)
    b = manager.allocate(PROMPT[:9])
    manager.crop(b, 6)
    assert (b.shared, b.registered) == (6, 1)
    ((source, copied),) = manager.append(b, 0)
    assert source == a.table.ids[1] and b.table.ids == [a.table.ids[0], copied]
    assert manager.lookup(PROMPT[:9]) == 8
    manager.check()


def test_crop_to_nothing_and_on():
    manager = BlockManager(2, 4)
    a = manager.allocate(PROMPT[:5])
    manager.crop(a, 100)
    assert len(a) == 5
    manager.crop(a, 0)
    assert len(a) == 0 and manager.num_free == 2
    manager.append(a, [1])
    assert a.tokens.tolist() == [1]
    manager.check()


def test_an_empty_prompt_grows_from_nothing():
    manager = BlockManager(2, 4)
    a = manager.allocate([])
    assert len(a) == 0 and a.table.ids == [] and manager.register(a) == []
    b = manager.fork(a)
    manager.append(a, 7)
    manager.crop(b, 0)
    manager.free(b)
    assert a.tokens.tolist() == [7] and manager.usage().blocks_live == 1
    manager.check()


def test_the_prompt_given_stays_the_callers():
    manager = BlockManager(8, 4)
    first = manager.allocate(PROMPT[:6])
    second = manager.allocate(first.tokens)
    manager.append(second, 1)
    assert len(first) == 6 and len(second) == 7
    prompt = [1, 2]
    manager.append(manager.allocate(prompt), 3)
    assert prompt == [1, 2]
    manager.check()


# --- what is counted --------------------------------------------------------------------------------------


def test_utilisation_counts_tokens_and_not_only_blocks():
    """17 tokens in blocks of 16 take 2 blocks and use 17 of 32 slots, 53 %; the pool is 20 % full."""
    manager = BlockManager(20, 16)
    manager.allocate(range(17))
    manager.allocate(range(100, 117))
    u = manager.usage()
    assert (u.sequences, u.tokens, u.blocks_live, u.slots_live, u.slots_filled) == (2, 34, 4, 64, 34)
    assert u.utilisation_blocks == 0.2 and u.utilisation_tokens == 17 / 32 and u.waste == 30
    assert u.waste < 16 * u.sequences


def test_usage_counts_a_shared_block_once_and_each_prompt_in_whole():
    manager = BlockManager(10, 4)
    u = manager.usage()
    assert (u.utilisation_tokens, u.utilisation_blocks, u.hit_rate, u.waste) == (1.0, 0.0, 0.0, 0)
    a = manager.allocate(PROMPT[:10])
    manager.register(a)
    manager.allocate(PROMPT[:10])
    b = manager.fork(a)
    manager.crop(b, 9)
    u = manager.usage()
    assert (u.sequences, u.tokens, u.blocks_live, u.slots_filled, u.waste) == (3, 29, 4, 12, 4)
    assert (u.prompts, u.prompts_hit, u.prompt_tokens, u.prompt_tokens_shared) == (2, 1, 20, 8)
    assert u.hit_rate == 0.4 and u.blocks == 10 and u.blocks_cached == 0
    for s in manager.sequences:
        manager.free(s)
    u = manager.usage()
    assert (u.sequences, u.tokens, u.blocks_live, u.blocks_cached) == (0, 0, 0, 2)


def test_a_prompt_that_was_refused_is_not_counted():
    manager = BlockManager(2, 4)
    manager.allocate([1] * 5)
    with pytest.raises(PoolFull):
        manager.allocate([1])
    assert manager.usage().prompts == 1


# --- bad input --------------------------------------------------------------------------------------------


def prepared(kind):
    """Eight blocks of four: a and b share two and part in the third, one prompt is cached, two are free."""
    manager = kind(8, 4)
    a = manager.allocate(PROMPT[:10])
    manager.register(a)
    b = manager.fork(a)
    manager.append(b, 1)
    gone = manager.allocate([5] * 8)
    manager.register(gone)
    manager.free(gone)
    return manager, a, b, gone


def test_never_and_not_now_are_told_apart():
    manager, a, b, _ = prepared(BlockManager)
    before = manager_state(manager)
    assert manager.num_free == 4
    for call in (
        lambda: manager.allocate([7] * 17),
        lambda: manager.append(a, [7] * 20),
        lambda: manager.allocate([*PROMPT[:8], *[7] * 17]),
    ):
        with pytest.raises(PoolFull):
            call()
        assert manager_state(manager) == before
    for call in (lambda: manager.allocate([7] * 33), lambda: manager.append(b, [7] * 22)):
        with pytest.raises(ValueError) as never:
            call()
        assert not isinstance(never.value, PoolFull) and manager_state(manager) == before
    manager.check()
    assert manager.append(a, [7] * 18) == [] and manager.num_free == 0


@pytest.mark.parametrize(
    "call, name",
    [
        *[
            (lambda m, a, g, t=t: m.allocate(t), "prompt")
            for t in ([-1], [2**32], [1.0], ["1"], "12", None, 3)
        ],
        *[(lambda m, a, g, t=t: m.lookup(t), "prompt") for t in ([-1], None)],
        *[(lambda m, a, g, e=e: m.allocate([1], e), "extra") for e in ("salt", None, [1.5], ({},))],
        *[
            (lambda m, a, g, t=t: m.append(a, t), "tokens")
            for t in (-1, 2**32, 1.0, None, "1", [1, -1], [[1]])
        ],
        *[(lambda m, a, g, n=n: m.register(a, n), "computed") for n in (-1, 11, 1.0, True)],
        *[(lambda m, a, g, n=n: m.crop(a, n), "n") for n in (-1, 1.0, None, True)],
        (lambda m, a, g: m.evict(-1), "n"),
        (lambda m, a, g: m.append(g, 1), "seq"),
        (lambda m, a, g: m.register(g), "seq"),
        (lambda m, a, g: m.fork(g), "seq"),
        (lambda m, a, g: m.crop(g, 0), "seq"),
        (lambda m, a, g: m.free(g), "seq"),
        (lambda m, a, g: m.free(plain.BlockManager(8, 4).allocate([1])), "seq"),
        (lambda m, a, g: m.append(None, 1), "seq"),
        (lambda m, a, g: m.free([]), "seq"),
    ],
)
def test_every_bad_call_names_its_argument_and_changes_nothing(call, name):
    manager, a, _, gone = prepared(plain.BlockManager)
    before = manager_state(manager)
    with pytest.raises(ValueError, match=f"^{name}"):
        call(manager, a, gone)
    assert manager_state(manager) == before
    manager.check()


# --- check() must be able to fail -------------------------------------------------------------------------


def reindexed(manager, a):
    """The index comes to hold other tokens for a block of a's table."""
    block = a.table.ids[1]
    manager.index.remove([block])
    manager.index.register([a.table.ids[0], block], [*PROMPT[:4], 9, 9, 9, 9], start=1)


def resalted(manager, a):
    """The right tokens, under another salt."""
    manager.index.remove(a.table.ids[:2])
    manager.index.register(a.table.ids, PROMPT[:8], ("salt",))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m, a: m.pool._empty.append(0), "live and empty"),
        (lambda m, a: m.index._by_block.pop(0), "block 0 leads to another"),
        (lambda m, a: setattr(a.table, "length", 9), "its table says 9 tokens"),
        (lambda m, a: setattr(a.table, "freed", True), "its table says"),
        (lambda m, a: a.tokens.append(1), "its table says 10 tokens"),
        (lambda m, a: a.table.ids.append(7), "10 tokens in 4 blocks"),
        (lambda m, a: a.table.ids.__setitem__(2, 0), "a block is twice in the table"),
        (lambda m, a: m.pool.fork([0]), r"blocks \[0\] have reference counts that differ"),
        (lambda m, a: m.pool.allocate(1), r"blocks \[\d\] have reference counts that differ"),
        (lambda m, a: m._live.pop(a), "have reference counts that differ"),
        (lambda m, a: m.index.remove([0]), "block 0 is registered but not indexed"),
        (lambda m, a: (m.index.remove([0]), setattr(a, "registered", 0)), "registered but not indexed"),
        (
            lambda m, a: m.pool._kept.__setitem__(0, 0),
            r"blocks \[0\] are kept by the pool or known to the index",
        ),
        (lambda m, a: m.pool.keep([2]), r"blocks \[2\] are kept by the pool or known to the index"),
        (reindexed, "the index has other tokens for block 1"),
        (resalted, "block 0 is registered but not indexed as what it is"),
        (lambda m, a: a.tokens.__setitem__(0, 99), "the index has other tokens for block 0"),
        (lambda m, a: setattr(a, "registered", 3), "registered"),
    ],
)
def test_check_finds_each_kind_of_damage(change, message):
    manager, a, _, _ = prepared(BlockManager)
    manager.check()
    change(manager, a)
    with pytest.raises(BrokenInvariant, match=message):
        manager.check()


def test_a_copy_lives_on_its_own_however_long_the_chain():
    manager = BlockManager(2000, 1)
    seq = manager.allocate(range(1500))
    manager.register(seq)
    other = copy.deepcopy(manager)
    other.free(other.sequences[0])
    other.evict()
    assert len(other.index) == 0 and len(manager.index) == 1500
    manager.check()
    other.check()
