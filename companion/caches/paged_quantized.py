"""Pages in few bits: a block is quantized once, when it is full, and may then be shared like any other.

Until then its tokens lie in the row's own tail, in full precision, so no page is ever read back to be
quantized again. A block is as long as the codec's groups along tokens, or a multiple.
"""

import copy
from functools import partial

from ..paging import BlockManager, blocks_needed
from .packed import PagedPacked
from .quantized import QuantizedCache
from .tables import RowTables


class PagedQuantizedCache(QuantizedCache):
    """`make_cache("paged", codec=...)`; the arguments are those of the two caches that it joins.

    A `crop` must end on a whole block, unless it stays within the tail. `fork` shares the full blocks and
    copies the tail.
    """

    def __init__(
        self,
        spec,
        *,
        batch=1,
        max_tokens,
        dtype,
        device,
        codec,
        residual=0,
        block_size=16,
        num_blocks=None,
    ):
        need = batch * blocks_needed(max_tokens, block_size)
        self.manager = BlockManager(need if num_blocks is None else num_blocks, block_size)
        self.block_size = block_size
        self._tables = RowTables.new(self.manager, batch, device)
        super().__init__(
            spec,
            batch=batch,
            max_tokens=max_tokens,
            dtype=dtype,
            device=device,
            codec=codec,
            residual=residual,
        )
        if any(layer.unit != block_size for layer in self._layers):
            unit = max(layer.unit for layer in self._layers)
            raise ValueError(
                f"block_size={block_size}; this codec groups {unit} tokens, need a multiple of that"
            )

    def _packing(self):
        blocks = partial(_blocks, self)
        make = partial(PagedPacked, num_blocks=self.manager.pool.num_blocks, blocks=blocks)
        return {"unit": self.block_size, "make": make}

    def _reserve(self, lengths):
        # A block that a fork still shares is not full, so its tokens lie in the tails: nothing to copy.
        self._tables.reserve(lengths)

    def block_table(self, width=None, fill=-1):
        """int32 (B, width): the rows' blocks, padded with `fill`. width: None for the longest row's."""
        return self._tables.tensor(width, fill)

    def crop(self, n):
        super().crop(n)
        self._tables.crop(self._per_row(n))

    def fork(self):
        """A second cache over the same full blocks, with a tail of its own."""
        twin = copy.copy(self)
        twin._tables = self._tables.fork()
        twin._rows = [list(rows) for rows in self._rows]
        twin._fresh = [None] * self.spec.layers
        twin._step = [None] * self.spec.layers
        twin._layers = [layer.fork(partial(_blocks, twin)) for layer in self._layers]
        return twin

    def free(self) -> None:
        """Give every block back; the cache is empty and cannot be used again."""
        self._tables.free()
        self._rows = [[0] * self.batch for _ in range(self.spec.layers)]


def _blocks(cache: PagedQuantizedCache, row: int) -> list[int]:
    return cache._tables.ids(row)
