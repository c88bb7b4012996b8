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

from ..attend import Step, backend
from ..attend.step import Workspace
from ..checks import require
from ..cost import ModelSpec
from ..paging import BlockManager, PagedSequence, blocks_needed
from .base import Cache, Room, refuse_latent
from .tables import Entry, RowTables


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
        prefix: bool = True,
    ):
        refuse_latent(spec)
        self.manager = BlockManager(num_blocks, block_size, prefix=prefix)
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

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values in the kernels' layout."""
        return self.k_cache(layer), self.v_cache(layer)

    def k_cache(self, layer: int) -> Tensor:
        """(num_blocks, block_size, Hkv, D), a view."""
        return self.k[layer].permute(1, 2, 0, 3)

    def v_cache(self, layer: int) -> Tensor:
        """(num_blocks, block_size, Hkv, Dv), a view."""
        return self.v[layer].permute(1, 2, 0, 3)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))


class PagedCache(Cache):
    """Rows over a `PagedStorage`. Without `storage` it gets one of its own, of num_blocks blocks.

    sequences: one entry per row, a `PagedSequence` or `BlockTable` of the storage's manager that this row
    continues; a sequence's `shared` tokens count as stored already. None starts every row empty.
    A row that grows beyond its table takes blocks from the pool; `PoolFull` (a ValueError) says that there is
    none, and nothing is stored. `free` gives all blocks back. Rows that are plain tables are unknown to the
    storage's manager: check their pool, `storage.manager.pool.check()`, not the manager.
    """

    def __init__(
        self,
        spec,
        *,
        batch=1,
        max_tokens,
        dtype=torch.float32,
        device="cpu",
        block_size=None,
        num_blocks=None,
        storage: PagedStorage | None = None,
        sequences: Sequence[Entry] | None = None,
    ):
        super().__init__(spec, batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        if storage is None:
            block_size = 16 if block_size is None else block_size
            need = batch * blocks_needed(max_tokens, block_size)
            storage = PagedStorage(
                spec,
                num_blocks=need if num_blocks is None else num_blocks,
                block_size=block_size,
                dtype=dtype,
                device=device,
            )
        elif storage.spec != spec or storage.dtype != dtype:
            have, need = (f"{s.name} in {d}" for s, d in ((storage.spec, storage.dtype), (spec, dtype)))
            raise ValueError(f"storage must be of {need}, got {have}")
        elif block_size is not None:
            held = storage.block_size
            require(block_size == held, "block_size", f"{held}, the storage's, or None", block_size)
        if sequences is not None:
            require(len(sequences) == batch, "sequences", f"of batch={batch} entries", len(sequences))
        self.storage, self.block_size = storage, storage.block_size
        manager = storage.manager
        self._tables = (
            RowTables.new(manager, batch, self.device)
            if sequences is None
            else RowTables(manager, sequences, self.device)
        )
        self._rows = [self._tables.lengths() for _ in range(spec.layers)]
        self._work = Workspace()  # where a layer's blocks are gathered

    def append(self, layer, k, v, *, lengths=None):
        self._check_kv(k, v)
        before, new = self._plan(layer, k.shape[2], lengths)
        # The first layer of a step reserves slots for all layers, and copies what a fork still shares.
        self.storage.copy(self._tables.reserve([b + n for b, n in zip(before, new)]))
        stops = [b + n for b, n in zip(before, new)]
        step = self._step_of(before, stops)
        if step.slots is None:
            step.slots = [
                self._tables.table(row).slots(b, n) for row, (b, n) in enumerate(zip(before, stops))
            ]
        backend(k).append(k, v, self.storage.k[layer], self.storage.v[layer], step)
        self._commit(layer, before, new)

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        self._check("q", q, (self.batch, self.spec.heads, "S", self.spec.head_dim))
        return backend(q).attend(
            q,
            self.storage.k[layer],
            self.storage.v[layer],
            self._step_of(self._starts(layer, q.shape[2]), self._rows[layer]),
            window=self._window(layer),
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            return_lse=return_lse,
        )

    def _step_of(self, starts: list[int], stops: list[int]) -> Step:
        """That of the pass, with the rows' blocks; tables change elsewhere too, so they are looked at."""
        table, found = self._tables.tensor(), self._last
        if found is None or found.table is not table or found.starts != starts or found.stops != stops:
            pages = dict(table=table, first=self._tables.run(), workspace=self._work)
            found = self._last = Step(starts, stops, self.device, **pages)
        return found

    def room(self):
        if (before := self._even()) is None:
            return None
        self.storage.copy(self._tables.reserve([n + 1 for n in before]))
        store = self.storage
        return Room(store.k, store.v, store.pages(0), self._tables.tensor(), before)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """All stored keys and values in order, (B, Hkv, n, D) each; for rows of one length."""
        stops = [self._one_length(layer)] * self.batch
        step = Step(stops, stops, self.device, table=self._tables.tensor(), first=self._tables.run())
        return step.gathered(self.storage.k[layer], self.storage.v[layer])

    def announce(self, row: int, ids: Sequence[int]) -> None:
        """The tokens that the next `append` brings to a row, for a `PagedSequence`: its manager has to know
        them before they are written. Nothing happens for a plain table, or for tokens that it knows already.
        """
        entry = self._tables.entries[row]
        missing = self._rows[0][row] + len(ids) - len(entry) if isinstance(entry, PagedSequence) else 0
        if missing > 0:
            self.storage.copy(self.storage.manager.append(entry, ids[-missing:]))

    def block_table(self, width: int | None = None, fill: int = -1) -> Tensor:
        """int32 (B, width): the rows' blocks, padded with `fill`. width: None for the longest row's."""
        return self._tables.tensor(width, fill)

    def crop(self, n):
        super().crop(n)
        self._tables.crop(self._per_row(n))

    def fork(self) -> "PagedCache":
        """A second cache over the same blocks; whoever writes into a shared block first gets a copy of it."""
        twin = PagedCache(
            self.spec,
            batch=self.batch,
            max_tokens=self.max_tokens,
            dtype=self.dtype,
            device=self.device,
            storage=self.storage,
            sequences=self._tables.fork().entries,
        )
        twin._rows = [list(rows) for rows in self._rows]
        return twin

    def free(self) -> None:
        """Give every block back; the cache is empty and cannot be used again."""
        self._tables.free()
        self._rows = [[0] * self.batch for _ in range(self.spec.layers)]

    @property
    def nbytes(self):
        """Bytes of the storage, which other caches may share; without the room that gathers a layer."""
        return self.storage.nbytes

    @property
    def nbytes_used(self):
        """Bytes of this cache's tokens, shared ones included."""
        per_slot = self.storage.nbytes // (self.storage.num_blocks * self.block_size * self.spec.layers)
        return per_slot * sum(map(sum, self._rows))

    def _drop(self, layer, row, start, stop):
        pass  # the table forgets them; slots that no row counts are never read
