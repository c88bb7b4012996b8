"""Keys and values in few bits, with the newest tokens in full precision.

Tokens enter a full-precision tail. When the tail holds a whole group beyond `residual` tokens, its oldest
group is quantized, once, and never touched again: appending costs the same however long the text is.
Attention goes over the quantized part tile by tile, so no layer is ever dequantized whole, and is merged with
the tail by LSE. The tokens of the step itself are attended in full precision: they are at hand.

Source: Liu et al. 2024, "KIVI" (keys grouped along tokens, values along channels, a residual window).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import merge_partials, sdpa
from ..quantize import Codec, QuantizedTensor, codec
from .base import Cache

TILE = 1024  # quantized tokens that are dequantized at a time
Choice = str | Codec | tuple[Codec, Codec]

PRESETS = {  # keys per channel, values per token, as in KIVI
    f"kivi{bits}": (codec(f"int{bits}", group=32, group_dim=-2), codec(f"int{bits}", group=32))
    for bits in (4, 2)
}


class QuantizedCache(Cache):
    """codec: a name, a `Codec`, a pair (keys, values), "kivi4", "kivi2", or a list with one per layer.

    residual: tokens that stay in full precision at the end of each row, at least. A `crop` that reaches into
    the quantized part must end on a whole group; with groups along channels any token is one.
    """

    def __init__(
        self, spec, *, batch=1, max_tokens, dtype=torch.float32, device="cpu", codec="int8", residual=0
    ):
        super().__init__(spec, batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        if spec.mla is not None:
            raise ValueError(f"{spec.name} caches a latent vector, not keys and values; use kind='latent'")
        if isinstance(residual, bool) or not isinstance(residual, int) or residual < 0:
            raise ValueError(f"residual={residual!r}; need an integer of at least 0")
        chosen = codec if isinstance(codec, list) else [codec] * spec.layers
        if len(chosen) != spec.layers:
            raise ValueError(f"codec has {len(chosen)} entries; {spec.name} has {spec.layers} layers")
        self.codecs = [_pair(c) for c in chosen]
        self.residual = residual
        self._layers = [
            _Layer(k, v, residual, batch, spec, max_tokens, dtype, torch.device(device))
            for k, v in self.codecs
        ]
        self._step: list[tuple[Tensor, Tensor, list[int]] | None] = [None] * spec.layers

    def append(self, layer, k, v, *, lengths=None):
        self._check("k", k, (self.batch, self.spec.kv_heads, -1, self.spec.head_dim))
        if v is None:
            raise ValueError("v is None; this cache stores values beside its keys")
        self._check("v", v, (self.batch, self.spec.kv_heads, k.shape[2], self.spec.v_head_dim))
        before, new = self._plan(layer, k.shape[2], lengths)
        for b, n in zip(range(self.batch), new):
            if not (torch.isfinite(k[b, :, :n]).all() and torch.isfinite(v[b, :, :n]).all()):
                raise ValueError("k or v holds NaN or infinity; a scale cannot be found for it")
        self._layers[layer].write(k, v, before, new)
        self._step[layer] = (k, v, list(before))
        self._commit(layer, before, new)

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        self._check("q", q, (self.batch, self.spec.heads, -1, self.spec.head_dim))
        store, rows, S = self._layers[layer], self._rows[layer], q.shape[2]
        at = torch.tensor(self._starts(layer, S), device=self.device)[:, None] + torch.arange(
            S, device=self.device
        )
        step = self._step[layer] if self._fresh[layer] is not None else None
        stops = rows if step is None else step[2]  # from here on, the step's own tokens
        window = self._window(layer)
        options = dict(softmax_scale=softmax_scale, softcap=softcap, return_lse=True)
        parts = []
        deep = min(max(min(a, b) for a, b in zip(store.quantized, stops)), max(rows))
        first = 0 if window is None else max(0, int(at.min()) - window + 1) // TILE * TILE
        for a in range(first, deep, TILE):
            b = min(a + TILE, deep)
            k, v = store.tile(a, b)
            held = torch.arange(a, b, device=self.device).expand(self.batch, -1)
            limit = torch.tensor([min(x, y) for x, y in zip(store.quantized, stops)], device=self.device)
            held = torch.where(held < limit[:, None], held, -1)
            parts.append(sdpa(q, k.to(q.dtype), v.to(q.dtype), key_mask=_seen(held, at, window), **options))
        k, v, held = store.recent(rows, step, self.device)
        parts.append(sdpa(q, k, v, key_mask=_seen(held, at, window), **options))
        outs, lses = zip(*parts)
        out, lse = merge_partials(outs, lses, sinks=sinks)
        return (out, lse) if return_lse else out

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """All stored keys and values, dequantized: (B, Hkv, n, D) each; for rows of one length."""
        rows, store = self._rows[self._layer(layer)], self._layers[layer]
        if len(set(rows)) > 1:
            raise ValueError(f"rows have lengths {rows}; read needs rows of one length")
        k, v = store.tile(0, store.quantized[0])
        m = rows[0] - store.quantized[0]
        tail = store.tail_k[:, :, :m], store.tail_v[:, :, :m]
        return torch.cat([k.to(self.dtype), tail[0]], 2), torch.cat([v.to(self.dtype), tail[1]], 2)

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


class _Layer:
    """One layer's store: packed groups for the old tokens, a tail in full precision for the new ones."""

    def __init__(self, k_codec, v_codec, residual, batch, spec, max_tokens, dtype, device):
        self.unit = math.lcm(*(c.group or max_tokens if c.group_dim == -2 else 1 for c in (k_codec, v_codec)))
        self.residual = residual
        self.capacity = max(0, max_tokens - residual) // self.unit * self.unit
        room = min(max_tokens, residual + self.unit - 1)
        shape = batch, spec.kv_heads
        self.tail_k = torch.zeros(*shape, room, spec.head_dim, dtype=dtype, device=device)
        self.tail_v = torch.zeros(*shape, room, spec.v_head_dim, dtype=dtype, device=device)
        self.k = _Packed(k_codec, shape, self.capacity, self.unit, spec.head_dim, device)
        self.v = _Packed(v_codec, shape, self.capacity, self.unit, spec.v_head_dim, device)
        self.quantized = [0] * batch  # tokens of each row that lie in the packed part

    def write(self, k: Tensor, v: Tensor, before: list[int], new: list[int]) -> None:
        even = len(set(before)) == len(set(new)) == len(set(self.quantized)) == 1
        for rows in [slice(0, len(new))] if even else [slice(b, b + 1) for b in range(len(new))]:
            self._write(rows, k[rows], v[rows], before[rows.start], new[rows.start])

    def _write(self, rows: slice, k: Tensor, v: Tensor, before: int, new: int) -> None:
        done = self.quantized[rows.start]
        waiting = before - done
        whole = max(0, waiting + new - self.residual) // self.unit * self.unit
        for tail, packed, x in ((self.tail_k, self.k, k), (self.tail_v, self.v, v)):
            if not whole:
                tail[rows, :, waiting : waiting + new] = x[:, :, :new]
                continue
            x = torch.cat([tail[rows, :, :waiting], x[:, :, :new]], dim=2)
            packed.write(rows, done, x[:, :, :whole])
            rest = x.shape[2] - whole
            tail[rows, :, :rest] = x[:, :, whole:]
            tail[rows, :, rest:] = 0
        for row in range(rows.start, rows.stop):
            self.quantized[row] = done + whole

    def tile(self, a: int, b: int) -> tuple[Tensor, Tensor]:
        """Dequantized keys and values of packed tokens a to b - 1, every row."""
        return self.k.read(a, b), self.v.read(a, b)

    def recent(self, rows, step, device) -> tuple[Tensor, Tensor, Tensor]:
        """What is in full precision: keys, values, and the position of each, -1 where a row has none."""
        done = self.quantized
        old = [
            n - q if step is None else max(0, s - q) for n, q, s in zip(rows, done, step[2] if step else rows)
        ]
        width = max(old)
        held = torch.arange(width, device=device).expand(len(rows), -1)
        start, count = (torch.tensor(x, device=device)[:, None] for x in (done, old))
        held = torch.where(held < count, held + start, -1)
        k, v = self.tail_k[:, :, :width], self.tail_v[:, :, :width]
        if step is None:
            return k, v, held
        fresh_k, fresh_v, before = step
        at = (
            torch.arange(fresh_k.shape[2], device=device)[None] + torch.tensor(before, device=device)[:, None]
        )
        at = torch.where(at < torch.tensor(rows, device=device)[:, None], at, -1)
        return torch.cat([k, fresh_k], 2), torch.cat([v, fresh_v], 2), torch.cat([held, at], 1)

    def drop(self, row: int, start: int, stop: int) -> None:
        done = self.quantized[row]
        if start < done:
            self.quantized[row] = start
            self.tail_k[row], self.tail_v[row] = 0, 0
        else:
            self.tail_k[row, :, start - done : stop - done] = 0
            self.tail_v[row, :, start - done : stop - done] = 0

    @property
    def nbytes(self) -> int:
        return self.tail_k.nbytes + self.tail_v.nbytes + self.k.nbytes + self.v.nbytes

    def used(self, rows: list[int]) -> int:
        heads = self.tail_k.shape[1]
        width = (self.tail_k.shape[3] + self.tail_v.shape[3]) * self.tail_k.element_size() * heads
        packed = sum(self.quantized) * (self.k.nbytes + self.v.nbytes)
        slots = self.capacity * len(rows)
        return (packed // slots if slots else 0) + sum(n - q for n, q in zip(rows, self.quantized)) * width


class _Packed:
    """Room for `capacity` quantized tokens: the fields of a QuantizedTensor, tokens on axis -2."""

    def __init__(self, codec: Codec, shape, capacity: int, unit: int, width: int, device):
        self.codec, self.unit, self.width = codec, unit, width
        sample = codec.quantize(torch.zeros(*shape, unit, width, device=device))  # raises for a bad group
        self.whole = sample.tensor_scale
        self.fields = {}
        for name in ("codes", "scale", "zero"):
            field = getattr(sample, name)
            if field is not None:
                tokens = field.shape[-2] * (capacity // unit)
                self.fields[name] = field.new_zeros(*shape, tokens, field.shape[-1])

    def write(self, rows: slice, start: int, x: Tensor) -> None:
        new = self.codec.quantize(x)
        for name, store in self.fields.items():
            per_unit = store.shape[-2] * self.unit // max(1, self.fields["codes"].shape[-2])
            piece = getattr(new, name)
            at = start // self.unit * per_unit
            store[rows, :, at : at + piece.shape[-2]] = piece

    def read(self, a: int, b: int) -> Tensor:
        """Tokens a to b - 1 as float32; a and b are widened to whole groups inside."""
        low, high = a // self.unit * self.unit, -(-b // self.unit) * self.unit
        part = {}
        for name, store in self.fields.items():
            per_unit = store.shape[-2] * self.unit // max(1, self.fields["codes"].shape[-2])
            part[name] = store[:, :, low // self.unit * per_unit : high // self.unit * per_unit]
        shape = (*part["codes"].shape[:2], high - low, self.width)
        qt = QuantizedTensor(
            part["codes"], part.get("scale"), part.get("zero"), self.whole, shape, torch.float32
        )
        return self.codec.dequantize(qt)[:, :, a - low : b - low]

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.fields.values()) + (
            self.whole.nbytes if self.whole is not None else 0
        )


def _seen(held: Tensor, at: Tensor, window: int | None) -> Tensor:
    """Which keys each query may see: held (B, n) positions, -1 for none; at (B, S) -> (B, S, n)."""
    held, at = held[:, None], at[..., None]
    seen = (held >= 0) & (held <= at)
    return seen if window is None else seen & (held > at - window)


def _pair(choice: Choice | Sequence) -> tuple[Codec, Codec]:
    if isinstance(choice, str):
        choice = PRESETS[choice] if choice in PRESETS else codec(choice)
    pair = (choice, choice) if isinstance(choice, Codec) else tuple(choice)
    if len(pair) != 2 or not all(isinstance(c, Codec) for c in pair):
        raise ValueError(f"codec={choice!r}; need a name, a Codec, or a pair of them for keys and values")
    for c in pair:
        if c.name == "nvfp4" and c.fixed is None:
            raise ValueError(
                "codec nvfp4 needs a tensor_scale here: a cache that grows cannot look ahead for one"
            )
    return pair
