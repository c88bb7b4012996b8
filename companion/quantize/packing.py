"""Several small codes in one byte, along the last axis, the lowest bits first.

int4: byte j holds number 2j in its low nibble and number 2j + 1 in its high one. int2: byte j holds numbers
4j to 4j + 3 from the lowest pair of bits upwards.

Below, rounding up and down to a float type, so that a scale cuts nothing off.
"""

import math

import torch
from jaxtyping import UInt8
from torch import Tensor


def pack(codes: UInt8[Tensor, "*rows D"], bits: int) -> UInt8[Tensor, "*rows W"]:
    """Codes 0 .. 2**bits - 1, one per byte, to D * bits / 8 bytes. bits: 2, 4 or 8.

    Raises ValueError if the last axis does not fill whole bytes or a code needs more bits.

    >>> [hex(b) for b in pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8), 4)]
    ['0x21', '0xf']
    """
    n = per_byte(bits)
    _check_bytes("codes", codes)
    if codes.shape[-1] % n:
        raise ValueError(f"codes has width {codes.shape[-1]}; {bits}-bit codes need a multiple of {n}")
    if n == 1:
        return codes
    if codes.numel() and codes.max() >= 2**bits:
        raise ValueError(f"codes holds {int(codes.max())}; {bits} bits hold 0 to {2**bits - 1}")
    parts = codes.unflatten(-1, (-1, n)).unbind(-1)
    out = parts[0].clone()
    for i, part in enumerate(parts[1:], start=1):
        out |= part << (bits * i)
    return out


def unpack(packed: UInt8[Tensor, "*rows W"], bits: int) -> UInt8[Tensor, "*rows D"]:
    """The inverse of `pack`: one code per byte."""
    n = per_byte(bits)
    _check_bytes("packed", packed)
    if n == 1:
        return packed
    low = 2**bits - 1
    return torch.stack([(packed >> (bits * i)) & low for i in range(n)], dim=-1).flatten(-2)


def per_byte(bits: int) -> int:
    """How many codes of so many bits fill a byte."""
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={bits}; accepted: 2, 4, 8")
    return 8 // bits


def _check_bytes(name: str, x: Tensor) -> None:
    if x.dtype != torch.uint8 or x.ndim == 0:  # in int8 a shift to the right would drag the sign along
        raise ValueError(f"{name} has dtype {x.dtype} and {x.ndim} axes; need uint8, at least one axis")


def at_least(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of `dtype` that is not below x (float32); the largest finite one beyond that."""
    return -at_most(-x, dtype)


def at_most(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest number of `dtype` that is not above x (float32); the lowest finite one below that."""
    most = torch.finfo(dtype).max
    near = x.clamp(-most, most).to(dtype)
    # 5/8 of a gap below x, rounded again, is the neighbour below: never a tie, wherever x is in its gap.
    lower = (x - 1.25 * half_ulp(x, dtype)).clamp(-most, most).to(dtype)
    return torch.where(near.to(torch.float32) > x, lower, near)


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding to `dtype` may change: half the gap between its numbers around x, in float32."""
    info = torch.finfo(dtype)
    precision = round(math.log2(info.eps))  # -10 for float16
    finest = round(math.log2(info.smallest_normal)) + precision  # -24 for float16
    _, exponent = torch.frexp(x.to(torch.float32))  # x = m * 2**exponent, m from 0.5 to below 1
    exponent = torch.where(x == 0, finest, exponent - 1 + precision).clamp_min(finest)
    return torch.ldexp(torch.ones_like(x, dtype=torch.float32), exponent - 1)
