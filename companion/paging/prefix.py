"""Which blocks hold the beginning of this prompt already.

Keys and values of a token depend on every token before it, so a block is reusable only under an equal prefix.
The index therefore names a full block by a chain of digests,

    digest = sha256(parent || count || tokens || extra)

    parent   digest of the block before, 32 bytes; 32 zero bytes for the first block
    count    number of tokens, 8 bytes little-endian
    tokens   4 bytes each, little-endian
    extra    per value: a letter for its type, the length of its text in decimal, ":", its text in UTF-8

which is the same in every process and on every machine. `extra` is whatever else keys and values, or the
right to see them, depend on: a tenant's salt, the name of an adapter. Prompts that differ in it share
nothing.

A digest only finds a candidate. It is a hit if its tokens and `extra` are equal and its parent is the very
entry that was matched one block earlier: even equal digests of different prompts could not mix them up.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from reprlib import repr as brief

from ..checks import must, require, whole

Extra = tuple[str | bytes | int | None, ...]
ROOT = bytes(32)
_KINDS = {str: b"s", bytes: b"y", int: b"i", bool: b"b", type(None): b"n"}


def as_tokens(name: str, tokens: Iterable[int]) -> array:
    """Token ids as an array of 32-bit integers; ValueError naming the argument for anything else."""
    if type(tokens) is array and tokens.typecode == "I":
        return tokens
    try:
        return array("I", list(tokens))
    except (TypeError, OverflowError):
        raise ValueError(
            f"{name} must be token ids, integers of 0 to 2**32 - 1, got {brief(tokens)}"
        ) from None


def encode_extra(extra: Extra) -> bytes:
    """The bytes of `extra` in a digest. ValueError unless it is a tuple of str, bytes, int, bool and None."""
    if extra == ():
        return b""
    known = isinstance(extra, (tuple, list)) and all(type(x) in _KINDS for x in extra)
    require(known, "extra", "a tuple of str, bytes, int, bool or None", extra)
    parts = []
    for x in extra:
        text = x if type(x) is bytes else str(x).encode("utf-8", "surrogatepass")
        parts.append(b"%s%d:%s" % (_KINDS[type(x)], len(text), text))
    return b"".join(parts)


def block_digest(parent: bytes, tokens: Iterable[int], extra: Extra = ()) -> bytes:
    """The digest, 32 bytes, of `tokens` in a block that follows the one with digest `parent`.

    parent: 32 zero bytes (`companion.paging.prefix.ROOT`) for the first block of a text.
    """
    require(isinstance(parent, bytes) and len(parent) == 32, "parent", "a digest of 32 bytes", parent)
    data = as_tokens("tokens", tokens)
    return sha256(parent + len(data).to_bytes(8, "little") + _bytes(data) + encode_extra(extra)).digest()


def _bytes(tokens: array) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


class Entry:
    """One content: these tokens after that parent; and the blocks that hold it, the newest last.

    Two blocks hold the same content when two sequences computed it at the same time, or when a prompt that is
    cached to its very end recomputes its last block.

    number  unlike a digest, never the same for two entries; parent is the parent's, 0 for none
    """

    __slots__ = ("number", "parent", "parent_digest", "digest", "tokens", "extra", "blocks")

    def __init__(self, number, parent, parent_digest, digest, tokens, extra) -> None:
        self.number, self.parent, self.parent_digest = number, parent, parent_digest
        self.digest, self.tokens, self.extra = digest, tokens, extra
        self.blocks: dict[int, None] = {}  # a set that keeps its order

    def holds(self, parent: int, tokens: bytes, extra: bytes) -> bool:
        """Whether it is this content, whatever the digest says."""
        return self.tokens == tokens and self.parent == parent and self.extra == extra


class PrefixIndex:
    """Full blocks of block_size tokens by content. It owns no block and counts no reference: the pool does.

    `blocks` are ids, integers of at least 0. A call that raises has changed nothing.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = whole("block_size", block_size, 1)
        self._by_digest: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._count = self.block_size.to_bytes(8, "little")
        self._made = 0

    def __len__(self) -> int:
        """Blocks in the index."""
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_block)

    def content(self, block: int) -> list[int]:
        """The tokens of an indexed block; ValueError for any other."""
        tokens = array("I", self._entry(block).tokens)
        if sys.byteorder == "big":
            tokens.byteswap()
        return list(tokens)

    def digest(self, block: int) -> bytes:
        """The digest that names the content of an indexed block; ValueError for any other."""
        return self._entry(block).digest

    def match(self, tokens: Iterable[int], extra: Extra = ()) -> list[int]:
        """Blocks that hold the longest cached beginning of `tokens`, in order; nothing is changed.

        At most len(tokens) - 1 tokens are matched: the model has to be run on the last one in any case, to
        have its logits. So a prompt of exactly two cached blocks matches one.
        """
        tokens, key = as_tokens("tokens", tokens), encode_extra(extra)
        size, count, by_digest = self.block_size, self._count, self._by_digest
        parent, digest, found = 0, ROOT, []
        for at in range(0, len(tokens) - size, size):  # the last start leaves a token over
            data = _bytes(tokens[at : at + size])
            digest = sha256(digest + count + data + key).digest()
            entry = by_digest.get(digest)
            if entry is None or not entry.holds(parent, data, key):
                break
            found.append(next(reversed(entry.blocks)))
            parent = entry.number
        return found

    def register(
        self,
        blocks: Sequence[int],
        tokens: Iterable[int],
        extra: Extra = (),
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> list[int]:
        """Make the full blocks of a sequence findable; returns those that were not in the index before.

        blocks[k] holds tokens[k * block_size : (k + 1) * block_size], written already; a last block that is
        not full is left out. Only blocks start .. stop - 1 are looked at (stop None: to the last full one),
        and what comes before them has to be registered: so a decode step's call costs one block, not all.

        Raises ValueError for a range that does not fit the full blocks, if block start - 1 is not in the
        index, if a block comes twice, or if one is in the index with another content.
        """
        tokens, key = as_tokens("tokens", tokens), encode_extra(extra)
        size, full = self.block_size, len(tokens) // self.block_size
        stop = full if stop is None else whole("stop", stop, 0, full)
        whole("start", start, 0, stop)
        if len(blocks) < stop:
            raise ValueError(
                f"blocks must be a block for each of the {stop} that are full, got {len(blocks)}"
            )
        before = self._entry(blocks[start - 1]) if start else None
        parent, digest = (before.number, before.digest) if before else (0, ROOT)
        count, by_digest, by_block = self._count, self._by_digest, self._by_block
        data, step, made = _bytes(tokens[start * size : stop * size]), 4 * size, self._made
        plan: dict[int, Entry] = {}
        for at, block in enumerate(blocks[start:stop]):
            chunk = data[at * step : (at + 1) * step]
            above, digest = digest, sha256(digest + count + chunk + key).digest()
            entry = by_block.get(block)
            if entry is not None:
                if not entry.holds(parent, chunk, key):
                    raise ValueError(f"blocks: block {block} is in the index with another content")
            else:
                if block in plan or type(block) is not int or block < 0:
                    raise ValueError(f"blocks must be ids of blocks, each once, got {block!r}")
                entry = by_digest.get(digest)
                if entry is None or not entry.holds(parent, chunk, key):
                    made += 1
                    entry = Entry(made, parent, above, digest, chunk, key)
                plan[block] = entry
            parent = entry.number
        for block, entry in plan.items():
            by_digest[entry.digest] = by_block[block] = entry
            entry.blocks[block] = None
        self._made = made
        return list(plan)

    def remove(self, blocks: Iterable[int]) -> None:
        """These blocks no longer hold their content. ValueError if one is not in the index or comes twice."""
        by_digest, by_block, entries = self._by_digest, self._by_block, []
        blocks = list(blocks)
        for block in blocks:
            entry = by_block.pop(block, None)
            if entry is None:
                by_block.update(zip(blocks, entries))  # undo
                raise ValueError(f"blocks: block {block!r} is not in the index")
            entries.append(entry)
        for block, entry in zip(blocks, entries):
            del entry.blocks[block]
            # The digest may lead to a newer entry by now: take away only what leads here.
            if not entry.blocks and by_digest.get(entry.digest) is entry:
                del by_digest[entry.digest]

    def _entry(self, block: int) -> Entry:
        entry = self._by_block.get(block)
        if entry is None:
            raise ValueError(f"blocks: block {block!r} is not in the index")
        return entry

    def check(self) -> None:
        """Raise BrokenInvariant on the first of these that fails. O(blocks in the index).

        1. Every block of the index is among its entry's blocks, and every entry's blocks lead back to it.
        2. Every entry in the index has a block.
        3. Every entry is one full block, named by the digest of what it holds, and later than its parent.
        4. Every digest leads to an entry that has this digest.
        5. No two entries have one number.
        """
        for block, entry in self._by_block.items():
            must(block in entry.blocks, "block {} is in the index, but not in its entry", block)
        entries = {id(e): e for e in [*self._by_block.values(), *self._by_digest.values()]}.values()
        for entry in entries:
            must(entry.blocks, "entry {} is in the index without a block", entry.number)
            for block in entry.blocks:
                must(self._by_block.get(block) is entry, "block {} leads to another entry", block)
            made = sha256(entry.parent_digest + self._count + entry.tokens + entry.extra).digest()
            must(entry.digest == made, "entry {} has not the digest of its content", entry.number)
            must(len(entry.tokens) == 4 * self.block_size, "entry {} is not one full block", entry.number)
            must(0 <= entry.parent < entry.number, "entry {} follows entry {}", entry.number, entry.parent)
        for digest, entry in self._by_digest.items():
            must(digest == entry.digest, "a digest leads to entry {}, which has another one", entry.number)
        must(len({e.number for e in entries}) == len(entries), "two entries have the same number")
