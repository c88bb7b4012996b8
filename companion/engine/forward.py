"""The model's part of a step: logits for every request that needs them, and the tokens chosen from them.

A fault belongs to somebody. What goes wrong for one request comes back in its place, as an exception, and the
others get their results.

All tokens of a step are one batch without padding: padded to the longest row, decodes would compute a chunk's
width each. Every token is a row of its own, at its own position: norms and products, which treat tokens
alike, see one matrix of as many rows as there are tokens and read each weight once. Only attention has to
know which tokens belong together:

    decodes   one batch: each row's blocks are gathered side by side, and one masked product serves all;
              where `companion.kernels.use` allows, a kernel reads them where they lie instead
    chunks    each over its own row, by the usual causal attention
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attend import backend, one_pass
from ..attend.step import PackedRows, Workspace
from ..caches.base import Room
from ..caches.paged import PagedStorage
from ..checks import require, whole
from ..generate import greedy
from ..generate.sampling import check_logits
from ..model import Decoder
from ..paging import BlockTable
from ..serving.records import Chunk

Sample = Callable[[Any], Any]  # logits (B, V) -> ids (B,)


@torch.inference_mode()
def compute(
    model: Decoder, storage: PagedStorage, chunks: Sequence[Chunk], workspace: Workspace
) -> list[Tensor | Exception | None]:
    """Logits (V,) of each chunk that samples, None of the others, or what went wrong with it.

    One pass over the tokens of all chunks. If the model raises, each chunk is computed again alone, so that
    only those fail that fail by themselves; their slots are the same, so nothing is written twice.
    """
    try:
        ids = torch.tensor([[t] for c in chunks for t in c.job.tokens[c.start : c.stop]], device=model.device)
        spans = [Span(c.job.seq.table, c.start, c.stop) for c in chunks]
        x = model.embed(ids)
        with one_pass(x):
            x = model.through(x, PackedStep(storage, spans, workspace))[:, 0]  # (T, d)
            ends = torch.tensor([c.count for c in chunks]).cumsum(0) - 1
            asked = [i for i, c in enumerate(chunks) if c.samples]
            logits = model.head(x[ends[asked].to(x.device)]) if asked else ()
    except Exception as error:
        if len(chunks) == 1:
            return [error]
        return [result for c in chunks for result in compute(model, storage, [c], workspace)]
    results: list[Tensor | Exception | None] = [None] * len(chunks)
    for i, row in zip(asked, logits):
        results[i] = row
    bad = ~torch.isfinite(x.sum(dim=-1, dtype=torch.float64))
    if bad.any():  # before anybody can find it in the prefix cache
        for i, part in enumerate(bad.split([c.count for c in chunks])):
            if part.any():
                results[i] = ValueError("the model's residual stream holds NaN or infinity")
    return results


@torch.inference_mode()
def choose(rows: Sequence[tuple[Sample, Tensor | Exception]]) -> list[tuple[int | Exception, float]]:
    """(token, logprob) from each (sampler, logits (V,)), or (what went wrong, 0): greedy ones together."""
    said: list[int | Exception | None] = []
    for sampler, row in rows:
        try:
            said.append(row if isinstance(row, Exception) else _own_choice(sampler, row))
        except Exception as error:
            said.append(error)
    good = [i for i, id in enumerate(said) if not isinstance(id, Exception)]
    out: list[tuple[int | Exception, float]] = [(id, 0.0) for id in said]
    if good:
        logits = torch.stack([rows[i][1] for i in good])
        ids = [best if said[i] is None else said[i] for i, best in zip(good, greedy(logits).tolist())]
        picked = logits.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0]
        for i, id, logprob in zip(good, ids, (picked - logits.logsumexp(dim=-1)).tolist()):
            out[i] = (id, logprob)
    return out


def _own_choice(sampler: Sample, row: Tensor) -> int | None:
    """The id that a request's own sampler chooses from its logits (V,); None for greedy, done for all."""
    check_logits(row[None])
    if sampler is greedy:
        return None
    return whole("sampler's choice", int(sampler(row[None])[0]), 0, len(row) - 1)


@dataclass(frozen=True)
class Span:
    """Tokens start .. stop - 1 of the sequence behind a table; everything before them is stored already."""

    table: BlockTable
    start: int
    stop: int


class PackedStep:
    """A step over the pages of a storage: T rows of one token each, those of the spans, one after another.

    A model's layers append to it and attend to it as to a cache (`companion.caches.Attendable`). Spans of one
    token should come first; they attend as one batch. The tables have their slots already, and blocks that
    they share with others are full, so nothing is copied here.
    """

    def __init__(self, storage: PagedStorage, spans: Sequence[Span], workspace: Workspace | None = None):
        self.storage, workspace = storage, workspace or Workspace()
        self.spec, self.dtype, self.device = storage.spec, storage.dtype, storage.device
        self._positions = [p for s in spans for p in range(s.start, s.stop)]
        self.batch = len(self._positions)
        slots = [x for s in spans for x in s.table.slots(s.start, s.stop)]
        self._slots = torch.tensor(slots, device=self.device)
        tails = [x for s in spans for x in _tail(s, storage.block_size)]
        self._tails = torch.tensor(tails, device=self.device) if tails else None
        self._ones = next((i for i, s in enumerate(spans) if s.stop - s.start > 1), len(spans))
        self._decodes = _rows(storage, spans[: self._ones], workspace) if self._ones else None
        self._chunks = [_rows(storage, [span], workspace) for span in spans[self._ones :]]

    def row_lengths(self, layer: int = 0) -> list[int]:
        """Tokens before each row's own: its position."""
        return list(self._positions)

    def room(self) -> Room | None:
        """As of a cache; None where a span has more than one token."""
        if self._chunks:
            return None
        store = self.storage
        if self._tails is not None:
            for layer in (*store.k, *store.v):
                layer.flatten(1, 2).index_fill_(1, self._tails, 0)
        return Room(store.k, store.v, store.pages(0), self._decodes.table, self._positions)

    def filled(self) -> None:
        """Nothing to do: the engine counts."""

    def append(self, layer: int, k: Tensor, v: Tensor, *, lengths: None = None) -> None:
        """Write every token into its own slot: k (T, Hkv, 1, D), v (T, Hkv, 1, Dv)."""
        for name, x, width in (("k", k, self.spec.head_dim), ("v", v, self.spec.v_head_dim)):
            shape = (self.batch, self.spec.kv_heads, 1, width)
            if tuple(x.shape) != shape or x.dtype != self.dtype:
                got = tuple(x.shape)
                raise ValueError(f"{name} must be {shape} in {self.dtype}, got {got} in {x.dtype}")
        stores = self.storage.k[layer], self.storage.v[layer]
        backend(k).append_packed(k, v, *stores, self._slots, self._tails)

    def attend(
        self, layer: int, q: Tensor, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False
    ) -> Tensor:
        """q (T, Hq, 1, D) -> (T, Hq, 1, Dv)."""
        require(not return_lse, "return_lse", "False in a step of an engine", return_lse)
        options = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, return_lse=False)
        options["window"] = self.spec.window if self.spec.layer_types[layer] == "sliding" else None
        stores, by, at, out = (self.storage.k[layer], self.storage.v[layer]), backend(q), self._ones, []
        if self._decodes is not None:
            out.append(by.decode(q[:at], *stores, self._decodes, **options))
        for rows in self._chunks:
            end = at + rows.counts[0]
            own = q[at:end, :, 0].transpose(0, 1)[None]  # (1, Hq, count, D)
            own = by.attend(own, *stores, rows, **options)
            out.append(own[0].transpose(0, 1)[:, :, None])
            at = end
        return torch.cat(out) if len(out) > 1 else out[0]


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


def _rows(storage: PagedStorage, spans: Sequence[Span], workspace: Workspace) -> PackedRows:
    """Where the keys of some rows lie, and how to lay them side by side."""
    starts, stops = [s.start for s in spans], [s.stop for s in spans]
    size = storage.block_size
    tables = [s.table.ids[: -(-s.stop // size)] for s in spans]
    columns = max(map(len, tables))
    # Padded with the row's own first block: finite where the row is, and never another's.
    padded = [t + t[:1] * (columns - len(t)) for t in tables]
    table, first = torch.tensor(padded, dtype=torch.int32, device=storage.device), None
    if len(spans) == 1 and tables[0] == list(range(tables[0][0], tables[0][0] + len(tables[0]))):
        first = tables[0][0]  # neighbours: a view will do
    pages = dict(table=table, first=first, workspace=workspace)
    shape = dict(heads=storage.spec.kv_heads, num_blocks=storage.num_blocks)
    return PackedRows(starts, stops, storage.device, **shape, **pages)
