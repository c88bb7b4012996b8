"""The order of eviction: a doubly linked list in two arrays, so that its middle is as near as its ends.

A queue finds its oldest member at once but must be searched for any other. Here every block has a place of
its own for "who is before me" and "who is after me": a cached block that is wanted again leaves the middle of
the order in a few array writes, however many blocks wait in it. vLLM's free list does the same with objects.
"""

from array import array
from collections.abc import Iterator, Sequence

from ..checks import must

END = -1  # the link beyond the first and the last member
ABSENT = -2  # `before` of a block that is not in the order


class EvictionOrder:
    """Block ids, the next to be evicted first. Every operation is O(1) per block.

    An id must have been made room for with `grow`. It is the pool that keeps callers from adding a block
    twice or removing one that is not there.
    """

    def __init__(self) -> None:
        self._before, self._after = array("i"), array("i")
        self._first = self._last = END
        self._count = 0

    def grow(self, n: int) -> None:
        """Room for n more ids: those that follow the largest one so far."""
        self._before.extend(array("i", [ABSENT]) * n)
        self._after.extend(array("i", [END]) * n)

    def extend(self, ids: Sequence[int]) -> None:
        """Put ids at the end, in the order given: the first of them goes first."""
        if not ids:
            return
        before, after, last = self._before, self._after, self._last
        for i in ids:
            before[i] = last
            if last == END:
                self._first = i
            else:
                after[last] = i
            last = i
        after[last] = END
        self._last = last
        self._count += len(ids)

    def remove(self, i: int) -> None:
        """Take i out, wherever it stands."""
        left, right = self._before[i], self._after[i]
        if left == END:
            self._first = right
        else:
            self._after[left] = right
        if right == END:
            self._last = left
        else:
            self._before[right] = left
        self._before[i] = ABSENT
        self._count -= 1

    def pop(self, n: int) -> list[int]:
        """Take out the first n (no more than there are), oldest first."""
        ids, before, after, i = [], self._before, self._after, self._first
        for _ in range(n):
            ids.append(i)
            before[i] = ABSENT
            i = after[i]
        self._first = i
        if i == END:
            self._last = END
        else:
            before[i] = END
        self._count -= n
        return ids

    def __len__(self) -> int:
        return self._count

    def __contains__(self, i: int) -> bool:
        return 0 <= i < len(self._before) and self._before[i] != ABSENT

    def __iter__(self) -> Iterator[int]:
        """The next to be evicted first."""
        i = self._first
        for _ in range(self._count):  # and not "until END": a broken chain must not be walked for ever
            yield i
            i = self._after[i]

    def check(self) -> None:
        """Raise BrokenInvariant unless both directions tell of the same members, each once, and no others."""
        i, last, size = self._first, END, len(self._before)
        for seen in range(self._count):
            must(i != END, "the order of eviction holds {} blocks but counts {}", seen, self._count)
            must(0 <= i < size, "the order of eviction leads to block {}, which is none", i)
            must(self._before[i] == last, "the order's links disagree at block {}", i)
            last, i = i, self._after[i]
        must(i == END, "the order of eviction goes on to block {} after the {} it counts", i, self._count)
        must(self._last == last, "the order ends at block {} but says {}", last, self._last)
        members = sum(1 for b in self._before if b != ABSENT)
        must(members == self._count, "{} blocks say that they are in the order, {} are", members, self._count)
