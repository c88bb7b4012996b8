"""Keys and values in few bits, with the newest tokens in full precision.

Tokens enter a full-precision tail. When the tail holds a whole group beyond `residual` tokens, its oldest
group is quantized, once, and never touched again: appending costs the same however long the text is.
Attention goes over the quantized part tile by tile, so no layer is ever dequantized whole, and is merged with
the tail by LSE. The tokens of the step itself are attended in full precision: they are at hand.

Source: Liu et al. 2024, "KIVI" (keys grouped along tokens, values along channels, a residual window).

With pages, a block is quantized once, when it is full, and may then be shared like any other. Until then its
tokens lie in the row's own tail, in full precision, so no page is ever read back to be quantized again. A
block is as long as the codec's groups along tokens, or a multiple.
"""

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..attend import Step, backend
from ..attend.by_torch import seen_keys
from ..attention import merge_partials, sdpa
from ..checks import require, whole
from ..paging import BlockManager, blocks_needed
from ..quantize import Codec, codec
from ..quantize.codec import LIMIT
from .base import Cache, refuse_latent
from .packed import PagedPacked, TailedLayer
from .tables import RowTables

Choice = str | Codec | tuple[Codec, Codec]

PRESETS = {  # keys per channel, values per token, as in KIVI
    f"kivi{bits}": (codec(f"int{bits}", group=32, group_dim=-2), codec(f"int{bits}", group=32))
    for bits in (4, 2)
}


class QuantizedCache(Cache):
    """codec: a name, a `Codec`, a pair (keys, values), "kivi4", "kivi2", or a list with one per layer.

    The step's own keys and values are at hand in full precision until another layer is written to; after
    that, a second `attend` to this layer reads what is stored.
    residual: tokens that stay in full precision at the end of each row, at least. A `crop` that reaches into
    the quantized part must end on a whole group; with groups along channels any token is one.
    """

    def __init__(
        self, spec, *, batch=1, max_tokens, dtype=torch.float32, device="cpu", codec="int8", residual=0
    ):
        super().__init__(spec, batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        refuse_latent(spec)
        self.residual = whole("residual", residual, 0)
        chosen = codec if isinstance(codec, list) else [codec] * spec.layers
        require(len(chosen) == spec.layers, "codec", f"a list of {spec.layers}, one a layer", codec)
        self.codecs = [_pair(c) for c in chosen]
        self._layers = [
            TailedLayer(pair, residual, batch, spec, max_tokens, dtype, self.device, **self._packing())
            for pair in self.codecs
        ]
        self._step: list[tuple[Tensor, Tensor, list[int]] | None] = [None] * spec.layers

    @property
    def unit(self) -> int:
        """Tokens that are quantized together, and that a crop of the quantized part takes together."""
        return max(layer.unit for layer in self._layers)

    def _packing(self) -> dict:
        """Where a layer's quantized tokens lie: options of `TailedLayer`."""
        return {}

    def append(self, layer, k, v, *, lengths=None):
        self._check_kv(k, v)
        before, new = self._plan(layer, k.shape[2], lengths)
        for b, n in zip(range(self.batch), new):
            for name, x in (("k", k[b, :, :n]), ("v", v[b, :, :n])):
                if n and not x.abs().amax() <= LIMIT:  # NaN compares False
                    raise ValueError(f"{name} holds NaN, infinity or a number beyond 8.5e37; it has no scale")
        self._reserve([b + n for b, n in zip(before, new)])
        self._layers[layer].write(k, v, before, new)
        # Of one layer at a time: a prompt's keys in full precision would be most of what this cache saves.
        self._step = [None] * self.spec.layers
        self._step[layer] = (k, v, list(before))
        self._commit(layer, before, new)

    def _reserve(self, lengths: list[int]) -> None:
        """Make sure of room for rows of these lengths; here there always is."""

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        self._check("q", q, (self.batch, self.spec.heads, "S", self.spec.head_dim))
        store, rows, S = self._layers[layer], self._rows[layer], q.shape[2]
        step = self._step[layer] if self._fresh[layer] is not None else None
        stops = rows if step is None else step[2]  # from here on, the step's own tokens
        window, starts = self._window(layer), self._starts(layer, S)
        options = dict(softmax_scale=softmax_scale, softcap=softcap)
        old = Step(starts, [min(a, b) for a, b in zip(store.quantized, stops)], self.device)
        parts = backend(q).over_codes(q, store, old, window=window, **options)
        k, v, held = store.recent(rows, step, self.device)
        options |= dict(key_mask=seen_keys(held, old.at(S), window), return_lse=True)
        parts.append(sdpa(q, k, v, **options))
        out, lse = merge_partials(*zip(*parts), sinks=sinks)
        return (out, lse) if return_lse else out

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """All stored keys and values, dequantized: (B, Hkv, n, D) each; for rows of one length."""
        n, store = self._one_length(layer), self._layers[layer]
        done = store.quantized  # rows of one length may differ in this, after a crop
        packed = [x.to(self.dtype) for x in store.tile(0, max(done))]
        k, v = (
            torch.stack([torch.cat([x[b, :, :q], tail[b, :, : n - q]], dim=1) for b, q in enumerate(done)])
            for x, tail in zip(packed, (store.tail_k, store.tail_v))
        )
        return k, v

    def _check_crop(self, keep):
        for store, rows in zip(self._layers, self._rows):
            for row, (n, have) in enumerate(zip(keep, rows)):
                if n < min(have, store.quantized[row]) and n % store.unit:
                    raise ValueError(
                        f"n={n}: row {row} is quantized up to token {store.quantized[row]} in groups of "
                        f"{store.unit} tokens; crop to a multiple of that, or keep a larger residual"
                    )

    @property
    def nbytes(self):
        return sum(store.nbytes for store in self._layers)

    @property
    def nbytes_used(self):
        return sum(store.used(rows) for store, rows in zip(self._layers, self._rows))

    def _drop(self, layer, row, start, stop):
        self._layers[layer].drop(row, start, stop)


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
        shape = dict(batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        super().__init__(spec, codec=codec, residual=residual, **shape)
        unit = max(layer.unit for layer in self._layers)
        fits = all(layer.unit == block_size for layer in self._layers)
        require(fits, "block_size", f"a multiple of {unit} tokens, the codec's group", block_size)

    def _packing(self):
        pool, blocks = self.manager.pool, partial(_blocks, self)
        make = partial(PagedPacked, num_blocks=pool.num_blocks, blocks=blocks)
        return dict(unit=self.block_size, make=make)

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


def _pair(choice: Choice | Sequence) -> tuple[Codec, Codec]:
    if isinstance(choice, str):
        choice = PRESETS[choice] if choice in PRESETS else codec(choice)
    if isinstance(choice, Codec):
        choice = choice, choice
    parts = choice if isinstance(choice, Sequence) else ()
    pair = tuple(codec(c) if isinstance(c, str) else c for c in parts)
    fits = len(pair) == 2 and all(isinstance(c, Codec) for c in pair)
    require(fits, "codec", "a name, a Codec, or a pair of them for keys and values", choice)
    for c in pair:  # a cache that grows cannot look ahead for the scale of all
        fixed = c.name != "nvfp4" or c.fixed is not None
        require(fixed, "codec", "nvfp4 with a tensor_scale in a cache", c)
    return pair
