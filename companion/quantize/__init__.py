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

from .codec import NAMES, Codec, QuantizedTensor, codec
from .packing import pack, unpack

__all__ = ["NAMES", "Codec", "QuantizedTensor", "codec", "pack", "unpack"]
