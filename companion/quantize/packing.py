"""Several small codes in one byte, along the last axis, the lowest bits first.

int4: byte j holds number 2j in its low nibble and number 2j + 1 in its high one. int2: byte j holds numbers
4j to 4j + 3 from the lowest pair of bits upwards.
"""

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
