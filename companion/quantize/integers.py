"""int8, int4 and int2 with a scale, and perhaps a minimum, per group.

symmetric   x ~ (code - middle) * scale        scale = amax / largest, codes around the middle
asymmetric  x ~ code * scale + zero            zero = min, scale = (max - min) / (2**bits - 1)

int8 symmetric keeps signed bytes (middle 0); int4 and int2 symmetric keep unsigned codes with middle 8 and 2.
Scale and zero are rounded to their own dtype first and the codes chosen for what will be read back: the error
of a number is then at most half a step, plus the rounding of the zero.
"""

import torch

from .codec import Codec, QuantizedTensor, checked, split, within
from .packing import pack, unpack


class IntCodec(Codec):
    """Integers of `bits` bits; see `companion.quantize.codec` for the options."""

    def __init__(self, bits, group, group_dim, symmetric, scale_dtype):
        self.name, self.bits = f"int{bits}", bits
        self.group, self.group_dim, self.symmetric, self.scale_dtype = (
            group,
            group_dim,
            symmetric,
            scale_dtype,
        )
        self.signed = symmetric and bits == 8
        self.middle = 0 if self.signed or not symmetric else 2 ** (bits - 1)
        self.largest = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1

    def quantize(self, x):
        y, dtype, shape = checked(x, self), x.dtype, tuple(x.shape)
        y = split(y, self.group, self.group_dim)
        dim = within(self.group_dim)
        if self.symmetric:
            zero = None
            scale = self._kept(y.abs().amax(dim, keepdim=True) / self.largest)
            low, high, offset = -self.largest, self.largest, 0.0
        else:
            zero = self._kept(y.amin(dim, keepdim=True))
            offset = zero.float()
            scale = self._kept(((y.amax(dim, keepdim=True) - offset) / self.largest).clamp_min(0))
            low, high = 0, self.largest
        step = scale.float()
        # A group without spread has step 0: its codes are 0, not 0 / 0.
        codes = torch.where(step > 0, (y - offset) / step, 0.0).round_().clamp_(low, high)
        codes = (codes + self.middle).reshape(shape).to(torch.int8 if self.signed else torch.uint8)
        if not self.signed:
            codes = pack(codes, self.bits)
        return QuantizedTensor(
            codes, scale.squeeze(dim), None if zero is None else zero.squeeze(dim), None, shape, dtype
        )

    def dequantize(self, qt):
        codes = qt.codes if self.signed else unpack(qt.codes, self.bits)
        y = split(codes.to(torch.float32) - self.middle, self.group, self.group_dim)
        dim = within(self.group_dim)
        y = y * qt.scale.float().unsqueeze(dim)
        if qt.zero is not None:
            y = y + qt.zero.float().unsqueeze(dim)
        return y.reshape(qt.shape).to(qt.dtype)

    def bound(self, qt):
        dim = within(self.group_dim)
        unit = torch.finfo(self.scale_dtype).eps / 2
        # Half a step; the clipping of the ends by the rounding of the scale; the rounding of the zero.
        error = qt.scale.float() * max(0.5, 2 * self.largest * unit)
        error = error + self.largest * torch.finfo(self.scale_dtype).tiny * 2 * unit  # a subnormal scale
        if qt.zero is not None:
            error = error + qt.zero.float().abs() * unit
        like = torch.empty(qt.shape, device=qt.codes.device)
        return (
            (error.unsqueeze(dim) * (1 + 1e-5))
            .expand(split(like, self.group, self.group_dim).shape)
            .reshape(qt.shape)
        )

    def _kept(self, x):
        """x as it will be read back: rounded to the scale's dtype, within its finite range."""
        most = torch.finfo(self.scale_dtype).max
        return x.clamp(-most, most).to(self.scale_dtype)
