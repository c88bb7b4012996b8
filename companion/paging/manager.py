"""The allocator of a paged cache: sequences come, find what is cached of them, grow, fork, shrink and leave.

    manager = BlockManager(num_blocks=1024, block_size=16)
    seq = manager.allocate(prompt)              # seq.shared tokens need no computing: run prompt[seq.shared:]
    manager.register(seq)                       # what is written can be found by the next prompt
    for source, destination in manager.append(seq, token):
        ...                                     # the storage copies one block, then writes the token's slot
    manager.free(seq)

It decides and never touches a key or a value: a storage follows the tables and makes the copies it is told
of.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from ..checks import must, require, whole
from .pool import BlockPool, PoolFull
from .prefix import ROOT, Extra, PrefixIndex, as_tokens, block_digest, encode_extra
from .table import BlockTable, blocks_needed


class PagedSequence:
    """One sequence, as its manager keeps it; to be read, not written.

    tokens      its token ids, array of 32-bit integers
    table       its `BlockTable`
    extra       what it may share a prefix under, besides the tokens
    shared      tokens at its start whose keys and values were found in the cache: never the whole prompt
    registered  full blocks at its start that are in the prefix index
    """

    __slots__ = ("tokens", "table", "extra", "shared", "registered")

    def __init__(self, tokens: array, table: BlockTable, extra: Extra, shared: int, registered: int) -> None:
        self.tokens, self.table, self.extra = tokens, table, extra
        self.shared, self.registered = shared, registered

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"PagedSequence({len(self)} tokens, {self.shared} shared, blocks {self.table.ids})"


@dataclass(frozen=True)
class Usage:
    """How well the pool is used. A block that several tables share counts once."""

    sequences: int
    tokens: int  # of all sequences, each with its own
    blocks: int  # num_blocks
    blocks_live: int
    blocks_cached: int  # free, but found if they are wanted again
    slots_live: int  # blocks_live * block_size
    slots_filled: int  # of slots_live, those that hold a token
    prompts: int  # allocated so far
    prompts_hit: int  # of those, with a block or more found
    prompt_tokens: int
    prompt_tokens_shared: int  # of those, found: not computed again

    @property
    def utilisation_blocks(self) -> float:
        """Live blocks per block of the pool: says when the pool is full, not whether its room is used."""
        return self.blocks_live / self.blocks

    @property
    def utilisation_tokens(self) -> float:
        """Filled slots per slot of the live blocks (1 if there are none): what was taken and is used."""
        return self.slots_filled / self.slots_live if self.slots_live else 1.0

    @property
    def waste(self) -> int:
        """Slots taken and empty: fewer than block_size for each sequence."""
        return self.slots_live - self.slots_filled

    @property
    def hit_rate(self) -> float:
        """Shared tokens per prompt token; 0 before the first prompt."""
        return self.prompt_tokens_shared / self.prompt_tokens if self.prompt_tokens else 0.0


class BlockManager:
    """Sequences over one pool of num_blocks blocks of block_size tokens.

    prefix: whether prompts look for what is cached of them, and freed blocks keep what was registered.

    A call that raises has changed nothing. `PoolFull` (a ValueError) means not now: it would fit if others
    were freed. A plain ValueError means never: more blocks than the pool has, a sequence that was freed or
    belongs to another manager, tokens that are no integers. Attributes to read: `pool`, `index`.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix: bool = True) -> None:
        self.index = PrefixIndex(block_size)
        self.pool = BlockPool(num_blocks, block_size, on_forget=self.index.remove)
        self.block_size, self.prefix = block_size, prefix
        self._live: dict[PagedSequence, None] = {}
        self._prompts = self._hits = self._tokens = self._shared = 0

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now, cached ones included."""
        return self.pool.num_free

    @property
    def sequences(self) -> list[PagedSequence]:
        """The live sequences, the oldest first."""
        return list(self._live)

    def lookup(self, prompt: Iterable[int], extra: Extra = ()) -> int:
        """Tokens of this prompt that `allocate` would find now: a multiple of block_size below its length."""
        return len(self._match(as_tokens("prompt", prompt), extra)) * self.block_size

    def allocate(self, prompt: Iterable[int], extra: Extra = (), *, spare: int = 0) -> PagedSequence:
        """A sequence of the prompt's tokens: in cached blocks as far as they are found, in new ones beyond.

        spare: blocks that must still be free afterwards, for those who are growing; else PoolFull.

        Looking, taking the references and allocating are one step: either all of it happens or nothing. A
        prompt of no token is a sequence without blocks.
        """
        tokens, pool = as_tokens("prompt", prompt), self.pool
        total = -(-len(tokens) // self.block_size)
        if total > pool.num_blocks:
            raise ValueError(
                f"prompt: {len(tokens)} tokens take {total} blocks and the pool has {pool.num_blocks}"
            )
        found = self._match(tokens, extra)
        new = total - len(found)
        left = pool.num_free - sum([not pool._refs[i] for i in found])
        if new + whole("spare", spare, 0) > left:
            raise PoolFull(
                f"prompt: {new} blocks are needed beyond {len(found)} found"
                f"{f', {spare} have to stay free' if spare else ''}, and "
                f"{left} are free"
            )
        pool.take(found)  # first, lest they be evicted for the rest
        table = BlockTable(pool, found + pool.allocate(new), len(tokens))
        mine = tokens[:] if tokens is prompt else tokens
        seq = PagedSequence(mine, table, tuple(extra), len(found) * self.block_size, len(found))
        self._live[seq] = None
        self._prompts += 1
        self._hits += bool(found)
        self._tokens += len(tokens)
        self._shared += seq.shared
        return seq

    def append(self, seq: PagedSequence, tokens: int | Iterable[int]) -> list[tuple[int, int]]:
        """One token more, or several: their slots are reserved. Returns the copies to make before writing.

        The copies are (source, destination) blocks, at most one, as in `BlockTable.append`.
        """
        if seq.__class__ is not PagedSequence or seq not in self._live:
            self._known(seq)
        mine = seq.tokens
        before = len(mine)
        try:
            if isinstance(tokens, int):
                mine.append(tokens)
            else:
                mine += as_tokens("tokens", tokens)
            return seq.table.append(len(mine) - before)
        except OverflowError:
            raise ValueError(f"tokens must be integers of 0 to 2**32 - 1, got {tokens}") from None
        except ValueError:
            del mine[before:]
            raise

    def register(self, seq: PagedSequence, computed: int | None = None) -> list[int]:
        """Make the full blocks of the sequence findable, those of its first `computed` tokens (None: all).

        To be called when the keys and values of these tokens are written, after the forward pass, and before
        another prompt may find them. Drafts, which may be cropped again, are left to a later call. Returns
        the blocks that are new to the index.
        """
        if seq.__class__ is not PagedSequence or seq not in self._live:
            self._known(seq)
        n = len(seq.tokens)
        if computed is not None:
            n = whole("computed", computed, 0, n)
        full = n // self.block_size
        if full <= seq.registered or not self.prefix:
            return []
        new = self.index.register(seq.table.ids, seq.tokens, seq.extra, start=seq.registered, stop=full)
        self.pool.keep(new)
        seq.registered = full
        return new

    def fork(self, seq: PagedSequence) -> PagedSequence:
        """A second sequence of the same tokens in the same blocks: whoever writes a shared one copies it."""
        self._known(seq)
        new = PagedSequence(seq.tokens[:], seq.table.fork(), seq.extra, seq.shared, seq.registered)
        self._live[new] = None
        return new

    def crop(self, seq: PagedSequence, n: int) -> None:
        """Keep the first n tokens, as when drafts are rejected. A shorter sequence stays as it is."""
        self._known(seq)
        seq.table.crop(n)
        del seq.tokens[n:]
        seq.registered = min(seq.registered, n // self.block_size)
        seq.shared = min(seq.shared, n)

    def free(self, seq: PagedSequence) -> None:
        """The sequence is finished: its references go, the tail's first, so that its head is evicted last."""
        self._known(seq)
        seq.table.free()
        del self._live[seq]

    def evict(self, n: int | None = None) -> list[int]:
        """Give up the n cached blocks whose turn is next (None: all). Live ones stay."""
        return self.pool.evict(n)

    def usage(self) -> Usage:
        """What is used and what was shared, counted now. O(blocks of the live sequences)."""
        size, filled = self.block_size, {}
        for seq in self._live:
            for k, block in enumerate(seq.table.ids):
                filled[block] = max(filled.get(block, 0), min(size, len(seq.tokens) - k * size))
        return Usage(
            sequences=len(self._live),
            tokens=sum(len(s.tokens) for s in self._live),
            blocks=self.pool.num_blocks,
            blocks_live=len(filled),
            blocks_cached=self.pool.num_cached,
            slots_live=len(filled) * size,
            slots_filled=sum(filled.values()),
            prompts=self._prompts,
            prompts_hit=self._hits,
            prompt_tokens=self._tokens,
            prompt_tokens_shared=self._shared,
        )

    def _match(self, tokens: array, extra: Extra) -> list[int]:
        if self.prefix:
            return self.index.match(tokens, extra)
        encode_extra(extra)  # wrong is wrong either way
        return []

    def _known(self, seq: PagedSequence) -> None:
        ours = isinstance(seq, PagedSequence) and seq in self._live
        require(ours, "seq", "a live sequence of this manager", seq)

    def check(self) -> None:
        """Raise BrokenInvariant on the first of these that fails. O(everything): for tests.

        1. The pool's own (`BlockPool.check`) and the index's own (`PrefixIndex.check`).
        2. A live sequence of n tokens has a table of length n, with ceil(n / block_size) blocks, each once.
        3. A block's reference count is the number of tables that hold it; so every live block is in a table.
        4. The blocks whose content the pool keeps are those of the index: a cached block can be found, and a
           block that can be found is live or cached.
        5. An indexed block in a table holds that table's tokens, as far as they go.
        6. The first `registered` blocks of a sequence are full, and indexed under the digests of its tokens.
        """
        self.pool.check()
        self.index.check()
        size, held = self.block_size, {}
        for seq in self._live:
            table, n = seq.table, len(seq.tokens)
            must(not table.freed and table.length == n, "{}: its table says {} tokens", seq, table.length)
            must(
                len(table.ids) == blocks_needed(n, size), "{}: {} tokens in {} blocks", seq, n, len(table.ids)
            )
            must(len(set(table.ids)) == len(table.ids), "{}: a block is twice in the table", seq)
            for block in table.ids:
                held[block] = held.get(block, 0) + 1
            digest = ROOT
            for k, block in enumerate(table.ids):
                mine = seq.tokens[k * size : (k + 1) * size]
                if block in self.index:
                    cached = self.index.content(block)[: len(mine)]
                    must(cached == list(mine), "{}: the index has other tokens for block {}", seq, block)
                if k < seq.registered:
                    digest = block_digest(digest, mine, seq.extra)
                    found = block in self.index and self.index.digest(block) == digest
                    must(found, "{}: block {} is registered but not indexed as what it is", seq, block)
            must(seq.registered * size <= n, "{}: {} registered blocks are not all full", seq, seq.registered)
        refs = {i: self.pool.ref_count(i) for i in range(self.pool._used)}
        wrong = [i for i in refs.keys() | held.keys() if refs.get(i, 0) != held.get(i, 0)]
        must(not wrong, "blocks {} have reference counts that differ from the tables that hold them", wrong)
        kept = {i for i in refs if self.pool.is_kept(i)}
        wrong = sorted(kept ^ set(self.index))
        must(not wrong, "blocks {} are kept by the pool or known to the index, but not both", wrong)
