"""How a tile of keys or values comes out of memory: one loader for every format, dequantized in flight.

A tile is BLOCK_N tokens by a head's channels and comes in two parts, so that nothing is interleaved:

    none, int8, fp8   part a: the first A channels          part b: the B channels after them (576 = 512 + 64)
    int4, kivi        part a: the even channels             part b: the odd ones

Byte j of int4 holds channel 2j in its low nibble and 2j + 1 in its high one; byte j of kivi2 holds channels
4j to 4j + 3, lowest bits first (`companion.quantize.codec`). B = 0: there is no part b.

What the codes stand for:

    int8, int4   code * scale, + zero if there is one; a scale and a zero per token and head, applied by the
                 attention kernel to scores and weights. Unsigned codes are returned around 0 (`middle`).
    fp8_*        the float8 number, times a scale if there is one. Decoded by bits: no device needs the type.
    kivi4, kivi2 keys: scale and zero per channel and group of tokens; values: per token and group of channels
"""

import triton
import triton.language as tl


@triton.jit
def columns(A: tl.constexpr, B: tl.constexpr, PAIRS: tl.constexpr):
    """The channels of part a (A,) and of part b (B,)."""
    a = tl.arange(0, A)
    b = a  # not used when B is 0
    if PAIRS:
        a = 2 * a
        b = a + 1
    elif B > 0:
        b = A + tl.arange(0, B)
    return a, b


@triton.jit
def e4m3(code):
    """uint8 codes of float8_e4m3fn as float32: sign, 4 bits of exponent, 3 of mantissa, no infinity."""
    x = code.to(tl.int32)
    half = ((x & 0x80) << 8) | ((x & 0x7F) << 7)  # the same fields in float16, whose exponent is 8 off
    value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((x & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e5m2(code):
    """uint8 codes of float8_e5m2 as float32: the upper half of a float16."""
    return (code.to(tl.int32) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def unpack(byte, FORMAT: tl.constexpr):
    """Codes of the even and of the odd channels, from the bytes that hold two or four."""
    if FORMAT == "kivi2":
        i = tl.arange(0, 2 * byte.shape[1])
        byte = repeat(byte, 2) >> (4 * (i % 2)).to(tl.uint8)[None, :]
        return byte & 3, (byte >> 2) & 3
    else:
        return byte & 15, byte >> 4


@triton.jit
def middle(X, FORMAT: tl.constexpr):
    """What `load_tile` subtracts from unsigned codes, so that rounded weights meet numbers around 0."""
    if FORMAT == "int4":
        return 8.0
    elif FORMAT == "int8" and X.dtype.element_ty == tl.uint8:
        return 128.0
    else:
        return 0.0


@triton.jit
def load_tile(X, rows, ok, WIDTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FORMAT: tl.constexpr):
    """Two parts of a tile, (N, A) and (N, B): numbers for none and fp8, codes for the rest.

    rows (N,) int64: where each token's channels begin. ok (N,): which tokens to read; the others are 0.
    """
    if FORMAT == "int4" or FORMAT == "kivi4" or FORMAT == "kivi2":
        BYTES: tl.constexpr = A // 2 if FORMAT == "kivi2" else A
        SIZE: tl.constexpr = WIDTH // 4 if FORMAT == "kivi2" else WIDTH // 2
        j = tl.arange(0, BYTES)
        byte = tl.load(X + rows[:, None] + j[None, :], mask=ok[:, None] & (j < SIZE)[None, :], other=0)
        a, b = unpack(byte, FORMAT)
        if FORMAT == "int4":
            a, b = a.to(tl.int8) - 8, b.to(tl.int8) - 8
        return a, b
    else:
        i = tl.arange(0, A)
        a = tl.load(X + rows[:, None] + i[None, :], mask=ok[:, None] & (i < WIDTH)[None, :], other=0)
        a = _number(a, FORMAT)
        b = a
        if B > 0:
            j = A + tl.arange(0, B)
            b = tl.load(X + rows[:, None] + j[None, :], mask=ok[:, None] & (j < WIDTH)[None, :], other=0)
            b = _number(b, FORMAT)
        return a, b


@triton.jit
def _number(x, FORMAT: tl.constexpr):
    if FORMAT == "fp8_e4m3":
        return e4m3(x)
    elif FORMAT == "fp8_e5m2":
        return e5m2(x)
    elif FORMAT == "int8" and x.dtype == tl.uint8:
        return x.to(tl.int32) - 128
    else:
        return x


@triton.jit
def by_channel(a, b, SCALE, ZERO, row, WIDTH: tl.constexpr):
    """kivi's keys: codes (N, A) of the even and the odd channels -> numbers, float32.

    All N tokens are of one group, whose scales (D,) begin at `row`.
    """
    A: tl.constexpr = a.shape[1]
    d = tl.arange(0, 2 * A)
    scale = tl.load(SCALE + row + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    zero = tl.load(ZERO + row + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    scale_a, scale_b = tl.split(tl.reshape(scale, (A, 2)))
    zero_a, zero_b = tl.split(tl.reshape(zero, (A, 2)))
    a = a.to(tl.float32) * scale_a[None, :] + zero_a[None, :]
    b = b.to(tl.float32) * scale_b[None, :] + zero_b[None, :]
    return a, b


@triton.jit
def by_group(a, b, SCALE, ZERO, rows, ok, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """kivi's values: the same, where GROUP channels of a token share a scale.

    rows (N,): where each token's scales begin, one per group. ok (N,): which tokens to read.
    """
    A: tl.constexpr = a.shape[1]
    HALF: tl.constexpr = GROUP // 2  # of a group's channels are even
    g = tl.arange(0, A // HALF)
    mask = ok[:, None] & (g * GROUP < WIDTH)[None, :]
    scale = tl.load(SCALE + rows[:, None] + g[None, :], mask=mask, other=0.0).to(tl.float32)
    zero = tl.load(ZERO + rows[:, None] + g[None, :], mask=mask, other=0.0).to(tl.float32)
    scale, zero = repeat(scale, HALF), repeat(zero, HALF)
    return a.to(tl.float32) * scale + zero, b.to(tl.float32) * scale + zero


@triton.jit
def repeat(x, TIMES: tl.constexpr):
    """(N, W) -> (N, W * TIMES), each number TIMES in a row."""
    N: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], (N, W, TIMES)), (N, W * TIMES))
