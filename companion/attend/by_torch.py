"""By torch: the reference's meaning, by the fastest way that a case allows. The other backends stand on it.

Attention has three ways, all equal to `companion.attention.sdpa` within rounding:

- one query per row and nothing to hide: two batched products in which the query heads that share a key head
  are rows of one matrix, so that every key and value is read once per group and not once per head;
- the first chunk of a sequence: torch's fused causal attention;
- anything else (later chunks, rows of different lengths, windows): fused attention under an explicit mask.

A softcap, sinks, or a wish for the LSE go to the reference itself.
"""

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import sdpa
from ..quantize import Codec
from .products import int8_product, product
from .step import PackedRows, Step

TILE = 1024  # quantized tokens that are dequantized at a time


@runtime_checkable
class Coded(Protocol):
    """A layer's tokens in few bits. `codecs`: of keys and values; `widths`: of their heads."""

    codecs: tuple[Codec, Codec]
    widths: tuple[int, int]

    def tile(self, a: int, b: int) -> tuple[Tensor, Tensor]:
        """Dequantized keys and values of tokens a to b - 1 of every row, (B, Hkv, b - a, D)."""

    def views(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The fields of keys and values as kernels read them, (B, tokens, H, width), or pages."""

    def table(self) -> Tensor | None:
        """The rows' blocks, int32 (B, columns), for pages."""


class TorchBackend:
    """See `companion.attend.Backend`."""

    name = "torch"
    whole_steps = False  # whether a decode step of plain layers may be one call

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def attend(self, q, k, v, step: Step, *, window, softmax_scale, softcap, sinks, return_lse):
        """`decode` for one query per row, `extend` for more."""
        run = self.decode if q.shape[2] == 1 else self.extend
        return run(
            q, k, v, step, window=window,
            softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, return_lse=return_lse,
        )  # fmt: skip

    def decode(self, q, k, v, step: Step, *, window, softmax_scale, softcap, sinks, return_lse):
        options = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, return_lse=return_lse)
        if step.packed:
            return decode_side_by_side(q, k, v, step, window, options)
        if step.table is not None:
            k, v = step.gathered(k, v)
        n = k.shape[2]
        at_end = step.ordered and step.even and step.n == n and step.starts[0] + 1 == n
        if at_end and n and is_plain(q, softmax_scale, softcap, sinks, return_lse):
            if window is not None and n > window:
                k, v = k[:, :, n - window :], v[:, :, n - window :]
            return decode_packed(q, k, v, softmax_scale=softmax_scale)
        return attend_seen(q, k, v, step.seen(1, n, window), **options)

    def extend(self, q, k, v, step: Step, *, window, softmax_scale, softcap, sinks, return_lse):
        options = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, return_lse=return_lse)
        if step.table is not None:
            k, v = step.gathered(k, v)
        S, n = q.shape[2], k.shape[2]
        whole = step.ordered and step.even and step.n == n == S and step.starts[0] == 0
        if whole and n and (window is None or n <= window):
            if is_plain(q, softmax_scale, softcap, sinks, return_lse):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=True
                )
        return attend_seen(q, k, v, step.seen(S, n, window), **options)

    def over_codes(self, q, coded: Coded, step: Step, *, window, softmax_scale, softcap) -> list:
        """Parts (out, lse) of q over each row's first step.stops tokens in few bits, a tile at a time."""
        S, limits = q.shape[2], step.stops
        at, limit = step.at(S), torch.tensor(limits, device=step.device)
        first = 0 if window is None or not S else max(0, int(at.min()) - window + 1) // TILE * TILE
        parts = []
        for a in range(first, step.n, TILE):
            b = min(a + TILE, step.n)
            k, v = coded.tile(a, b)
            held = torch.arange(a, b, device=step.device).expand(len(limits), -1)
            held = torch.where(held < limit[:, None], held, -1)
            seen = seen_keys(held, at, window)
            options = dict(softmax_scale=softmax_scale, softcap=softcap, return_lse=True)
            parts.append(sdpa(q, k.to(q.dtype), v.to(q.dtype), key_mask=seen, **options))
        return parts

    def append(self, k: Tensor, v: Tensor | None, k_store: Tensor, v_store: Tensor | None, step: Step):
        for x, store in ((k, k_store), (v, v_store)):
            if x is None:
                continue
            if step.table is not None:
                flat = store.flatten(1, 2)
                for row, (place, n) in enumerate(zip(step.places, step.counts)):
                    if place is not None:
                        flat[:, place] = x[row, :, :n]
            elif step.even:  # one copy for the common case
                start, count = step.starts[0], step.counts[0]
                store[:, :, start : start + count] = x[:, :, :count]
            else:
                self.append_rows(x, store, step)

    def append_rows(self, x: Tensor, store: Tensor, step: Step) -> None:
        """The first step.counts[b] tokens of x (B, H, S, ...) behind the tokens that row b of a store has."""
        for row, (start, n) in enumerate(zip(step.starts, step.counts)):
            store[row, :, start : start + n] = x[row, :, :n]

    def append_packed(self, k, v, k_store, v_store, slots: Tensor, tails: Tensor | None) -> None:
        """T rows of one token, k and v (T, Hkv, 1, D), into pages; slots (T,), tails: slots to make 0."""
        for store, x in ((k_store, k), (v_store, v)):
            flat = store.flatten(1, 2)
            flat.index_copy_(1, slots, x[:, :, 0].transpose(0, 1))
            if tails is not None:
                flat.index_fill_(1, tails, 0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None):
        if scale is None:
            return product(x, weight, bias)
        return int8_product(x, weight, scale, bias)

    def experts(self, by_torch: Callable[..., Tensor], x, w1, w2, ids, weights, **options) -> Tensor:
        return by_torch(x, w1, w2, ids, weights, **options)


def decode_packed(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None) -> Tensor:
    """One query per row over all S keys.

    q (B, Hq, 1, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) -> (B, Hq, 1, Dv).

    Grouped query heads become the rows of one product per key head. It pays where torch's own kernel reads
    a key once per query head: 1.7 to 5.8 times from 4,096 keys at groups 4 and 8 and width 128, or 16 heads
    over 2 of width 64; 1.2 to 1.6 for groups of 8 over one or three key heads of width 64. At
    SmolLM2's group of 3 it is level at 4,096 keys, wins a fifth at 16,384 and may lose a fifth below 1,024:
    three rows want a loop of their own (`companion.kernels.decode_on_cpu`, 1.8 to 2.6 times from 4,096).
    """
    B, Hq, _, D = q.shape
    Hkv, S = k.shape[1:3]
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    rows = (q * scale).reshape(B * Hkv, Hq // Hkv, D)
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # views: rows and heads of a cache lie evenly spaced
    if reads_ahead(rows, S):
        k.amax()  # brings the keys into the near caches faster than the product does on its way
    weights = torch.softmax(torch.bmm(rows, k.transpose(1, 2)), dim=-1)
    return torch.bmm(weights, v).view(B, Hq, 1, v.shape[2])


def reads_ahead(rows: Tensor, S: int) -> bool:
    """Whether it pays to read S keys once before rows (B * Hkv, group, D) are multiplied with them.

    Eight rows on narrow keys: the product takes 0.22 ms for 2 MB of keys from memory and 0.09 for near ones,
    and reading them takes 0.07. With three rows, or on wide keys, it loses.
    """
    thin = rows.shape[1] >= 8 and rows.shape[2] <= 64
    return thin and S >= 2048 and rows.dtype == torch.float32 and rows.device.type == "cpu"


def decode_side_by_side(q: Tensor, k: Tensor, v: Tensor, rows: PackedRows, window, options: dict) -> Tensor:
    """q (B, Hq, 1, D) over rows of pages of different lengths: one masked product; (B, Hq, 1, Dv)."""
    k, v = rows.side_by_side(k, v)
    B, Hq, _, D = q.shape
    if not is_plain(q, **options):
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        return attend_seen(q, k, v, rows.seen(1, k.shape[2], window), **options)
    Hkv, group = len(k), Hq // len(k)
    scale = D**-0.5 if options["softmax_scale"] is None else options["softmax_scale"]
    queries = (q * scale).view(B, Hkv, group, D).transpose(0, 1).reshape(Hkv * B, group, D)
    scores = torch.bmm(queries, k.flatten(0, 1).transpose(1, 2))
    unseen = rows.unseen(window)
    if unseen is not None:
        scores.view(Hkv, B, group, rows.n).masked_fill_(unseen, -math.inf)
    out = torch.bmm(torch.softmax(scores, dim=-1), v.flatten(0, 1))
    return out.view(Hkv, B, group, -1).transpose(0, 1).reshape(B, Hq, 1, -1)


def attend_seen(q, k, v, seen, *, softmax_scale, softcap, sinks, return_lse):
    """Attention under an explicit mask: seen bool (B, S, n), True where a query may see a slot."""
    S, n = seen.shape[1:]
    if n and S and is_plain(q, softmax_scale, softcap, sinks, return_lse):
        # A query that sees no key would be 0 / 0: let it see them all, then make its result 0.
        blind = ~seen.any(dim=-1, keepdim=True)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=(seen | blind)[:, None], scale=softmax_scale, enable_gqa=True
        )
        return out.masked_fill(blind[:, None], 0.0)
    options = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, return_lse=return_lse)
    return sdpa(q, k, v, key_mask=seen, **options)


def is_plain(q, softmax_scale, softcap, sinks, return_lse) -> bool:
    """Whether torch's fused attention computes what is asked, as exactly as the reference does."""
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale must be a finite number, or None for D**-0.5, got {softmax_scale}")
    wide = q.is_cuda or q.dtype in (torch.float32, torch.float64)  # 16 bits on a CPU: the reference is wider
    return wide and not softcap and sinks is None and not return_lse


def seen_keys(held: Tensor, at: Tensor, window: int | None) -> Tensor:
    """Which keys each query may see: held (B, n) positions, -1 for none; at (B, S) -> (B, S, n)."""
    held, at = held[:, None], at[..., None]
    seen = (held >= 0) & (held <= at)
    return seen if window is None else seen & (held > at - window)
