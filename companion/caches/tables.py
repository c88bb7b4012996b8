"""The block tables of a cache's rows: reserve for all or for none, crop, fork, and the table as a tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..paging import BlockManager, BlockTable, PagedSequence

Entry = PagedSequence | BlockTable


class RowTables:
    """One table per row: a plain `BlockTable`, which grows by itself, or a manager's `PagedSequence`."""

    def __init__(self, manager: BlockManager, entries: Sequence[Entry], device: torch.device):
        self.manager, self.entries, self.device = manager, list(entries), device
        self._ids: Tensor | None = None  # as a tensor, until a table changes
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
        copies, done = [], []
        try:
            for row, more in short:
                done.append((tables[row], tables[row].length))
                copies += tables[row].append(more)
        except ValueError:
            for table, length in done:
                table.crop(length)
            raise
        finally:
            self._ids = None
        return copies

    def crop(self, lengths: Sequence[int]) -> None:
        """Rows keep this many tokens at most; blocks behind them go back to the pool."""
        for entry, n in zip(self.entries, lengths):
            if isinstance(entry, PagedSequence):
                self.manager.crop(entry, n)
            else:
                entry.crop(n)
        self._ids = None

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
        self._ids = None

    def tensor(self, width: int | None = None, fill: int = -1) -> Tensor:
        """int32 (B, width): the rows' blocks, padded with `fill`. width: None for the longest row's."""
        if width is None and fill == -1:
            if self._ids is None:
                self._ids = self._tensor(None, -1)
                self._run = _run(self.ids(0)) if len(self.entries) == 1 else None
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
