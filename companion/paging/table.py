"""The block table of one sequence: which block holds which of its tokens.

Token p lives in slot p % block_size of block ids[p // block_size]; the blocks may lie anywhere in the pool.

A token joins a sequence when its slot is reserved, by `append`, *before* the forward pass that writes its
key and value. So a sequence of n tokens always has ceil(n / block_size) blocks: with blocks of 16 the 16th
token still goes into the first block and the 17th takes the second. In a decode loop the token that was just
sampled is appended at the start of the next step.
"""

from collections.abc import Iterable, Sequence

from ..checks import require, whole
from .pool import BlockPool, PoolFull


def blocks_needed(n: int, block_size: int) -> int:
    """Blocks that n tokens take: n / block_size, rounded up."""
    return -(-whole("n", n, 0) // whole("block_size", block_size, 1))


class BlockTable:
    """The blocks of one sequence, in order, and its length in tokens.

    BlockTable(pool) is empty; BlockTable(pool, ids, length) takes over one reference to each of `ids`, which
    the caller has already. Attributes to read: `ids`, `length`. A call that raises has changed nothing;
    after `free` every call raises ValueError.
    """

    __slots__ = ("pool", "ids", "length", "freed")

    def __init__(self, pool: BlockPool, ids: Iterable[int] = (), length: int = 0) -> None:
        self.pool, self.ids, self.length, self.freed = pool, list(ids), whole("length", length, 0), False
        total = -(-length // pool.block_size)
        require(len(self.ids) == total, "ids", f"the {total} blocks that length={length} takes", self.ids)

    def append(self, n: int = 1) -> list[tuple[int, int]]:
        """Reserve the slots of n more tokens. Returns the copies to make first: [(source, destination)].

        A token that goes into a partly filled block which another table reads too must not be written there
        (copy on write): the block is replaced in this table by a new one, and the storage has to copy the old
        one's content before it writes the token. There is at most one such copy. A block that nobody else
        holds, but that is kept to be found by its content (after a crop), is forgotten and then written.

        Raises PoolFull if the pool cannot give the blocks now, ValueError if it never could.
        """
        pool = self.pool
        block_size = pool.block_size
        filled = self.length % block_size
        if filled and n == 1 and type(n) is int:  # a freed table has no length
            last = self.ids[-1]
            if pool._refs[last] == 1 and not pool._kept[last]:
                self.length += 1  # what a decode step comes to, most of the time
                return []
        self._usable()
        length = self.length + whole("n", n, 0)
        total = -(-length // block_size)
        if total > pool.num_blocks:
            raise ValueError(f"n={n}; {length} tokens take {total} blocks and the pool has {pool.num_blocks}")
        last = self.ids[-1] if filled and n else None
        copy = last is not None and pool.ref_count(last) > 1
        new = total - len(self.ids) + copy
        if new > pool.num_free:
            raise PoolFull(f"n={n}; {new} more blocks are needed and {pool.num_free} are free")
        self.length = length
        if copy:
            ids = pool.allocate(new)
            self.ids[-1:] = ids
            pool.free([last])
            return [(last, ids[0])]
        if last is not None and pool.is_kept(last):
            pool.forget(last)
        self.ids += pool.allocate(new)
        return []

    def crop(self, n: int) -> None:
        """Keep the first n tokens; blocks beyond them lose this table's reference, the last one first.

        A table of n tokens or fewer stays as it is.
        """
        self._usable()
        keep = blocks_needed(whole("n", n, 0), self.pool.block_size)
        if n >= self.length:
            return
        self.pool.free(self.ids[keep:][::-1])
        del self.ids[keep:]
        self.length = n

    def fork(self) -> "BlockTable":
        """A second table of the same tokens in the same blocks: nothing is copied until one of them grows."""
        self._usable()
        self.pool.fork(self.ids)
        return BlockTable(self.pool, self.ids, self.length)

    def free(self) -> None:
        """Give everything back, the tail first: what begins the sequence is what others may want again."""
        self._usable()
        self.pool.free(self.ids[::-1])
        self.ids, self.length, self.freed = [], 0, True

    # --- for kernels -------------------------------------------------------------------------------------

    def slot(self, position: int) -> int:
        """Where token `position` lies, the pool seen as one row of slots: block * block_size + offset."""
        self._usable()
        whole("position", position, 0, self.length - 1)
        block, offset = divmod(position, self.pool.block_size)
        return self.ids[block] * self.pool.block_size + offset

    def slots(self, start: int, stop: int) -> list[int]:
        """The slots of tokens start .. stop - 1, as a kernel that writes them wants them."""
        self._usable()
        whole("start", start, 0, whole("stop", stop, 0, self.length))
        size, ids = self.pool.block_size, self.ids
        return [ids[p // size] * size + p % size for p in range(start, stop)]

    def padded(self, width: int, fill: int = -1) -> list[int]:
        """The row of a `block_table` of that width; behind the blocks comes `fill`, which nobody may read."""
        self._usable()
        whole("width", width, len(self.ids))
        return self.ids + [fill] * (width - len(self.ids))

    def _usable(self) -> None:
        if self.freed:
            raise ValueError("table: it was freed, so it has no blocks any more")

    def __repr__(self) -> str:
        return f"BlockTable({self.length} tokens in {self.ids}{', freed' * self.freed})"


def to_csr(tables: Sequence[BlockTable]) -> tuple[list[int], list[int], list[int]]:
    """(indptr, indices, last_page_len): the tables as FlashInfer takes them, without padding.

    Row b has the blocks indices[indptr[b]:indptr[b + 1]], of which the last holds last_page_len[b] tokens
    (0 only in a row without any).
    """
    indptr, indices, last = [0], [], []
    for table in tables:
        table._usable()
        indices += table.ids
        indptr.append(len(indices))
        last.append((table.length - 1) % table.pool.block_size + 1 if table.length else 0)
    return indptr, indices, last
