"""Attention over stored keys and values: the reference's meaning, by the fastest way that this case allows.

Three ways, all equal to `companion.attention.sdpa` within rounding:

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


def decode_packed(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None) -> Tensor:
    """One query per row over all S keys.

    q (B, Hq, 1, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) -> (B, Hq, 1, Dv).

    Grouped query heads become the rows of one product per key head. It pays where torch's own kernel reads
    a key once per query head: 1.8 to 5.6 times from 4,096 keys at groups 4 and 8 and width 128. At group 3
    and width 64 it wins beyond 8,000 keys only, and may lose a fifth below: 0.6 of SmolLM2's 30 ms a step.
    """
    B, Hq, _, D = q.shape
    Hkv, S = k.shape[1:3]
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    rows = (q * scale).reshape(B * Hkv, Hq // Hkv, D)
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # views: rows and heads of a cache lie evenly spaced
    weights = torch.softmax(torch.bmm(rows, k.transpose(1, 2)), dim=-1)
    return torch.bmm(weights, v).view(B, Hq, 1, v.shape[2])


def attend(q, k, v, *, starts, stops, window, softmax_scale, softcap, sinks, return_lse):
    """q (B, Hq, S, D) over k (B, Hkv, n, D), v (B, Hkv, n, Dv), whose slot j holds position j.

    starts: position of each row's first query. stops: tokens in each row. window: tokens seen, or None.
    """
    S, n = q.shape[2], k.shape[2]
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
    options = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, return_lse=return_lse)
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
