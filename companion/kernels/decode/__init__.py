"""Attention of the newest tokens over a cache: the public wrapper of the decode kernels.

Names and layouts are flash-attention's. Writing to the cache is another call (`append`).
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from .. import mode
from .checks import check_call, check_sinks
from .launch import join, merge, prepare

Number = int | float


def decode_attention(
    q: Float[Tensor, "B *Sq Hq D"],
    k_cache: Tensor,
    v_cache: Tensor | None,
    cache_seqlens: Int32[Tensor, " B"],
    *,
    block_table: Int32[Tensor, "B blocks"] | None = None,
    softmax_scale: Number | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: Number = 0.0,
    sinks: Float[Tensor, " Hq"] | None = None,
    kv_format: str = "none",
    k_scale: Tensor | Number | None = None,
    v_scale: Tensor | Number | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    head_dim_v: int | None = None,
    num_splits: int = 0,
    fixed_split_size: int | None = None,
    tail_seqlens: Int32[Tensor, " B"] | None = None,
    max_seqlen: int | None = None,
    check: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's last token or tokens over its cache.

    q: (B, Hq, D), one token each, or (B, Sq, Hq, D), the last Sq tokens, causal among themselves (bottom
        right): to verify drafts. float16, bfloat16 or float32.
    k_cache, v_cache: (B, S, Hkv, D) and (B, S, Hkv, Dv), or with a block_table pages (num_blocks, block_size,
        Hkv, D). Query head i reads key head i // (Hq / Hkv). Any strides but the last, which is 1.
        v_cache=None: the first head_dim_v channels of k_cache are the values, read once (MLA: 512 of 576).
    cache_seqlens: int32 (B,), keys in the cache, the query's own included; 0 is allowed.
    block_table: int32 (B, max_blocks); beyond a sequence's blocks it may hold anything, as may unused slots.
    softmax_scale: None means D ** -0.5. softcap: c > 0 squeezes scaled scores to c * tanh(s / c).
    window_size: (left, right), -1 for no bound; right is -1 or 0. W tokens, itself included, are (W - 1, 0).
    sinks: (Hq,) logits in the denominator; they are not in the LSE.
    kv_format: how the cache is stored. P below is B, or num_blocks; S is S, or block_size.
        "none"  numbers of q's dtype.
        "int8"  (P, S, Hkv, D) int8 with k_scale, v_scale (P, S, Hkv); or uint8 codes with k_zero, v_zero.
        "int4"  uint8 (P, S, Hkv, D / 2), low nibble first; x = (code - 8) * scale, or code * scale + zero.
        "fp8_e4m3", "fp8_e5m2"  uint8 or torch's float8; scales as for int8, one number for all, or none.
        "kivi4", "kivi2"  keys with a scale and a zero per channel, (P, S / group, Hkv, D), values with theirs
            per group of channels, (P, S, Hkv, Dv / group). The tail in full precision: `attend_with_tail`.
    num_splits: over how many programs the keys of a head are spread; 0 chooses (`decode/splits.py`).
    fixed_split_size: keys of a split instead: a sequence's result then has the same bits in every batch.
    tail_seqlens: int32 (B,), tokens behind these that lie in another cache: the query stands after them. What
        comes back is then a partial: ask for its LSE, leave the sinks to the merge.
    max_seqlen: the longest length, if known. Otherwise it is read from cache_seqlens on a CPU, and on a GPU
        taken to be the cache's capacity, since asking would wait for the GPU; many programs then find no key.
    check: look at lengths and block numbers. None does where they lie on the CPU; True waits for the GPU.
        Unchecked, a length beyond the capacity reads memory that is not the cache's.

    Returns out, q's shape with Dv channels, in q's dtype; with return_lse also the LSE, float32, natural
    logarithm, (B, Hq) or (B, Hq, Sq). A query without keys has output 0 and LSE -inf. No gradient passes.

    Raises ValueError naming the argument, before anything is launched; RuntimeError for CPU tensors when
    Triton's interpreter was not chosen (`companion.kernels.interpret`).

    Sources: Dao et al. 2023, "Flash-Decoding"; Kwon et al. 2023, "PagedAttention"; Liu et al. 2024, "KIVI".
    """
    call = check_call(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table=block_table,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        kv_format=kv_format,
        k_scale=k_scale,
        v_scale=v_scale,
        k_zero=k_zero,
        v_zero=v_zero,
        head_dim_v=head_dim_v,
        tail_seqlens=tail_seqlens,
    )
    sinks = check_sinks(sinks, call.q.shape[2])
    launch = prepare(call, num_splits, fixed_split_size, max_seqlen, check)
    out, lse = join([launch], sinks)
    if q.ndim == 3:
        out, lse = out[:, 0], lse[:, :, 0]
    return (out, lse) if return_lse else out


def attend_with_tail(
    q: Float[Tensor, "B *Sq Hq D"],
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Int32[Tensor, " B"],
    k_tail: Float[Tensor, "B T Hkv D"],
    v_tail: Float[Tensor, "B T Hkv Dv"],
    tail_seqlens: Int32[Tensor, " B"],
    *,
    softmax_scale: Number | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: Number = 0.0,
    sinks: Float[Tensor, " Hq"] | None = None,
    num_splits: int = 0,
    fixed_split_size: int | None = None,
    max_seqlen: int | None = None,
    check: bool | None = None,
    return_lse: bool = False,
    **cache: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a quantized cache and the tail of newest tokens in full precision behind it.

    k_tail, v_tail: (B, T, Hkv, D), q's dtype; tail_seqlens int32 (B,): how many of the T each sequence has.
    cache: block_table, kv_format, scales and zeros of the quantized part. The rest as in `decode_attention`.
    Two calls of one kernel, whose partials are merged once, in float32.
    """
    options = dict(softmax_scale=softmax_scale, window_size=window_size, softcap=softcap)
    old = check_call(q, k_cache, v_cache, cache_seqlens, tail_seqlens=tail_seqlens, **options, **cache)
    try:
        new = check_call(q, k_tail, v_tail, tail_seqlens, **options)
    except ValueError as error:
        raise ValueError(f"tail: {error}") from None
    if new.k.shape[2] != old.k.shape[2] or new.v_dim != old.v_dim:
        raise ValueError(
            f"k_tail and v_tail have {new.k.shape[2]} heads and values of {new.v_dim} channels; "
            f"the cache has {old.k.shape[2]} and {old.v_dim}"
        )
    sinks = check_sinks(sinks, old.q.shape[2])
    launches = [
        prepare(old, num_splits, fixed_split_size, max_seqlen, check),
        prepare(new, num_splits, fixed_split_size, None, check),
    ]
    out, lse = join(launches, sinks)
    if q.ndim == 3:
        out, lse = out[:, 0], lse[:, :, 0]
    return (out, lse) if return_lse else out


def merge_splits(
    outs: Float[Tensor, "B Sq Hq N Dv"],
    lses: Float[Tensor, "B Hq Sq N"],
    *,
    sinks: Float[Tensor, " Hq"] | None = None,
) -> tuple[Float[Tensor, "B Sq Hq Dv"], Float[Tensor, "B Hq Sq"]]:
    """Stage two alone: N >= 1 partial results per query into one.

    outs: float32, each normalized over its own keys. lses: float32, natural logarithm; a partial with -inf
    counts for nothing, whatever its output holds. sinks: (Hq,), applied here once and not part of the LSE.
    Returns float32 out and lse. Its reference is `companion.attention.merge_partials`, with N in front.
    """
    if lses.shape != (outs.shape[0], outs.shape[2], outs.shape[1], outs.shape[3]) or outs.shape[3] == 0:
        raise ValueError(
            f"lses has shape {tuple(lses.shape)} and outs {tuple(outs.shape)}; need (B, Hq, Sq, N) and "
            "(B, Sq, Hq, N, Dv), N at least 1"
        )
    for name, x in (("outs", outs), ("lses", lses)):
        if x.dtype != torch.float32:
            raise ValueError(f"{name} has dtype {x.dtype}; need torch.float32")
    if outs.shape[4] > 1 and outs.stride(4) != 1:
        raise ValueError(f"outs has strides {outs.stride()}; need 1 in the last axis")
    sinks = check_sinks(sinks, outs.shape[2])
    mode.triton_for(outs, lses, sinks)
    out, lse = outs.new_empty(*outs.shape[:3], outs.shape[4]), lses.new_empty(lses.shape[:3])
    if out.numel():
        merge(outs, lses, sinks, out, lse)
    return out, lse
