"""New keys and values into a cache, quantized on the way: one kernel for contiguous and paged caches.

A contiguous cache (B, S, Hkv, D) is B blocks of S tokens; where a token goes is all that differs. Numbers
become codes here, code for code as `companion.quantize` makes them.
"""

import triton
import triton.language as tl


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


@triton.jit
def nearest_integer(x):
    """Ties to the even one. Adding 1.5 * 2**23 leaves a float32 no bits for a fraction; for |x| < 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_bf16(x):
    """float32 to bfloat16, to the nearest, ties to the even one; NaN stays NaN."""
    u = x.to(tl.int32, bitcast=True)
    u = tl.where(x == x, u + 0x7FFF + ((u >> 16) & 1), u | 0x400000)  # a NaN must not round up to infinity
    return (u >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_float32(x):
    """Any float type to float32. bfloat16 by bits: the interpreter loses its subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def to_float(x, dtype: tl.constexpr):
    """float32 to a float type."""
    if dtype == tl.bfloat16:
        return to_bf16(x)
    else:
        return x.to(dtype)


@triton.jit
def at_most(x, dtype: tl.constexpr):
    """The largest number of `dtype` that is not above x, as float32; the lowest finite one below that."""
    if dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        near = x.to(tl.float16)
        above = near.to(tl.float32) > x
        bits = near.to(tl.int16, bitcast=True)  # its neighbour below is one bit away: sign and magnitude
        bits = (bits + tl.where(above, tl.where(x < 0, 1, -1), 0)).to(tl.int16)
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif dtype == tl.bfloat16:
        u = x.to(tl.int32, bitcast=True)  # the upper half of a float32
        return (tl.where(x < 0, u + 0xFFFF, u) & -65536).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def fits(x):
    """(T, D) -> (T,) whether a row has an integer scale."""
    return tl.max(tl.where(tl.abs(x) <= 8.507059173023462e37, 0, 1), 1) == 0  # 2**126; NaN compares False


@triton.jit
def scale_for(reach, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """(T,) the scale that brings `reach` to LARGEST, rounded up in its own dtype."""
    return -at_most(-tl.div_rn(reach, tl.full(reach.shape, LARGEST, tl.float32)), dtype)


@triton.jit
def divided(x, scale):
    """Rows x (T, D) by their scales (T,). A row without spread has scale 0, and codes 0 instead of 0 / 0."""
    some = (scale > 0)[:, None]
    return tl.where(some, tl.div_rn(x, tl.where(some, scale[:, None], 1.0) + tl.zeros_like(x)), 0.0)


@triton.jit
def integer_codes(
    x, ok, LARGEST: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr
):
    """Codes (T, D) int32, scale (T,) and zero (T,) float32 of rows x (T, D), of which `ok` (D,) are columns;
    the others are 0.

    ZERO False: x ~ (code - MIDDLE) * scale, codes within +-LARGEST of the middle. True: x ~ code * scale +
    zero, codes 0 to LARGEST. dtype: that of scale and zero; the codes are chosen for the rounded ones.
    """
    finite = fits(x)
    x = tl.where(finite[:, None], x, 0.0)
    if ZERO:  # columns beyond D must not take part
        zero = at_most(tl.min(tl.where(ok[None, :], x, float("inf")), 1), dtype)
        reach = tl.maximum(tl.max(tl.where(ok[None, :], x, float("-inf")), 1) - zero, 0.0)
        low: tl.constexpr = 0
    else:
        zero = tl.zeros([x.shape[0]], tl.float32)
        reach = tl.max(tl.abs(x), 1)
        low: tl.constexpr = -LARGEST
    scale = scale_for(reach, LARGEST, dtype)
    codes = nearest_integer(divided(x - zero[:, None], scale))
    codes = tl.minimum(tl.maximum(codes, low), LARGEST).to(tl.int32) + MIDDLE
    return codes, tl.where(finite, scale, float("nan")), zero


@triton.jit
def pack_pairs(codes):
    """(T, D) codes of four bits -> (T, D // 2) bytes: the even index in the low nibble."""
    even, odd = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def fp8_scaled(x, E4M3: tl.constexpr, dtype: tl.constexpr):
    """Rows x (T, D) brought to fp8's range, and the scales (T,) that this takes."""
    finite = fits(x)
    x = tl.where(finite[:, None], x, 0.0)
    scale = scale_for(tl.max(tl.abs(x), 1), 448.0 if E4M3 else 57344.0, dtype)
    return divided(x, scale), tl.where(finite, scale, float("nan"))


@triton.jit
def fp8_codes(x, E4M3: tl.constexpr):
    """float32 to the byte of e4m3fn, or of e5m2: to the nearest, ties to the even code; saturating."""
    if E4M3:
        largest: tl.constexpr = 448.0
        least: tl.constexpr = 0.015625  # 2**-6, the smallest normal number
        magic: tl.constexpr = 16384.0  # 2**14: a float32 there counts in steps of 2**-9, as subnormals do
        int_magic: tl.constexpr = 0x46800000  # its bits
        shift: tl.constexpr = 20  # bits of a float32's mantissa that are left out
        bias: tl.constexpr = 960  # (127 - 7) << 3
    else:
        largest: tl.constexpr = 57344.0
        least: tl.constexpr = 6.103515625e-05  # 2**-14
        magic: tl.constexpr = 128.0  # 2**7: steps of 2**-16
        int_magic: tl.constexpr = 0x43000000
        shift: tl.constexpr = 21
        bias: tl.constexpr = 448  # (127 - 15) << 2
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    a = tl.minimum(tl.where(x == x, tl.abs(x), 0.0), largest)
    u = a.to(tl.int32, bitcast=True)
    normal = ((u + (1 << (shift - 1)) - 1 + ((u >> shift) & 1)) >> shift) - bias
    small = (a + magic).to(tl.int32, bitcast=True) - int_magic
    code = tl.where(a < least, small, normal)
    return (tl.where(x == x, code, 0x7F) | sign).to(tl.uint8)
