"""Attention over stored keys and values: the reference's meaning, by the fastest way that this case allows.

Four ways, all equal to `companion.attention.sdpa` within rounding:

- few queries per row on a GPU: the Triton kernel; one per row on a CPU, where asked for: a compiled one
  (`dispatch.py`);
- one query per row and nothing to hide: two batched products in which the query heads that share a key head
  are rows of one matrix, so that every key and value is read once per group and not once per head;
- the first chunk of a sequence: torch's fused causal attention;
- anything else (later chunks, rows of different lengths, windows): fused attention under an explicit mask.

A softcap, sinks, or a wish for the LSE go to the reference itself.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import sdpa
from .dispatch import decode


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


def attend(q, k, v, *, starts, stops, window, softmax_scale, softcap, sinks, return_lse):
    """q (B, Hq, S, D) over k (B, Hkv, n, D), v (B, Hkv, n, Dv), whose slot j holds position j.

    starts: position of each row's first query. stops: tokens in each row. window: tokens seen, or None.
    """
    S, n = q.shape[2], k.shape[2]
    options = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, return_lse=return_lse)
    caches = k.transpose(1, 2), v.transpose(1, 2)
    if (found := decode(q, *caches, starts=starts, stops=stops, window=window, **options)) is not None:
        return found
    even = all(x == starts[0] for x in starts) and all(x == n for x in stops) and starts[0] + S == n
    short = window is None or n <= window
    if even and n and S and is_plain(q, softmax_scale, softcap, sinks, return_lse):
        if S == 1:
            if not short:
                k, v = k[:, :, n - window :], v[:, :, n - window :]
            return decode_packed(q, k, v, softmax_scale=softmax_scale)
        if S == n and short:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=True
            )
    seen = visible_slots(starts, stops, S, n, window, q.device)
    return attend_seen(q, k, v, seen, **options)


def attend_seen(q, k, v, seen, *, softmax_scale, softcap, sinks, return_lse):
    """The same under an explicit mask: seen bool (B, S, n), True where a query may see a slot."""
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
        raise ValueError(f"softmax_scale={softmax_scale}; need a finite number, or None for D ** -0.5")
    wide = q.is_cuda or q.dtype in (torch.float32, torch.float64)  # 16 bits on a CPU: the reference is wider
    return wide and not softcap and sinks is None and not return_lse


def visible_slots(
    starts: list[int], stops: list[int], S: int, n: int, window: int | None, device: torch.device
) -> Tensor:
    """Which of n slots each query may see: bool (B, S, n). Query i of row b stands at starts[b] + i."""
    slot = torch.arange(n, device=device)
    at = torch.tensor(starts, device=device)[:, None] + torch.arange(S, device=device)  # (B, S)
    seen = slot <= at[..., None]
    seen &= slot < torch.tensor(stops, device=device)[:, None, None]
    if window is not None:
        seen &= slot > at[..., None] - window
    return seen
