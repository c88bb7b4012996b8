"""Numbers to codes inside a kernel, code for code what `companion.quantize` makes of them.

Everything is done by bits or by operations that IEEE 754 defines to the last bit, so a GPU, Triton's
interpreter and torch on a CPU agree: `tl.div_rn` instead of `/` (on a GPU that is an approximation), rounding
by bits (the interpreter's casts to bfloat16 cut off), no float8 type (below capability 8.9 there is none).

A row with NaN, infinity or a number beyond 2**126 has no scale; a codec raises. A kernel can't, so such a row
gets the scale NaN and reads back as NaN. In fp8 without scales infinity saturates and NaN stays NaN.
"""

import triton
import triton.language as tl


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
