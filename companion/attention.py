"""Scaled dot-product attention, written to be read: the reference that every other path is tested against.

    scores = scale * q @ k.T  ->  softcap  ->  mask  ->  softmax  ->  weights @ v

Layout (B, H, S, D), as in torch.nn.functional.scaled_dot_product_attention. The natural logarithm of the
softmax's denominator, the LSE, can be returned beside the output; two results over different keys are
merged exactly with it (`merge_partials`): split-KV kernels, quantized tails and ring attention rest on that.

Sources: Vaswani et al. 2017, section 3.2 (attention); Shazeer 2019 and Ainslie et al. 2023 (shared key
heads); Milakov and Gimelshein 2018, Rabe and Staats 2021 (online softmax and merging); Gemma 2 (softcap);
the gpt-oss model code (sinks); flash-attention (names, bottom-right alignment).
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .checks import shape

Number = int | float
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def sdpa(
    q: Float[Tensor, "B Hq Sq D"],
    k: Float[Tensor, "B Hkv Sk D"],
    v: Float[Tensor, "B Hkv Sk Dv"],
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: Number | None = None,
    softcap: Number = 0.0,
    sinks: Float[Tensor, " Hq"] | None = None,
    key_mask: Bool[Tensor, "B Sk"] | Bool[Tensor, "B Sq Sk"] | None = None,
    return_lse: bool = False,
) -> Float[Tensor, "B Hq Sq Dv"] | tuple[Float[Tensor, "B Hq Sq Dv"], Float[Tensor, "B Hq Sq"]]:
    """Attention of q over k and v.

    q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv), Dv need not be D. All of one dtype: float16,
        bfloat16, float32 or float64. Sq and Sk may be 0. Query head i reads key head i // (Hq / Hkv).
    causal: query i sees key j when j <= i + Sk - Sq: the last query sees every key (bottom-right aligned), so
        a decode step with Sq = 1 sees the whole cache. Queries that stand before the first key see nothing.
    window_size: (left, right), how many keys beside its own position a query sees on each side; -1: no bound.
        A window of W tokens that includes the token itself is (W - 1, 0). Aligned like `causal`, and
        combined with it.
    softmax_scale: factor on the scores; None means D ** -0.5.
    softcap: c > 0 squeezes scaled scores into (-c, c) by c * tanh(s / c), before masking; 0 is off.
    sinks: (Hq,) logits, one per query head, that join the softmax's denominator once and carry no value. They
        are neither scaled nor capped.
    key_mask: True where a key may be seen: (B, Sk), or (B, Sq, Sk) for each query its own.
    return_lse: also return the LSE.

    Returns out (B, Hq, Sq, Dv) in q's dtype and, if asked, lse (B, Hq, Sq): natural logarithm of the sum of
    exp(score) over visible keys, without the sink. An output computed with sinks is therefore not a partial
    for `merge_partials`: give the sinks there instead. float64 inputs compute and return the LSE in float64,
    all others in float32.

    A query that sees no key has output 0 and LSE -inf. Masked keys and values never reach the result,
    whatever they hold: NaN and infinity included. (Gradients do need finite inputs.)

    Raises ValueError, naming the argument, for shapes or dtypes that do not fit and for options out of range.
    """
    _check_inputs(q, k, v, sinks, key_mask)
    B, Hq, Sq, D = q.shape
    Hkv, Sk, Dv = k.shape[1], k.shape[2], v.shape[3]
    scale, softcap = checked_options(D, softmax_scale, softcap)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    mask = _mask(Sq, Sk, causal, window_size, key_mask, q.device)

    # The query heads that share a key head become rows of one product: K is read once, never repeated.
    group = Hq // Hkv
    rows = (q.to(dtype) * scale).reshape(B, Hkv, group * Sq, D)
    scores = (rows @ k.to(dtype).transpose(-2, -1)).view(B, Hkv, group, Sq, Sk)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)  # tanh cannot overflow; a ratio of exponentials can
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)

    lse = None
    if return_lse or sinks is not None:
        lse = torch.logsumexp(scores, dim=-1)  # (B, Hkv, group, Sq)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
        if mask is not None:  # softmax over no key at all is 0 / 0
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    else:
        total = torch.logaddexp(lse, sinks.to(dtype).view(1, Hkv, group, 1))
        weights = torch.exp(scores - _finite_base(total)[..., None])

    out = _weighted_sum(weights, v.to(dtype), mask).reshape(B, Hq, Sq, Dv).to(q.dtype)
    return (out, lse.reshape(B, Hq, Sq)) if return_lse else out


def merge_partials(
    outs: Float[Tensor, "N B Hq *S Dv"] | Sequence[Float[Tensor, "B Hq *S Dv"]],
    lses: Float[Tensor, "N B Hq *S"] | Sequence[Float[Tensor, "B Hq *S"]],
    *,
    sinks: Float[Tensor, " Hq"] | None = None,
) -> tuple[Float[Tensor, "B Hq *S Dv"], Float[Tensor, "B Hq *S"]]:
    """Merge attention results over disjoint sets of keys into the result over all of them.

    outs: N >= 1 partial outputs (B, Hq, Sq, Dv), or (B, Hq, Dv) for one query, each normalized over its own
        keys; a sequence, or one tensor with the splits in front. lses: their LSEs, without the last axis.
    sinks: (Hq,) logits, applied here once; the partials must have been computed without.

    Returns (out, lse). lse = log(sum_n exp(lse_n)), without the sinks; out = sum_n exp(lse_n - lse) out_n. A
    split that saw no key has LSE -inf and counts for nothing, whatever its output holds; a row in which every
    split is empty has output 0 and LSE -inf. Computed in float32, or float64 if any input is; out has the
    dtype of `outs`. Keep partials in float32: rounding them to 16 bits first is the larger error.

    Raises ValueError for no split at all, for shapes that differ, and for sinks of the wrong length.
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    if lses.shape != outs.shape[:-1] or lses.ndim < 3:
        got = f"{tuple(lses.shape)} for {tuple(outs.shape)}"
        raise ValueError(f"lses must be (N, B, Hq, ...), as outs without its last axis Dv, got {got}")
    dtype = torch.float64 if torch.float64 in (outs.dtype, lses.dtype) else torch.float32
    lses = lses.to(dtype)
    lse = torch.logsumexp(lses, dim=0)
    total = lse
    if sinks is not None:
        shape("sinks", sinks, lse.shape[1])
        total = torch.logaddexp(lse, sinks.to(dtype).view(-1, *[1] * (lse.ndim - 2)).expand_as(lse))
    weights = torch.exp(lses - _finite_base(total))
    empty = (lses == -math.inf)[..., None]
    parts = outs.to(dtype).masked_fill(empty, 0.0)  # an empty split may hold anything, NaN included
    return (weights[..., None] * parts).sum(dim=0).to(outs.dtype), lse


def visible(
    sq: int,
    sk: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    device: torch.device | str | None = None,
) -> Bool[Tensor, "{sq} {sk}"]:
    """Which of sk keys each of sq queries may see: bool (sq, sk), True where visible.

    Bottom-right aligned: the last query stands at the position of the last key, so query i stands at
    p = i + sk - sq. causal: j <= p. window_size (left, right): p - left <= j <= p + right, -1 no bound.

    >>> visible(2, 5, causal=True).int().tolist()
    [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    """
    left, right = _check_window(window_size)
    if causal:
        right = 0
    position = torch.arange(sq, device=device)[:, None] + (sk - sq)
    key = torch.arange(sk, device=device)[None, :]
    seen = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if left >= 0:
        seen = seen & (key >= position - left)
    if right >= 0:
        seen = seen & (key <= position + right)
    return seen


def _mask(sq, sk, causal, window_size, key_mask, device):
    """All masks in one, broadcastable to scores (B, Hkv, group, Sq, Sk); None if everything is visible."""
    mask = None
    no_window = _check_window(window_size) == (-1, -1)
    if not (no_window and (not causal or sq <= 1)):  # a single causal query sees every key
        mask = visible(sq, sk, causal, window_size, device)[None]
    if key_mask is not None:
        key_mask = key_mask if key_mask.ndim == 3 else key_mask[:, None, :]
        mask = key_mask if mask is None else mask & key_mask
    return None if mask is None else mask[:, None, None].expand(-1, 1, 1, sq, sk)


def _weighted_sum(weights: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """weights (B, Hkv, group, Sq, Sk) times v (B, Hkv, Sk, Dv) -> (B, Hkv, group, Sq, Dv)."""
    B, Hkv, group, Sq, Sk = weights.shape
    out = (weights.reshape(B, Hkv, group * Sq, Sk) @ v).view(B, Hkv, group, Sq, v.shape[3])
    if mask is None or torch.isfinite(out).all():
        return out
    # 0 x NaN is NaN: a value that some query may not see is not finite. Give each query only what it sees.
    each = [weights[:, :, :, i] @ v.masked_fill(~mask[:, :, 0, i, :, None], 0.0) for i in range(Sq)]
    return torch.stack(each, dim=3)


def _finite_base(total: Tensor) -> Tensor:
    """The log-denominator, with 0 for a row without any key, where exp(-inf - (-inf)) would be NaN."""
    return total.masked_fill(total == -math.inf, 0.0)


def _stacked(name: str, parts) -> Tensor:
    if isinstance(parts, Tensor):
        if parts.ndim == 0 or parts.shape[0] == 0:
            raise ValueError(f"{name} must be at least one split in front, got {tuple(parts.shape)}")
        return parts
    parts = list(parts)
    if not parts:
        raise ValueError(f"{name} must be at least one split, got none")
    if len({p.shape for p in parts}) > 1:
        raise ValueError(f"{name} must be splits of one shape, got {[tuple(p.shape) for p in parts]}")
    return torch.stack(parts)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_mask: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        shape(name, x, "B", "H", "S", "D")
        if x.dtype not in _DTYPES or x.dtype != q.dtype:
            kinds = "one of float16, bfloat16, float32, float64 in q, k and v"
            raise ValueError(f"dtype of {name} must be {kinds}, got {x.dtype} (q is {q.dtype})")
    B, Hq, Sq, D = q.shape
    if k.shape[0] != B or k.shape[3] != D or D == 0:
        raise ValueError(f"k must be ({B}, Hkv, Sk, {D}) with D > 0, to match q, got {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must be {tuple(k.shape[:3])} in front, to match k, got {tuple(v.shape)}")
    Hkv, Sk = k.shape[1:3]
    if Hkv == 0 or Hq % Hkv:
        raise ValueError(f"heads of q must be a multiple of k's {Hkv}, got {Hq}")
    if sinks is not None and (sinks.shape != (Hq,) or not sinks.is_floating_point()):
        got = f"{tuple(sinks.shape)} of {sinks.dtype}"
        raise ValueError(f"sinks must be ({Hq},), one float per head, got {got}")
    if key_mask is not None:
        if key_mask.dtype != torch.bool:
            raise ValueError(f"key_mask must be torch.bool, True where visible, got {key_mask.dtype}")
        if key_mask.shape not in ((B, Sk), (B, Sq, Sk)):
            raise ValueError(f"key_mask must be {(B, Sk)} or {(B, Sq, Sk)}, got {tuple(key_mask.shape)}")


def checked_options(D: int, softmax_scale: Number | None, softcap: Number) -> tuple[float, float]:
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale must be a finite number, or None for D**-0.5, got {softmax_scale}")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be a finite number, 0 (off) or more, got {softcap}")
    return float(scale), float(softcap)


def _check_window(window_size) -> tuple[int, int]:
    if len(window_size) != 2 or any(not isinstance(w, int) or w < -1 for w in window_size):
        raise ValueError(f"window_size must be (left, right), integers, -1 for no bound, got {window_size}")
    return tuple(window_size)
