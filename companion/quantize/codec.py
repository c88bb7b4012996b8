"""The interface of a codec, what it returns, and their names; the factory is the package's `codec`.

Several small codes lie in one byte along the last axis, the lowest bits first. int4: byte j holds number 2j
in its low nibble and number 2j + 1 in its high one. int2: byte j holds numbers 4j to 4j + 3 from the lowest
pair of bits upwards. A scale is rounded up, so that it cuts nothing off.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ..checks import choice
from ..formats import CODECS

PLAIN = ("fp32", "fp16", "bf16")  # kept as they are
NAMES = CODECS
LIMIT = 2.0**126  # 8.5e37: within it nothing overflows in float32 on the way
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Numbers in few bits, and what is needed to read them.

    codes: packed along the last axis (uint8, int8 or a float8 type). scale, zero: one per group, or None.
    tensor_scale: one float32 for all, or None. shape, dtype: of what was quantized.
    """

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    tensor_scale: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored, counted from the tensors."""
        parts = (self.codes, self.scale, self.zero, self.tensor_scale)
        return sum(p.nbytes for p in parts if p is not None)

    @property
    def bits_per_value(self) -> float:
        """Bits for one number, scales and zeros included."""
        return 8 * self.nbytes / max(1, math.prod(self.shape))


class Codec(ABC):
    """Quantizes tensors (..., S, D), tokens by channels.

    group, group_dim: `group` numbers share a scale, along the channels of a token (-1) or along the tokens of
    a channel (-2). Attributes: `name`, `bits`, `group` (None: see `codec`), `group_dim`.
    """

    name: str
    bits: int
    group: int | None
    group_dim: int

    def quantize(self, x: Float[Tensor, "*batch S D"]) -> QuantizedTensor:
        """x to codes and scales; x is left as it was, and no gradient passes.

        Raises ValueError for NaN, infinity and numbers beyond 8.5e37 (2**126), for groups that do not divide
        and for channels that do not fill whole bytes.
        """
        return QuantizedTensor(*self._quantize(_checked(x, self)), tuple(x.shape), x.dtype)

    def dequantize(self, qt: QuantizedTensor) -> Float[Tensor, "*batch S D"]:
        """Codes and scales to numbers, in the dtype that was quantized; always finite."""
        y = self._dequantize(qt).reshape(qt.shape)
        if qt.dtype == torch.float16:
            y = y.clamp(-65504.0, 65504.0)
        return y.to(qt.dtype)

    def bound(self, qt: QuantizedTensor) -> Float[Tensor, "*batch S D"]:
        """The largest error that each number can have, float32, where it was within the codec's range.

        Out of range, and cut: without a group's scale, in fp8 beyond 448 or 57,344 (times a tensor_scale); in
        nvfp4 beyond 2,688 times a fixed tensor_scale; in integers with float16 scales beyond 65,504.
        """
        error = self._bound(qt).reshape(qt.shape) + 2.0**-130  # what float32 may lose at its own low end
        if qt.dtype in (torch.float16, torch.bfloat16):  # what reading it back in 16 bits may add
            error = error + half_ulp(self.dequantize(qt), qt.dtype)
        return error

    @abstractmethod
    def _quantize(self, y: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """codes, scale, zero and tensor_scale of y, float32."""

    @abstractmethod
    def _dequantize(self, qt: QuantizedTensor) -> Tensor:
        """The numbers in float32, in any grouping of the right order."""

    @abstractmethod
    def _bound(self, qt: QuantizedTensor) -> Tensor:
        """The bound of `_dequantize`."""

    def groups(self, S: int, D: int) -> tuple[int, int]:
        """Shape (S', D') of the scales of an (S, D) tensor. Raises ValueError if a group does not divide."""
        length, what = (S, "tokens") if self.group_dim == -2 else (D, "channels")
        size = max(1, length) if self.group is None else self.group
        if length % size:
            raise ValueError(f"group={size} does not divide {length} {what}; choose a divisor, or pad")
        return (length // size, D) if self.group_dim == -2 else (S, length // size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, group={self.group}, group_dim={self.group_dim})"


def split(x: Tensor, group: int | None, group_dim: int) -> Tensor:
    """(..., S, D) with its groups on an axis of their own, right after the axis that is divided."""
    size = max(1, x.shape[group_dim]) if group is None else group
    return x.unflatten(group_dim, (x.shape[group_dim] // size, size))


def within(group_dim: int) -> int:
    """The axis of `split`'s result along which the members of a group lie."""
    return -1 if group_dim == -1 else -2


def _checked(x: Tensor, codec: Codec) -> Tensor:
    """x in float32, once it is sure that this codec can hold it."""
    if x.ndim < 2 or x.dtype not in (*FLOATS, torch.float64):
        raise ValueError(f"x must be (..., S, D), floating point, got {tuple(x.shape)} of {x.dtype}")
    codec.groups(*x.shape[-2:])
    fill = per_byte(min(codec.bits, 8))
    if x.shape[-1] % fill:
        raise ValueError(f"x must be of a multiple of {fill} channels in {codec.name}, got {x.shape[-1]}")
    y = x.detach().to(torch.float32)
    if y.numel() and not y.abs().amax() <= LIMIT:  # NaN compares False
        raise ValueError("x holds NaN, infinity or a number beyond 8.5e37 (2**126); it has no scale")
    return y


def pack(codes: UInt8[Tensor, "*rows D"], bits: int) -> UInt8[Tensor, "*rows W"]:
    """Codes 0 .. 2**bits - 1, one per byte, to D * bits / 8 bytes. bits: 2, 4 or 8.

    Raises ValueError if the last axis does not fill whole bytes or a code needs more bits.

    >>> [hex(b) for b in pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8), 4)]
    ['0x21', '0xf']
    """
    n = per_byte(bits)
    _check_bytes("codes", codes)
    if codes.shape[-1] % n:
        raise ValueError(f"codes must be of a width that {n} divides, got {codes.shape[-1]}")
    if n == 1:
        return codes
    if codes.numel() and codes.max() >= 2**bits:
        raise ValueError(f"codes must be from 0 to {2**bits - 1}, got {int(codes.max())}")
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
    return 8 // choice("bits", bits, (2, 4, 8))


def _check_bytes(name: str, x: Tensor) -> None:
    if x.dtype != torch.uint8 or x.ndim == 0:  # in int8 a shift to the right would drag the sign along
        raise ValueError(f"{name} must be uint8 of at least one axis, got {x.dtype} of {x.ndim}")


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
