"""Several small codes in one byte, along the last axis, the lowest bits first.

int4: byte j holds number 2j in its low nibble and number 2j + 1 in its high one. int2: byte j holds numbers
4j to 4j + 3 from the lowest pair of bits upwards.
"""

import torch
from jaxtyping import UInt8
from torch import Tensor


def pack(codes: UInt8[Tensor, "*rows D"], bits: int) -> UInt8[Tensor, "*rows W"]:
    """Codes 0 .. 2**bits - 1, one per byte, to D * bits / 8 bytes. bits: 2, 4 or 8.

    Raises ValueError if the last axis does not fill whole bytes.
    """
    per_byte = _per_byte(bits)
    if codes.shape[-1] % per_byte:
        raise ValueError(f"codes has width {codes.shape[-1]}; {bits}-bit codes need a multiple of {per_byte}")
    if per_byte == 1:
        return codes
    parts = codes.unflatten(-1, (-1, per_byte)).unbind(-1)
    out = parts[0].clone()
    for i, part in enumerate(parts[1:], start=1):
        out |= part << (bits * i)
    return out


def unpack(packed: UInt8[Tensor, "*rows W"], bits: int) -> UInt8[Tensor, "*rows D"]:
    """The inverse of `pack`: one code per byte."""
    per_byte = _per_byte(bits)
    if per_byte == 1:
        return packed
    low = 2**bits - 1
    return torch.stack([(packed >> (bits * i)) & low for i in range(per_byte)], dim=-1).flatten(-2)


def _per_byte(bits: int) -> int:
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={bits}; accepted: 2, 4, 8")
    return 8 // bits
