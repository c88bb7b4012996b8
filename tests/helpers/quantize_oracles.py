"""Small formats from their definitions, in Python floats: nothing here is shared with the package."""

import bisect
import math
import struct

import numpy as np


def minifloat(exponent_bits: int, mantissa_bits: int, bias: int, special: str) -> list[float]:
    """The values of codes 0 .. 2**(e+m) - 1, sign 0.

    special: "ieee" (top exponent is inf and NaN), "fn" (only the very last code is NaN), or "none".
    """
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        e, m = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = m / 2**mantissa_bits
        value = fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias)
        if special == "ieee" and e == 2**exponent_bits - 1:
            value = math.nan if m else math.inf
        if special == "fn" and code == 2 ** (exponent_bits + mantissa_bits) - 1:
            value = math.nan
        values.append(value)
    return values


E2M1 = minifloat(2, 1, 1, "none")
E4M3 = minifloat(4, 3, 7, "fn")
E5M2 = minifloat(5, 2, 15, "ieee")


def nearest(x: float, values: list[float]) -> int:
    """The code of the finite value nearest to |x|, with a tie to the even code; saturating. Sign left out."""
    finite = [v for v in values if math.isfinite(v)]
    x = abs(x)
    if x >= finite[-1]:
        return len(finite) - 1
    above = bisect.bisect_right(finite, x)  # finite[above - 1] <= x < finite[above]
    low, high = x - finite[above - 1], finite[above] - x
    if low == high:
        return above if above % 2 == 0 else above - 1
    return above - 1 if low < high else above


def bf16(x: float, *, up: bool) -> float:
    """The neighbour of x in bfloat16, towards +infinity or towards -infinity."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    if bits & 0xFFFF:
        away = up == (x > 0)  # away from zero: the next larger magnitude
        bits = (bits & 0xFFFF0000) + (0x10000 if away else 0)
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def toward(x: np.float32, kind: str, *, up: bool) -> float:
    """The neighbour of x, or x itself, in "float16", "bfloat16" or "float32"."""
    if kind == "float32":
        return float(x)
    if kind == "bfloat16":
        return bf16(float(x), up=up)
    near = np.float16(x)
    wrong = np.float32(near) < x if up else np.float32(near) > x
    return float(np.nextafter(near, np.float16(np.inf if up else -np.inf)) if wrong else near)
