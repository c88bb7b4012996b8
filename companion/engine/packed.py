"""All tokens of a step in one batch without padding: decodes and chunks of prompts through one pass.

A batch padded to its longest row would compute a chunk's width for every decode. Here every token is a row of
its own, at its own position: norms and products, which treat tokens alike, see one matrix of as many rows as
there are tokens and read each weight once. Only attention has to know which tokens belong together:

    decodes   one batch: each row's blocks are gathered side by side, and one masked product serves all;
              where `companion.kernels.use` allows, a kernel reads them where they lie instead
    chunks    each over its own row, by the usual causal attention
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..caches.attend import attend, is_plain, visible_slots
from ..caches.base import Cache, Room
from ..caches.dispatch import decode, write
from ..caches.paged import PagedStorage
from ..paging import BlockTable


@dataclass(frozen=True)
class Span:
    """Tokens start .. stop - 1 of the sequence behind a table; everything before them is stored already."""

    table: BlockTable
    start: int
    stop: int


class Workspace:
    """Memory that is kept from step to step: fresh pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor, n: int) -> Tensor:
        """Flat memory of at least n elements of the kind of `like`."""
        flat = self._flat.get(name)
        if flat is None or len(flat) < n:
            with torch.inference_mode(False):  # or it could not be written outside that mode
                flat = self._flat[name] = like.new_empty(n + n // 2)
        return flat


class PackedStep(Cache):
    """The cache's door for one step: T rows of one token each, those of the spans, one span after another.

    Spans of one token should come first; they attend as one batch. The tables have their slots already, and
    blocks that they share with others are full, so nothing is copied here.
    """

    def __init__(self, storage: PagedStorage, spans: Sequence[Span], workspace: Workspace | None = None):
        positions = [p for s in spans for p in range(s.start, s.stop)]
        super().__init__(
            storage.spec,
            batch=len(positions),
            max_tokens=max(positions) + 1,
            dtype=storage.dtype,
            device=storage.device,
        )
        self.storage, self.workspace = storage, workspace or Workspace()
        self._positions = positions
        slots = [x for s in spans for x in s.table.slots(s.start, s.stop)]
        self._slots = torch.tensor(slots, device=self.device)
        tails = [x for s in spans for x in _tail(s, storage.block_size)]
        self._tails = torch.tensor(tails, device=self.device) if tails else None
        ones = next((i for i, s in enumerate(spans) if s.stop - s.start > 1), len(spans))
        self._decodes = _Decodes(storage, spans[:ones]) if ones else None
        self._chunks, at = [], ones
        for span in spans[ones:]:
            self._chunks.append(_Chunk(storage, span, at))
            at = self._chunks[-1].end

    def row_lengths(self, layer: int = 0) -> list[int]:
        """Tokens before each row's own: its position."""
        return list(self._positions)

    def room(self):
        if self._chunks:
            return None
        store = self.storage
        if self._tails is not None:
            for layer in (*store.k, *store.v):
                layer.flatten(1, 2).index_fill_(1, self._tails, 0)
        return Room(store.k, store.v, store.pages(0), self._decodes.table, self._positions)

    def append(self, layer, k, v, *, lengths=None):
        self._check_kv(k, v)
        if write(k, v, *self.storage.pages(layer), slots=self._slots[:, None]):
            return
        for store, x in ((self.storage.k[layer], k), (self.storage.v[layer], v)):
            flat = store.flatten(1, 2)
            flat.index_copy_(1, self._slots, x[:, :, 0].transpose(0, 1))
            if self._tails is not None:
                flat.index_fill_(1, self._tails, 0)

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        if return_lse:
            raise ValueError("return_lse: a step of an engine returns none")
        options = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, return_lse=False)
        window = self._window(layer)
        out = [c.attend(self, layer, q[c.at : c.end], window, options) for c in self._chunks]
        if self._decodes:
            out.insert(0, self._decodes.attend(self, layer, q[: len(self._decodes.spans)], window, options))
        return torch.cat(out) if len(out) > 1 else out[0]

    @property
    def nbytes(self):
        return self.storage.nbytes

    @property
    def nbytes_used(self):
        return self.storage.nbytes

    def filled(self):
        pass  # the engine counts

    def _drop(self, layer, row, start, stop):
        raise ValueError("a step of an engine cannot be cropped")


def _tail(span: Span, size: int) -> list[int]:
    """Slots behind a span in a block that it is the first to write.

    They hold whatever the block held before, perhaps a NaN, and a row that is gathered in whole blocks reads
    them with weight 0: once made 0 they are harmless until they are written.
    """
    begun = (span.stop - 1) // size  # the last block's number in the row
    if span.stop % size == 0 or span.start > begun * size:
        return []
    first = span.table.ids[begun] * size
    return list(range(first + span.stop % size, first + size))


class _Rows:
    """Where the keys of some rows lie, and how to lay them side by side: made once for all layers."""

    def __init__(self, storage: PagedStorage, spans: Sequence[Span]):
        self.spans, self.size, self.device = spans, storage.block_size, storage.device
        self.starts, self.stops = [s.start for s in spans], [s.stop for s in spans]
        self.n = max(self.stops)
        self.columns = -(-self.n // self.size)
        tables = [s.table.ids[: -(-s.stop // self.size)] for s in spans]
        # Padded with the row's own first block: finite where the row is, and never another's.
        padded = [t + t[:1] * (self.columns - len(t)) for t in tables]
        self.table = torch.tensor(padded, dtype=torch.int32, device=self.device)
        self.first = None
        if len(spans) == 1 and tables[0] == list(range(tables[0][0], tables[0][0] + len(tables[0]))):
            self.first = tables[0][0]  # neighbours: a view will do
            return
        heads = torch.arange(storage.spec.kv_heads, device=self.device) * storage.num_blocks
        # Rows of the storage seen as (Hkv * blocks, ...).
        self.blocks = (heads[:, None] + self.table.flatten()).flatten()

    def read(self, step: "PackedStep", layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (Hkv, B, n, D): position j in slot j, and something finite behind a row's end."""
        stores = step.storage.k[layer], step.storage.v[layer]
        if self.first is not None:
            k, v = (s[:, self.first :].flatten(1, 2)[:, None, : self.n] for s in stores)
        else:
            k, v = (self._gather(s, step.workspace, name) for name, s in zip("kv", stores))
        return k, v

    def _gather(self, store: Tensor, workspace: Workspace, name: str) -> Tensor:
        heads, blocks, size, width = store.shape
        flat = workspace.take(name, store, len(self.blocks) * size * width)
        out = flat[: len(self.blocks) * size * width].view(-1, size * width)
        # Whole blocks along the first axis: copied by all threads, twice as fast as along the second.
        torch.index_select(store.view(heads * blocks, size * width), 0, self.blocks, out=out)
        return out.view(heads, len(self.spans), self.columns * size, width)[:, :, : self.n]


class _Decodes(_Rows):
    """Rows of one query each, over contexts of different lengths."""

    def __init__(self, storage: PagedStorage, spans: Sequence[Span]):
        super().__init__(storage, spans)
        self._unseen: dict[int | None, Tensor | None] = {}

    def unseen(self, window: int | None) -> Tensor | None:
        """(B, 1, n): slots that a row must not see; None if there is no such slot."""
        if window not in self._unseen:
            seen = visible_slots(self.starts, self.stops, 1, self.n, window, self.device)
            self._unseen[window] = None if seen.all() else ~seen
        return self._unseen[window]

    def attend(self, step: "PackedStep", layer: int, q: Tensor, window: int | None, options: dict) -> Tensor:
        """q (B, Hq, 1, D) -> (B, Hq, 1, Dv)."""
        rows = dict(starts=self.starts, stops=self.stops, window=window)
        found = decode(q, *step.storage.pages(layer), table=self.table, **rows, **options)
        if found is not None:
            return found
        k, v = self.read(step, layer)
        B, Hq, _, D = q.shape
        if not is_plain(q, **options):
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            return attend(q, k, v, **rows, **options)
        Hkv, group = len(k), Hq // len(k)
        scale = D**-0.5 if options["softmax_scale"] is None else options["softmax_scale"]
        queries = (q * scale).view(B, Hkv, group, D).transpose(0, 1).reshape(Hkv * B, group, D)
        scores = torch.bmm(queries, k.flatten(0, 1).transpose(1, 2))
        unseen = self.unseen(window)
        if unseen is not None:
            scores.view(Hkv, B, group, self.n).masked_fill_(unseen, -math.inf)
        out = torch.bmm(torch.softmax(scores, dim=-1), v.flatten(0, 1))
        return out.view(Hkv, B, group, -1).transpose(0, 1).reshape(B, Hq, 1, -1)


class _Chunk(_Rows):
    """Consecutive tokens of one sequence."""

    def __init__(self, storage: PagedStorage, span: Span, at: int):
        super().__init__(storage, [span])
        self.at, self.end = at, at + span.stop - span.start

    def attend(self, step: "PackedStep", layer: int, q: Tensor, window: int | None, options: dict) -> Tensor:
        """q (count, Hq, 1, D) -> (count, Hq, 1, Dv)."""
        k, v = self.read(step, layer)
        k, v, q = k.transpose(0, 1), v.transpose(0, 1), q[:, :, 0].transpose(0, 1)[None]
        out = attend(q, k, v, starts=self.starts, stops=self.stops, window=window, **options)
        return out[0].transpose(0, 1)[:, :, None]
