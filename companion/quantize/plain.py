"""No quantization at all: numbers kept as floats of 32 or 16 bits, behind the interface of the codecs.

What the others are measured against, and the other half of a pair of which one side is to stay exact.
"""

import torch

from .codec import Codec
from .rounding import half_ulp

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Plain(Codec):
    """A cast, to nearest. fp16 cuts what exceeds 65,504."""

    group, group_dim = None, -1

    def __init__(self, name):
        self.name, self.dtype = name, DTYPES[name]
        self.bits = 8 * self.dtype.itemsize

    def groups(self, S, D):
        return 0, 0  # no scales

    def _quantize(self, y):
        most = torch.finfo(self.dtype).max
        return y.clamp(-most, most).to(self.dtype), None, None, None

    def _dequantize(self, qt):
        return qt.codes.to(torch.float32, copy=True)

    def _bound(self, qt):
        return half_ulp(qt.codes, self.dtype)
