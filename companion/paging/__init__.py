"""Who owns the memory of a paged cache, and who may share it. Standard library only.

    pool      blocks by number: reference counts, allocate and free in O(1), the order of eviction
    table     one sequence's blocks, with copy on write of the last one
    prefix    which blocks hold the beginning of a prompt: a sha256 chain, compared token by token on a hit
    manager   all three together; what a paged store and a scheduler talk to

Nothing here holds a key or a value, so the same allocator serves any storage, and runs in a browser.
"""

from ..checks import BrokenInvariant
from .manager import BlockManager, PagedSequence, Usage
from .pool import BlockPool, PoolFull
from .prefix import ROOT, PrefixIndex, block_digest
from .table import BlockTable, blocks_needed, to_csr

__all__ = [
    "ROOT",
    "BlockManager",
    "BlockPool",
    "BlockTable",
    "BrokenInvariant",
    "PagedSequence",
    "PoolFull",
    "PrefixIndex",
    "Usage",
    "block_digest",
    "blocks_needed",
    "to_csr",
]
