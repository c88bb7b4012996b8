"""New keys and values into a cache, quantized on the way: one kernel for contiguous and paged caches.

A contiguous cache (B, S, Hkv, D) is B blocks of S tokens; where a token goes is all that differs.
"""

import triton
import triton.language as tl

from .encode import fp8_codes, fp8_scaled, integer_codes, pack_pairs, to_float, to_float32


@triton.jit
def _place(t, ok, Slots, Seqlens, New, Table, S, num_blocks, block_size, max_blocks, stride_tb):
    """Block and offset (int64) of tokens t (T,), and which of them have a place in the cache at all."""
    if Slots is not None:
        slot = tl.load(Slots + t, mask=ok, other=-1).to(tl.int64)
        block, offset = slot // block_size, slot % block_size
        ok = ok & (slot >= 0)  # -1 divided by a size would be block 0, or the last one in Python
    else:
        b, i = t // S, t % S
        count = S
        if New is not None:
            count = tl.load(New + b, mask=ok, other=0)
        # Bottom-right aligned, as queries are: a row's last new token stands at cache_seqlens - 1.
        position = tl.load(Seqlens + b, mask=ok, other=0) - count + i
        ok = ok & (i < count) & (position >= 0)
        if Table is not None:
            ok = ok & (position // block_size < max_blocks)
            at = Table + b.to(tl.int64) * stride_tb + position // block_size
            block = tl.load(at, mask=ok, other=-1).to(tl.int64)
            offset = (position % block_size).to(tl.int64)
        else:
            block, offset = b.to(tl.int64), position.to(tl.int64)
            ok = ok & (position < block_size)
    return block, offset, ok & (block >= 0) & (block < num_blocks)


@triton.jit
def _put(
    X,  # (B, S, Hkv, D)
    Cache,  # (num_blocks, block_size, Hkv, D), int4: D // 2 bytes
    Scale,  # (num_blocks, block_size, Hkv), or None
    Zero,
    unit,  # what fp8's numbers are divided by
    row,  # (T,) of a token and head in X
    to,  # (T,) the same in the cache
    at_scale,  # (T,) and in Scale and Zero
    ok,  # (T,)
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)
    x = tl.load(X + row[:, None] + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
    kind: tl.constexpr = Cache.dtype.element_ty
    W: tl.constexpr = D // 2 if FORMAT == "int4" else D  # numbers or bytes that are stored
    if FORMAT == "none":
        if x.dtype != kind:  # one dtype: the bits as they are
            x = to_float(to_float32(x), kind)
    elif FORMAT == "int8" or FORMAT == "int4":
        SHIFTED: tl.constexpr = Zero is not None
        bits: tl.constexpr = 8 if FORMAT == "int8" else 4
        middle: tl.constexpr = 8 if FORMAT == "int4" and not SHIFTED else 0
        largest: tl.constexpr = (1 << bits) - 1 if SHIFTED else (1 << (bits - 1)) - 1
        stored: tl.constexpr = Scale.dtype.element_ty
        x, scale, zero = integer_codes(to_float32(x), d < D, largest, middle, SHIFTED, stored)
        tl.store(Scale + at_scale, to_float(scale, stored), mask=ok)
        if SHIFTED:
            tl.store(Zero + at_scale, to_float(zero, stored), mask=ok)
        if FORMAT == "int4":
            x = pack_pairs(x)
        else:
            x = x.to(kind)
    else:
        x = tl.div_rn(to_float32(x), unit + tl.zeros(x.shape, tl.float32))
        if Scale is not None:
            x, scale = fp8_scaled(x, FORMAT == "fp8_e4m3", Scale.dtype.element_ty)
            tl.store(Scale + at_scale, to_float(scale, Scale.dtype.element_ty), mask=ok)
        x = fp8_codes(x, FORMAT == "fp8_e4m3")
    w = tl.arange(0, BLOCK_D // 2 if FORMAT == "int4" else BLOCK_D)
    tl.store(Cache + to[:, None] + w[None, :], x, mask=ok[:, None] & (w < W)[None, :])


@triton.jit
def append_kernel(
    K,  # (B, S, Hkv, D) new keys
    V,  # (B, S, Hkv, Dv) new values, or None
    K_cache,  # (num_blocks, block_size, Hkv, D), or codes
    V_cache,
    K_scale,  # (num_blocks, block_size, Hkv)
    K_zero,
    V_scale,
    V_zero,
    k_unit,
    v_unit,
    Slots,  # (B * S,) or None: then the next three
    Seqlens,  # (B,) tokens after this step
    New,  # (B,) of the S, how many are real; None: all
    Table,  # (B, max_blocks); None: the cache is contiguous
    T,  # B * S
    S,
    num_blocks,
    block_size,
    max_blocks,
    stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh,
    stride_kc_block, stride_kc_token, stride_kc_head,
    stride_vc_block, stride_vc_token, stride_vc_head,
    stride_ks_block, stride_ks_token, stride_ks_head,
    stride_vs_block, stride_vs_token, stride_vs_head,
    stride_tb,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Program (i, h): tokens i * BLOCK_T onwards of key head h."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.program_id(1).to(tl.int64)
    ok = t < T
    block, offset, ok = _place(
        t, ok, Slots, Seqlens, New, Table, S, num_blocks, block_size, max_blocks, stride_tb
    )
    b, i = (t // S).to(tl.int64), (t % S).to(tl.int64)
    _put(
        K, K_cache, K_scale, K_zero, k_unit,
        b * stride_kb + i * stride_ks + h * stride_kh,
        block * stride_kc_block + offset * stride_kc_token + h * stride_kc_head,
        block * stride_ks_block + offset * stride_ks_token + h * stride_ks_head,
        ok, D, BLOCK_D, FORMAT,
    )  # fmt: skip
    if V is not None:
        _put(
            V, V_cache, V_scale, V_zero, v_unit,
            b * stride_vb + i * stride_vs + h * stride_vh,
            block * stride_vc_block + offset * stride_vc_token + h * stride_vc_head,
            block * stride_vs_block + offset * stride_vs_token + h * stride_vs_head,
            ok, DV, BLOCK_DV, FORMAT,
        )  # fmt: skip
