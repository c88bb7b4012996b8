"""The block table: when a block is taken, when one is copied, and what a kernel is told."""

import pytest
from paging_plain import load, pool_state

from companion.paging import BlockPool, BlockTable, PoolFull, blocks_needed, to_csr

plain = load()


def table_state(table):
    return table.ids[:], table.length, table.freed


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 256])
@pytest.mark.parametrize("step", [1, 3, 300])
def test_n_tokens_take_ceil_blocks_whatever_the_steps(block_size, step):
    """The token joins when its slot is reserved: block_size - 1, block_size, block_size + 1 take 1, 1, 2."""
    pool = BlockPool(700, block_size)
    table = BlockTable(pool)
    assert (table.ids, table.length) == ([], 0)
    while table.length < 600:
        assert table.append(step) == []
        full, rest = divmod(table.length, block_size)
        assert len(table.ids) == full + bool(rest) == blocks_needed(table.length, block_size)
    assert pool.num_free == 700 - len(table.ids)


def test_blocks_needed():
    assert [blocks_needed(n, 16) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]
    big = 10**18 + 1
    assert blocks_needed(big, 16) == (big + 15) // 16  # in integers: a float would lose the one


def test_slots_walk_through_the_blocks():
    pool = BlockPool(8, 4)
    pool.allocate(3)
    table = BlockTable(pool)
    table.append(6)
    assert table.ids == [3, 4]
    assert [table.slot(p) for p in range(6)] == [12, 13, 14, 15, 16, 17] == table.slots(0, 6)
    assert table.slots(3, 5) == [15, 16] and table.slots(6, 6) == []
    assert table.padded(4) == [3, 4, -1, -1] and table.padded(3, 2147480000) == [3, 4, 2147480000]
    table.ids.reverse()  # a table need not be in order
    assert table.slots(2, 6) == [18, 19, 12, 13]


def test_the_csr_form_lists_the_same_slots():
    pool = BlockPool(20, 4)
    tables = []
    for n in (0, 1, 3, 4, 5, 8):
        tables.append(BlockTable(pool))
        tables[-1].append(n)
    indptr, indices, last = to_csr(tables)
    assert (indptr, last) == ([0, 0, 1, 2, 3, 5, 7], [0, 1, 3, 4, 1, 4])
    for b, table in enumerate(tables):
        pages = indices[indptr[b] : indptr[b + 1]]
        n = (len(pages) - 1) * 4 + last[b] if pages else 0
        assert n == table.length
        assert [pages[p // 4] * 4 + p % 4 for p in range(n)] == table.slots(0, n)


# --- copy on write ----------------------------------------------------------------------------------------


def test_a_fork_shares_everything_until_one_of_them_grows():
    pool = BlockPool(8, 4)
    a = BlockTable(pool)
    a.append(6)
    b = a.fork()
    assert a.ids == b.ids == [0, 1] and b.length == 6 and pool.num_free == 6
    assert b.append() == [(1, 2)] and b.ids == [0, 2]  # the partial block, once
    assert a.append() == [] and a.ids == [0, 1]  # alone by now: in place
    assert [pool.ref_count(i) for i in range(3)] == [2, 1, 1]
    assert b.append(2) == [] and b.ids == [0, 2, 3]
    b.free()
    a.free()
    assert pool.num_free == 8


def test_full_blocks_are_never_copied():
    pool = BlockPool(8, 4)
    a = BlockTable(pool)
    a.append(8)
    b = a.fork()
    assert a.append() == b.append() == [] and a.ids[:2] == b.ids[:2] and a.ids[2] != b.ids[2]


def test_many_forks_copy_once_each_but_the_last():
    pool = BlockPool(8, 4)
    tables = [BlockTable(pool)]
    tables[0].append(1)
    tables += [tables[0].fork() for _ in range(4)]
    assert [t.append() for t in tables] == [[(0, 1)], [(0, 2)], [(0, 3)], [(0, 4)], []]


def test_appending_over_a_block_copies_it_and_takes_the_next():
    pool = BlockPool(8, 4)
    a = BlockTable(pool)
    a.append(3)
    b = a.fork()
    assert b.append(6) == [(0, 1)] and b.ids == [1, 2, 3] and b.length == 9 and a.ids == [0]


def test_cropping_into_a_shared_block_and_growing_copies_it():
    pool = BlockPool(8, 4)
    a = BlockTable(pool)
    a.append(8)
    b = a.fork()
    b.crop(5)
    assert b.ids == [0, 1] and pool.ref_count(1) == 2
    assert b.append() == [(1, 2)] and a.ids == [0, 1] and b.ids == [0, 2]


def test_appending_nothing_does_nothing():
    pool = BlockPool(2, 4)
    a = BlockTable(pool)
    assert a.append(0) == [] and a.ids == []
    a.append(2)
    b = a.fork()
    assert b.append(0) == [] and b.ids == a.ids


def test_a_kept_block_is_forgotten_before_it_is_written_alone():
    told = []
    pool = BlockPool(1, 4, on_forget=told.extend)  # no room for a copy, and none is needed
    a = BlockTable(pool)
    a.append(4)
    pool.keep(a.ids)
    a.crop(2)
    assert pool.is_kept(0) and told == []  # still whole
    assert a.append() == [] and told == [0] and not pool.is_kept(0) and a.ids == [0]
    pool.check()


def test_crop_gives_back_what_lies_beyond():
    pool = BlockPool(8, 4)
    a = BlockTable(pool)
    a.append(13)
    pool.keep(a.ids)
    a.crop(20)
    a.crop(13)
    assert a.length == 13 and len(a.ids) == 4
    a.crop(5)
    assert (a.ids, a.length) == ([0, 1], 5) and pool.eviction_order() == [3, 2]  # the tail first
    a.crop(4)
    assert a.ids == [0]
    a.crop(0)
    assert (a.ids, a.length) == ([], 0) and pool.num_free == 8
    assert a.append() == [] and a.length == 1


def test_the_head_of_a_freed_table_is_evicted_last():
    pool = BlockPool(4, 4)
    a = BlockTable(pool)
    a.append(12)
    pool.keep(a.ids)
    a.free()
    assert pool.eviction_order() == [2, 1, 0]


# --- bad input --------------------------------------------------------------------------------------------


def test_a_pool_too_small_raises_and_changes_nothing():
    pool = BlockPool(3, 4)
    a, other = BlockTable(pool), BlockTable(pool)
    a.append(4)
    other.append(4)
    before = pool_state(pool), table_state(a)
    with pytest.raises(PoolFull, match="n=5; 2 more blocks are needed and 1 are free"):
        a.append(5)
    with pytest.raises(ValueError, match="n=9; 13 tokens take 4 blocks and the pool has 3") as never:
        a.append(9)
    assert not isinstance(never.value, PoolFull)
    assert (pool_state(pool), table_state(a)) == before
    assert a.append(4) == []


def test_a_copy_that_finds_no_block_raises_and_changes_nothing():
    pool = BlockPool(2, 4)
    a = BlockTable(pool)
    a.append(6)
    b = a.fork()
    before = pool_state(pool), table_state(a), table_state(b)
    with pytest.raises(PoolFull):
        b.append()
    assert (pool_state(pool), table_state(a), table_state(b)) == before
    a.free()
    assert b.append() == []


@pytest.mark.parametrize(
    "call, name",
    [
        *[(lambda t, n=n: t.append(n), "n") for n in (-1, 1.0, "1", None, True, 10**30)],
        *[(lambda t, n=n: t.crop(n), "n") for n in (-1, 1.0, None, True)],
        *[(lambda t, p=p: t.slot(p), "position") for p in (-1, 6, 1.0, True)],
        *[(lambda t, a=a: t.slots(*a), "st") for a in ((-1, 2), (3, 2), (0, 7), (0, 1.0), (None, 1))],
        *[(lambda t, w=w: t.padded(w), "width") for w in (1, -1, 2.0)],
    ],
)
def test_every_bad_call_names_its_argument_and_changes_nothing(call, name):
    pool = plain.BlockPool(4, 4)
    table = plain.BlockTable(pool)
    table.append(6)
    before = pool_state(pool), table_state(table)
    with pytest.raises(ValueError, match=rf"^{name}"):
        call(table)
    assert (pool_state(pool), table_state(table)) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.append(),
        lambda t: t.append(0),
        lambda t: t.crop(0),
        lambda t: t.fork(),
        lambda t: t.free(),
        lambda t: t.slot(0),
        lambda t: t.slots(0, 0),
        lambda t: t.padded(4),
        lambda t: to_csr([t]),
    ],
)
def test_a_freed_table_is_of_no_more_use(call):
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    table.append(6)
    table.free()
    before = pool_state(pool)
    with pytest.raises(ValueError, match="table: it was freed"):
        call(table)
    assert pool_state(pool) == before


def test_a_table_whose_blocks_do_not_fit_its_length():
    pool = BlockPool(4, 4)
    ids = pool.allocate(2)
    for length in (0, 4, 9):
        with pytest.raises(ValueError, match="^ids must .* length=.* got"):
            BlockTable(pool, ids, length)
    with pytest.raises(ValueError, match="length"):
        plain.BlockTable(pool, ids, -5)
    assert BlockTable(pool, ids, 5).slot(4) == ids[1] * 4
