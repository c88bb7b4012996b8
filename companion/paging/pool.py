"""Who owns which block: reference counts, and the order in which free blocks are handed out.

A block is always in one of four states:

    unused   never handed out: no more than a number, so that a pool of a million costs nothing to make
    live     referenced by one table or more
    cached   no longer referenced, but its content is worth finding again (`keep`)
    empty    no longer referenced, nothing in it worth finding

`allocate` takes empty blocks first (the last freed first), then unused ones, then the cached block that was
freed longest ago. Unused, cached and empty blocks are free.
"""

from array import array
from collections.abc import Callable, Iterable

from ..checks import must, require, whole
from .order import EvictionOrder

_INT = frozenset({int})
AHEAD = 1024  # blocks by which the arrays grow at least


class PoolFull(ValueError):
    """Not now: fewer blocks are free than the call needs. Nothing was changed; free something and call again.

    What can never fit, however much is freed, is a plain ValueError: a scheduler that waits on PoolFull
    alone does not wait for ever.
    """


class BlockPool:
    """num_blocks blocks of block_size tokens each. Every operation is O(1) per block, whatever num_blocks is.

    `ids` are block ids as `allocate` gave them: Python integers. A call that raises has changed nothing.

    on_forget: called with the ids of blocks whose cached content is given up, by eviction or `forget`.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, on_forget: Callable[[list[int]], object] | None = None
    ) -> None:
        self.num_blocks = whole("num_blocks", num_blocks, 1, 2**31 - 1)  # block ids are int32
        self.block_size = whole("block_size", block_size)
        self.on_forget = on_forget
        self._used = 0  # blocks 0 .. _used - 1 were handed out at some time, the rest never
        self._refs = array("i")  # this and _kept grow with use, a little ahead of _used
        self._kept = bytearray()
        self._empty: list[int] = []
        self._order = EvictionOrder()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return self.num_blocks - self._used + len(self._empty) + len(self._order)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content is kept until their turn comes."""
        return len(self._order)

    def ref_count(self, id: int) -> int:
        """References to a block; 0 for a free one. ValueError for an id outside the pool."""
        whole("id", id, 0, self.num_blocks - 1)
        return self._refs[id] if id < self._used else 0

    def eviction_order(self) -> list[int]:
        """The cached blocks, the next to be evicted first. O(their number)."""
        return list(self._order)

    # --- references --------------------------------------------------------------------------------------

    def allocate(self, n: int) -> list[int]:
        """n blocks with one reference each, or none at all.

        Raises PoolFull if fewer than n are free now, ValueError for an n that is no count or that the whole
        pool could not give.
        """
        refs, empty = self._refs, self._empty
        if whole("n", n, 0) > len(empty) and n > self.num_free:
            whole("n", n, 0, self.num_blocks)
            raise PoolFull(f"n={n}; {self.num_free} of the pool's {self.num_blocks} blocks are free")
        cut = max(0, len(empty) - n)
        ids = empty[cut:]
        del empty[cut:]
        if len(ids) < n:
            ids += self._first_use(min(n - len(ids), self.num_blocks - self._used))
        if len(ids) < n:
            evicted = self._order.pop(n - len(ids))
            self._forget(evicted)
            ids += evicted
        for i in ids:
            refs[i] = 1
        return ids

    def fork(self, ids: Iterable[int]) -> None:
        """One more reference to each block. Raises ValueError if one of them is not live."""
        ids, refs = self._known(ids), self._refs
        for i in ids:
            if not refs[i]:
                raise ValueError(f"ids: block {i} is free, so there is no reference to add to")
        for i in ids:
            refs[i] += 1

    def take(self, ids: Iterable[int]) -> None:
        """One more reference to each block, live or cached: a cached one comes back to life as it is.

        Raises ValueError if one of them is empty or unused.
        """
        ids, refs, kept = self._known(ids), self._refs, self._kept
        for i in ids:
            if not refs[i] and not kept[i]:
                raise ValueError(f"ids: block {i} is free and holds nothing")
        for i in ids:
            if not refs[i]:
                self._order.remove(i)
            refs[i] += 1

    def free(self, ids: Iterable[int]) -> None:
        """Drop one reference to each block; an id may come as often as it has references.

        Blocks that lose their last reference become free; the cached ones among them will be evicted in the
        order of `ids`, so give a table's tail first. Raises ValueError for a block without a reference to
        drop (freed twice, or more often than it is referenced) and for an id that is not of this pool.
        """
        ids, refs, kept = self._known(ids), self._refs, self._kept
        cached, empty = [], []
        for at, i in enumerate(ids):
            left = refs[i] - 1
            if left > 0:
                refs[i] = left
            elif left == 0:
                refs[i] = 0
                (cached if kept[i] else empty).append(i)
            else:
                for j in ids[:at]:  # undo
                    refs[j] += 1
                raise ValueError(f"ids: block {i} at place {at} has no reference left to free")
        self._order.extend(cached)
        self._empty += empty

    # --- content -----------------------------------------------------------------------------------------

    def keep(self, ids: Iterable[int]) -> None:
        """From now on the content of these live blocks is worth finding again. ValueError for a free one."""
        ids, refs = self._known(ids), self._refs
        for i in ids:
            if not refs[i]:
                raise ValueError(f"ids: block {i} is free, so whatever it held may be gone")
        for i in ids:
            self._kept[i] = 1

    def is_kept(self, id: int) -> bool:
        """Whether the content of this block, live or free, is kept."""
        self.ref_count(id)
        return id < self._used and bool(self._kept[id])

    def writable(self, id: int) -> bool:
        """Whether a live block may be written in place: it has one owner and nothing to be found by."""
        return self.ref_count(id) == 1 and not self._kept[id]

    def forget(self, id: int) -> None:
        """Give up the content of a block: live, it stays live; cached, it becomes empty.

        Raises ValueError if nothing is kept in it.
        """
        require(self.is_kept(id), "id", "a block in which something is kept", id)
        if not self._refs[id]:
            self._order.remove(id)
            self._empty.append(id)
        self._forget([id])

    def evict(self, n: int | None = None) -> list[int]:
        """Give up the content of the n cached blocks whose turn is next (None: of all); returns their ids.

        Fewer than n come back if fewer are cached.
        """
        n = len(self._order) if n is None else min(whole("n", n, 0), len(self._order))
        ids = self._order.pop(n)
        self._empty += ids
        self._forget(ids)
        return ids

    # --- inside ------------------------------------------------------------------------------------------

    def _first_use(self, n: int) -> range:
        start, self._used = self._used, self._used + n
        if self._used > len(self._refs):
            more = min(max(n, AHEAD), self.num_blocks - len(self._refs))
            self._refs.extend(array("i", [0]) * more)
            self._kept.extend(bytes(more))
            self._order.grow(more)
        return range(start, self._used)

    def _forget(self, ids: list[int]) -> None:
        for i in ids:
            self._kept[i] = 0
        if ids and self.on_forget is not None:
            self.on_forget(ids)

    def _known(self, ids: Iterable[int]) -> list[int]:
        """ids as a list, once it is sure that all were handed out some time. In C: every call comes here."""
        try:
            ids = list(ids)
        except TypeError:
            raise ValueError(f"ids must be a list of block ids, got {ids!r}") from None
        if ids and not (_INT.issuperset(map(type, ids)) and min(ids) >= 0 and max(ids) < self._used):
            for at, i in enumerate(ids):
                in_pool = type(i) is int and 0 <= i < self.num_blocks
                require(in_pool, f"ids[{at}]", f"a block from 0 to {self.num_blocks - 1}", i)
                require(i < self._used, f"ids[{at}]", "a block that was allocated", i)
        return ids

    def check(self) -> None:
        """Raise BrokenInvariant on the first of these that fails. O(blocks that were ever used).

        1. No more blocks were used than exist, and every array covers them.
        2. No reference count is negative.
        3. The order of eviction is one chain, the same in both directions (`EvictionOrder.check`).
        4. No block is twice among the empty ones.
        5. Every block that was ever used is live, cached or empty, and only one of them.
        6. Every cached block's content is kept, and no empty block's is.
        7. num_free is what is left of num_blocks when the live blocks are taken away.
        """
        used = self._used
        must(used <= self.num_blocks, "{} blocks were handed out of {}", used, self.num_blocks)
        sizes = {len(x) for x in (self._refs, self._kept, self._order._before, self._order._after)}
        must(len(sizes) == 1 and used <= max(sizes), "arrays of {} for {} blocks", sorted(sizes), used)
        negative = [i for i, r in enumerate(self._refs) if r < 0]
        must(not negative, "blocks {} have negative reference counts", negative)
        self._order.check()
        empty, cached = set(self._empty), set(self._order)
        must(len(empty) == len(self._empty), "a block is twice among the empty ones")
        live = {i for i, r in enumerate(self._refs) if r}
        for name, twice in (
            ("live and empty", live & empty),
            ("live and cached", live & cached),
            ("empty and cached", empty & cached),
        ):
            must(not twice, "blocks {} are both {}", sorted(twice), name)
        lost = set(range(used)) ^ (live | empty | cached)
        must(not lost, "blocks {} are neither live nor free", sorted(lost))
        must(all(self._kept[i] for i in cached), "a block waits for eviction whose content is not kept")
        must(not any(self._kept[i] for i in empty), "an empty block's content is kept")
        must(self.num_free == self.num_blocks - len(live), "num_free={}, live={}", self.num_free, len(live))
