"""int8, int4 and int2 with a scale, and perhaps a minimum, per group.

symmetric   x ~ (code - middle) * scale        scale = amax / largest, codes around the middle
asymmetric  x ~ code * scale + zero            zero = min, scale = (max - zero) / (2**bits - 1)

int8 symmetric keeps signed bytes (middle 0); int4 and int2 symmetric keep unsigned codes with middle 8 and 2,
of which -8 and -2 stay unused: int2 symmetric knows three values.

In its own dtype the zero is rounded down and the scale up, and the codes are chosen for what will be read
back. So no number is ever clipped, and the error is at most half a step, also where a group is far from zero
and narrow, or so small that its scale is subnormal. With float16 scales that holds for numbers up to 65,504
in magnitude; the ends of a group that goes beyond are cut.

`PlainCodec` does not quantize at all: it keeps floats of 32 or 16 bits behind the interface of the codecs.
The others are measured against it, and it is the other half of a pair of which one side stays exact.
"""

import torch

from .codec import Codec, at_least, at_most, half_ulp, pack, split, unpack, within


class IntCodec(Codec):
    """Integers of `bits` bits; see `companion.quantize.codec` for the options."""

    def __init__(self, bits, group, group_dim, symmetric, scale_dtype):
        self.name, self.bits = f"int{bits}", bits
        self.group, self.group_dim = group, group_dim
        self.symmetric, self.scale_dtype = symmetric, scale_dtype
        self.signed = symmetric and bits == 8
        self.middle = 0 if self.signed or not symmetric else 2 ** (bits - 1)
        self.largest = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1

    def _quantize(self, y):
        shape = y.shape
        y = split(y, self.group, self.group_dim)
        dim = within(self.group_dim)
        zero, offset, low = None, 0.0, -self.largest
        if self.symmetric:
            reach = y.abs().amax(dim, keepdim=True)
        else:
            zero = at_most(y.amin(dim, keepdim=True), self.scale_dtype)
            offset, low = zero.float(), 0
            reach = (y.amax(dim, keepdim=True) - offset).clamp_min(0)
        scale = at_least(reach / self.largest, self.scale_dtype)
        step = scale.float()
        # A group without spread has step 0: its codes are 0, not 0 / 0.
        codes = torch.where(step > 0, (y - offset) / step, 0.0).round_().clamp_(low, self.largest)
        codes = (codes + self.middle).reshape(shape).to(torch.int8 if self.signed else torch.uint8)
        if not self.signed:
            codes = pack(codes, self.bits)
        return codes, scale.squeeze(dim), None if zero is None else zero.squeeze(dim), None

    def _dequantize(self, qt):
        codes = (qt.codes if self.signed else unpack(qt.codes, self.bits)).to(torch.float32)
        if self.middle:
            codes -= self.middle
        dim = within(self.group_dim)
        y = split(codes, self.group, self.group_dim) * qt.scale.float().unsqueeze(dim)
        if qt.zero is not None:
            y += qt.zero.float().unsqueeze(dim)
        return y

    def _bound(self, qt):
        """Half a step, and a little for float32."""
        dim = within(self.group_dim)
        step = qt.scale.float()
        reach = step * self.largest + (0.0 if qt.zero is None else qt.zero.float().abs())
        error = (step / 2 + reach * 2.0**-21).unsqueeze(dim)
        like = split(torch.empty(qt.shape, device=step.device), self.group, self.group_dim)
        return error.expand(like.shape)


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
