"""A cache in pages: blocks of tokens out of one pool, handed out as rows grow and shared where rows agree.

The allocator is `companion.paging`, which knows block numbers and no tensors; `PagedStorage` holds the
tensors and makes the copies that the allocator asks for. Several caches may live on one storage: forks, and
prompts that share a prefix.

A layer's keys are stored as (Hkv, num_blocks, block_size, D), so that the blocks of a row come out of one
gather in the order in which attention reads them; `k_cache` and `v_cache` show them in the kernels' layout,
(num_blocks, block_size, Hkv, D), as a view.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cost import ModelSpec
from ..paging import BlockManager, BlockTable, PagedSequence, blocks_needed
from .attend import attend
from .base import Cache


class PagedStorage:
    """Keys and values of num_blocks blocks for every layer, and the manager that hands the blocks out.

    Everything is allocated here, once. `manager` is a `companion.paging.BlockManager`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if spec.mla is not None:
            raise ValueError(f"{spec.name} caches a latent vector, not keys and values; use kind='latent'")
        self.manager = BlockManager(num_blocks, block_size)
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, block_size
        self.dtype, self.device = dtype, torch.device(device)
        shape, to = (spec.kv_heads, num_blocks, block_size), {"dtype": dtype, "device": device}
        self.k = [torch.zeros(*shape, spec.head_dim, **to) for _ in range(spec.layers)]
        self.v = [torch.zeros(*shape, spec.v_head_dim, **to) for _ in range(spec.layers)]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in every layer: what copy-on-write asks for."""
        for source, destination in pairs:
            for store in (*self.k, *self.v):
                store[:, destination] = store[:, source]

    def write(self, layer: int, slots: Tensor | slice, k: Tensor, v: Tensor) -> None:
        """k, v (Hkv, n, D) into n slots, counted through the pool: block * block_size + offset."""
        self.k[layer].flatten(1, 2)[:, slots] = k
        self.v[layer].flatten(1, 2)[:, slots] = v

    def k_cache(self, layer: int) -> Tensor:
        """(num_blocks, block_size, Hkv, D), a view."""
        return self.k[layer].permute(1, 2, 0, 3)

    def v_cache(self, layer: int) -> Tensor:
        """(num_blocks, block_size, Hkv, Dv), a view."""
        return self.v[layer].permute(1, 2, 0, 3)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))


def gather(store: Tensor, block_table: Tensor, n: int) -> Tensor:
    """The first n tokens of every row: store (Hkv, num_blocks, block_size, D) -> (B, Hkv, n, D).

    block_table (B, columns): what a row has beyond its blocks may be anything, and so may what comes back
    for it.
    """
    heads, num_blocks, size, width = store.shape
    table = block_table[:, : -(-n // size)].long()
    B, columns = table.shape
    table = torch.where((table >= 0) & (table < num_blocks), table, 0)
    rows = store[:, table.flatten()].view(heads, B, columns * size, width)
    return rows.transpose(0, 1)[:, :, :n]


def run_of(ids: Sequence[int]) -> int | None:
    """The first of blocks that are neighbours in ascending order, or None: such a row needs no gather."""
    return ids[0] if ids and list(ids) == list(range(ids[0], ids[0] + len(ids))) else None


class PagedCache(Cache):
    """Rows over a `PagedStorage`. Without `storage` it gets one of its own, of num_blocks blocks.

    sequences: one entry per row, a `PagedSequence` or `BlockTable` of the storage's manager that this row
    continues; a sequence's `shared` tokens count as stored already. None starts every row empty.
    A row that grows beyond its table takes blocks from the pool; `PoolFull` (a ValueError) says that there is
    none, and nothing is stored. `free` gives all blocks back.
    """

    def __init__(
        self,
        spec,
        *,
        batch=1,
        max_tokens,
        dtype=torch.float32,
        device="cpu",
        block_size=16,
        num_blocks=None,
        storage: PagedStorage | None = None,
        sequences: Sequence[PagedSequence | BlockTable] | None = None,
    ):
        super().__init__(spec, batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        if storage is None:
            need = batch * blocks_needed(max_tokens, block_size)
            storage = PagedStorage(
                spec, num_blocks=num_blocks or need, block_size=block_size, dtype=dtype, device=device
            )
        elif storage.spec != spec or storage.dtype != dtype:
            have, need = (f"{s.name} in {d}" for s, d in ((storage.spec, storage.dtype), (spec, dtype)))
            raise ValueError(f"storage holds {have}; need {need}")
        if sequences is not None and len(sequences) != batch:
            raise ValueError(f"sequences has {len(sequences)} entries; need batch={batch}")
        self.storage, self.block_size = storage, storage.block_size
        pool = storage.manager.pool
        self._tables = list(sequences) if sequences is not None else [BlockTable(pool) for _ in range(batch)]
        held = [s.shared if isinstance(s, PagedSequence) else s.length for s in self._tables]
        self._rows = [list(held) for _ in range(spec.layers)]
        self._ids: Tensor | None = None  # the block table as a tensor, until a table changes
        self._run: int | None = None

    def append(self, layer, k, v, *, lengths=None):
        self._check("k", k, (self.batch, self.spec.kv_heads, -1, self.spec.head_dim))
        if v is None:
            raise ValueError("v is None; this cache stores values beside its keys")
        self._check("v", v, (self.batch, self.spec.kv_heads, k.shape[2], self.spec.v_head_dim))
        before, new = self._plan(layer, k.shape[2], lengths)
        self._reserve([b + n for b, n in zip(before, new)])
        for row, (b, n) in enumerate(zip(before, new)):
            if n:
                self.storage.write(layer, self._slots(row, b, n), k[row, :, :n], v[row, :, :n])
        self._commit(layer, before, new)

    def _slots(self, row: int, start: int, n: int) -> Tensor | slice:
        """Where tokens start .. start + n - 1 of a row lie; one token as a slice, which is written faster."""
        slots = _table(self._tables[row]).slots(start, start + n)
        return slice(slots[0], slots[0] + 1) if n == 1 else torch.tensor(slots, device=self.device)

    def _reserve(self, lengths: list[int]) -> None:
        """Blocks for every row, or for none. The first layer of a step reserves for all layers."""
        short = [(t, n - _table(t).length) for t, n in zip(self._tables, lengths) if n > _table(t).length]
        if not short:
            return
        if any(isinstance(t, PagedSequence) for t, _ in short):
            raise ValueError(
                "sequences: a row outgrew its sequence; tell the manager first, by manager.append"
            )
        done: list[tuple[BlockTable, int]] = []
        try:
            for table, more in short:
                length = table.length
                self.storage.copy(table.append(more))
                done.append((table, length))
        except ValueError:
            for table, length in done:
                table.crop(length)
            raise
        self._ids = None

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        self._check("q", q, (self.batch, self.spec.heads, -1, self.spec.head_dim))
        k, v = self._gathered(layer)
        return attend(
            q,
            k,
            v,
            starts=self._starts(layer, q.shape[2]),
            stops=self._rows[layer],
            window=self._window(layer),
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            return_lse=return_lse,
        )

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """All stored keys and values in order, (B, Hkv, n, D) each; for rows of one length."""
        rows = self._rows[self._layer(layer)]
        if len(set(rows)) > 1:
            raise ValueError(f"rows have lengths {rows}; read needs rows of one length")
        return self._gathered(layer)

    def _gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        rows = self._rows[layer]
        n = max(rows)
        table = self.block_table()
        stores = self.storage.k[layer], self.storage.v[layer]
        if self._run is not None and self.batch == 1:
            return tuple(s[:, self._run :].flatten(1, 2)[None, :, :n] for s in stores)  # views
        k, v = (gather(s, table, n) for s in stores)
        if len(set(rows)) > 1:  # slots behind a shorter row hold whatever their block held before
            stop = torch.tensor(rows, device=self.device)[:, None]
            unused = (torch.arange(n, device=self.device) >= stop)[:, None, :, None]
            k, v = k.masked_fill(unused, 0), v.masked_fill(unused, 0)
        return k, v

    def block_table(self, width: int | None = None, fill: int = -1) -> Tensor:
        """int32 (B, width): the rows' blocks, padded with `fill`. width: None for the longest row's."""
        if self._ids is None or width is not None or fill != -1:
            tables = [_table(t) for t in self._tables]
            wide = max(1, *(len(t.ids) for t in tables)) if width is None else width
            ids = [t.padded(wide, fill) for t in tables]
            made = torch.tensor(ids, dtype=torch.int32, device=self.device)
            if width is not None or fill != -1:
                return made
            self._ids, self._run = made, run_of(tables[0].ids)
        return self._ids

    def crop(self, n):
        super().crop(n)
        for row, table in enumerate(self._tables):
            if isinstance(table, PagedSequence):
                self.storage.manager.crop(table, self._rows[0][row])
            else:
                table.crop(self._rows[0][row])
        self._ids = None

    def fork(self) -> "PagedCache":
        """A second cache over the same blocks; whoever writes into a shared block first gets a copy of it."""
        manager = self.storage.manager
        twins = [manager.fork(t) if isinstance(t, PagedSequence) else t.fork() for t in self._tables]
        twin = PagedCache(
            self.spec,
            batch=self.batch,
            max_tokens=self.max_tokens,
            dtype=self.dtype,
            device=self.device,
            storage=self.storage,
            sequences=twins,
        )
        twin._rows = [list(rows) for rows in self._rows]
        return twin

    def free(self) -> None:
        """Give every block back; the cache is empty and cannot be used again."""
        for table in self._tables:
            if isinstance(table, PagedSequence):
                self.storage.manager.free(table)
            else:
                table.free()
        self._rows = [[0] * self.batch for _ in range(self.spec.layers)]
        self._ids = None

    @property
    def nbytes(self):
        """Bytes of the storage, which other caches may share."""
        return self.storage.nbytes

    @property
    def nbytes_used(self):
        """Bytes of this cache's tokens, shared ones included."""
        per_slot = self.storage.nbytes // (self.storage.num_blocks * self.block_size * self.spec.layers)
        return per_slot * sum(map(sum, self._rows))

    def _drop(self, layer, row, start, stop):
        pass  # the table forgets them; slots that no row counts are never read


def _table(entry: PagedSequence | BlockTable) -> BlockTable:
    return entry.table if isinstance(entry, PagedSequence) else entry
