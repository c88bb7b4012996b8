"""Fewer bytes per number: integer, 8-bit and 4-bit floating-point codecs with scales per group.

>>> import torch
>>> from companion.quantize import codec
>>> c = codec("int4", group=32)                   # 32 channels of one token share a scale and a minimum
>>> qt = c.quantize(torch.randn(3, 100, 64))
>>> qt.bits_per_value                             # 4 + (16 + 16) / 32
5.0
>>> (c.dequantize(qt)).shape
torch.Size([3, 100, 64])
"""

import torch

from ..checks import choice, number, require, whole
from .codec import FLOATS, LIMIT, NAMES, PLAIN, Codec, QuantizedTensor, pack, unpack
from .floats import Fp4, Fp8
from .integers import IntCodec, Plain

__all__ = ["NAMES", "Codec", "QuantizedTensor", "codec", "pack", "unpack"]


def codec(
    name: str,
    *,
    group: int | None = None,
    group_dim: int = -1,
    symmetric: bool | None = None,
    scale_dtype: torch.dtype = torch.float16,
    tensor_scale: float | None = None,
) -> Codec:
    """A codec by name: int8, int4, int2, fp8_e4m3, fp8_e5m2, nvfp4, mxfp4; or fp32, fp16, bf16: a mere cast.

    group: numbers that share a scale. None means the whole axis for integers (one scale per token for
        group_dim=-1); no scale at all for fp8; and 16 or 32, which are fixed, for nvfp4 and mxfp4.
    group_dim: -1 groups the channels of a token (KIVI's values), -2 the tokens of a channel (KIVI's keys).
    symmetric: integers only. True codes amax to the largest code and needs no zero; False stores the group's
        minimum beside the scale. None takes True for int8 and False for int4 and int2.
    scale_dtype: in which integers' and fp8's scales are kept; the codes are chosen for the rounded scale.
    tensor_scale: nvfp4 and fp8: a fixed float32 scale for the whole tensor; what exceeds it saturates. None
        takes it from the data (nvfp4) or 1 (fp8).

    Raises ValueError naming the argument.
    """
    if group is not None:
        whole("group", group)
    choice("group_dim", group_dim, (-1, -2))
    choice("scale_dtype", scale_dtype, FLOATS)
    if tensor_scale is not None:
        number("tensor_scale", tensor_scale, 2.0**-126, LIMIT)
    choice("codec", name, NAMES + PLAIN)
    if name in PLAIN:
        if (group, symmetric, tensor_scale, scale_dtype) != (None, None, None, torch.float16):
            raise ValueError(f"{name} has no scales; it takes no options")
        return Plain(name)
    require(symmetric is None or name.startswith("int"), "symmetric", f"None for {name}", symmetric)
    scaled = name in ("nvfp4", "fp8_e4m3", "fp8_e5m2")
    require(tensor_scale is None or scaled, "tensor_scale", f"None for {name}", tensor_scale)
    own = name in ("nvfp4", "mxfp4")  # scales of its own kind
    require(scale_dtype == torch.float16 or not own, "scale_dtype", f"left out for {name}", scale_dtype)
    if name.startswith("int"):
        bits = int(name[3:])
        return IntCodec(bits, group, group_dim, bits == 8 if symmetric is None else symmetric, scale_dtype)
    if name.startswith("fp8"):
        return Fp8(name, group, group_dim, scale_dtype, tensor_scale)
    return Fp4(name, group, group_dim, tensor_scale)
