"""The block tables of a cache's rows: reserve for all or for none, crop, fork, and the table as a tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..paging import BlockManager, BlockTable, PagedSequence, PoolFull, blocks_needed

Entry = PagedSequence | BlockTable


class RowTables:
    """One table per row: a plain `BlockTable`, which grows by itself, or a manager's `PagedSequence`."""

    def __init__(self, manager: BlockManager, entries: Sequence[Entry], device: torch.device):
        self.manager, self.entries, self.device = manager, list(entries), device
        tables = [self.table(row) for row in range(len(self.entries))]
        if any(t.freed or t.pool is not manager.pool for t in tables) or len(set(map(id, tables))) < len(
            tables
        ):
            raise ValueError("sequences: need live tables of the storage's own manager, each once")
        self._of: list[list[int]] | None = None  # the blocks for which `_ids` and `_run` were made
        self._ids: Tensor | None = None
        self._run: int | None = None

    @classmethod
    def new(cls, manager: BlockManager, batch: int, device: torch.device) -> "RowTables":
        """Empty tables for `batch` rows."""
        return cls(manager, [BlockTable(manager.pool) for _ in range(batch)], device)

    def table(self, row: int) -> BlockTable:
        entry = self.entries[row]
        return entry.table if isinstance(entry, PagedSequence) else entry

    def ids(self, row: int) -> list[int]:
        """The row's blocks in order."""
        return self.table(row).ids

    def lengths(self) -> list[int]:
        """Tokens of each row that are stored already: what a sequence found in the cache, a table's all."""
        return [e.shared if isinstance(e, PagedSequence) else e.length for e in self.entries]

    def reserve(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Blocks for rows of these lengths, or for none of them; returns the copies to make first.

        Raises `PoolFull` (a ValueError) if the pool cannot give them, and ValueError for a sequence that its
        manager was not told about.
        """
        tables = [self.table(row) for row in range(len(self.entries))]
        short = [(row, n - t.length) for row, (t, n) in enumerate(zip(tables, lengths)) if n > t.length]
        if not short:
            return []
        if any(isinstance(self.entries[row], PagedSequence) for row, _ in short):
            raise ValueError(
                "sequences: a row outgrew its sequence; tell the manager first, by manager.append"
            )
        self._affordable([(tables[row], more) for row, more in short])
        return [pair for row, more in short for pair in tables[row].append(more)]

    def _affordable(self, wishes: Sequence[tuple[BlockTable, int]]) -> None:
        """Raise unless the pool can give all: a row that has its block, or its copy, can't be undone."""
        pool, need, left = self.manager.pool, 0, {}
        for table, more in wishes:
            total = blocks_needed(table.length + more, pool.block_size)
            if table.freed or total > pool.num_blocks:
                table.append(more)  # raises: freed, or more than the pool could ever give
            need += total - len(table.ids)
            if table.length % pool.block_size:  # its last block is copied while others hold it
                last = table.ids[-1]
                left[last] = left.get(last, pool.ref_count(last)) - 1
                need += left[last] > 0
        if need > pool.num_free:
            raise PoolFull(f"lengths: {need} more blocks are needed and {pool.num_free} are free")

    def crop(self, lengths: Sequence[int]) -> None:
        """Rows keep this many tokens at most; blocks behind them go back to the pool."""
        for entry, n in zip(self.entries, lengths):
            if isinstance(entry, PagedSequence):
                self.manager.crop(entry, n)
            else:
                entry.crop(n)

    def fork(self) -> "RowTables":
        """Tables of the same blocks, for a second cache."""
        twins = [self.manager.fork(e) if isinstance(e, PagedSequence) else e.fork() for e in self.entries]
        return RowTables(self.manager, twins, self.device)

    def free(self) -> None:
        for entry in self.entries:
            if isinstance(entry, PagedSequence):
                self.manager.free(entry)
            else:
                entry.free()

    def tensor(self, width: int | None = None, fill: int = -1) -> Tensor:
        """int32 (B, width): the rows' blocks, padded with `fill`. width: None for the longest row's."""
        if width is None and fill == -1:
            now = [self.ids(row) for row in range(len(self.entries))]
            if now != self._of:  # tables grow elsewhere too: in the manager, or in a caller's hands
                self._of = [list(ids) for ids in now]
                self._ids = self._tensor(None, -1)
                self._run = _run(now[0]) if len(now) == 1 else None
            return self._ids
        return self._tensor(width, fill)

    def run(self) -> int | None:
        """The first block, where there is one row and its blocks are neighbours: it needs no gather."""
        self.tensor()
        return self._run

    def _tensor(self, width: int | None, fill: int) -> Tensor:
        tables = [self.table(row) for row in range(len(self.entries))]
        wide = max(1, *(len(t.ids) for t in tables)) if width is None else width
        return torch.tensor([t.padded(wide, fill) for t in tables], dtype=torch.int32, device=self.device)


def _run(ids: Sequence[int]) -> int | None:
    return ids[0] if ids and list(ids) == list(range(ids[0], ids[0] + len(ids))) else None
