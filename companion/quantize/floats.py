"""Eight-bit and four-bit floating point.

fp8: the casts of torch.float8_e4m3fn and float8_e5m2, saturating, with an optional scale per group.
e2m1: sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Ties go to the even code.
nvfp4: 16 e2m1 numbers share an e4m3 scale, and the whole tensor one float32 scale.
mxfp4: 32 e2m1 numbers share a power of two (e8m0). OCP Microscaling Formats 1.0, sections 5 and 6.
"""

import torch

from ..checks import require
from .codec import Codec, at_least, half_ulp, pack, split, unpack, within

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GAP = (0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0)  # half the wider gap beside each
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_LEAST = 2.0**-9  # e4m3's smallest number; a block's scale of 0 would lose the block


class Fp8(Codec):
    """One byte per number. Without `group` and `tensor_scale` there is no scale: a plain, saturating cast.

    A group's scale is rounded up in its own dtype, so that its largest number is not cut.
    """

    bits = 8

    def __init__(self, name, group, group_dim, scale_dtype, tensor_scale):
        self.name, self.group, self.group_dim = name, group, group_dim
        self.scale_dtype, self.fixed = scale_dtype, tensor_scale
        self.dtype = _FP8[name]
        self.largest = torch.finfo(self.dtype).max

    def groups(self, S, D):
        return super().groups(S, D) if self.group is not None else (0, 0)

    def _quantize(self, y):
        shape = y.shape
        scale = whole = None
        if self.fixed is not None:
            whole = torch.tensor(self.fixed, dtype=torch.float32, device=y.device)
            y = y / whole
        if self.group is not None:
            dim = within(self.group_dim)
            y = split(y, self.group, self.group_dim)
            scale = at_least(y.abs().amax(dim, keepdim=True) / self.largest, self.scale_dtype)
            y = torch.where(scale > 0, y / scale.float(), 0.0).reshape(shape)
            scale = scale.squeeze(dim)
        codes = y.clamp(-self.largest, self.largest).to(self.dtype)  # clamped first: casts differ by version
        return codes, scale, None, whole

    def _dequantize(self, qt):
        return self._scaled(qt.codes.to(torch.float32), qt)

    def _bound(self, qt):
        """Half the gap around each code."""
        gap = half_ulp(qt.codes.to(torch.float32), self.dtype)
        return self._scaled(gap, qt) * (1 + 1e-4)

    def _scaled(self, y, qt):
        if qt.scale is not None:
            dim = within(self.group_dim)
            y = split(y, self.group, self.group_dim) * qt.scale.float().unsqueeze(dim)
        return y if qt.tensor_scale is None else y * qt.tensor_scale


class Fp4(Codec):
    """e2m1 numbers under block scales: nvfp4 (16, e4m3, one float32 for all), mxfp4 (32, a power of two)."""

    bits = 4

    def __init__(self, name, group, group_dim, tensor_scale):
        size = 16 if name == "nvfp4" else 32
        require(group in (None, size), "group", f"{size} or None for {name}", group)
        self.name, self.group, self.group_dim, self.fixed = name, size, group_dim, tensor_scale

    def _quantize(self, y):
        shape = y.shape
        y = split(y, self.group, self.group_dim)
        dim = within(self.group_dim)
        peak = y.abs().amax(dim, keepdim=True)
        whole = None
        if self.name == "nvfp4":
            whole = self._tensor_scale(peak)
            scale = (peak / 6 / whole).clamp(_LEAST, 448.0).to(torch.float8_e4m3fn)
            unit = scale.float() * whole
        else:
            _, exponent = torch.frexp(peak)  # peak = m * 2**exponent, m from 0.5 to below 1
            exponent = torch.where(peak > 0, exponent - 3, -127).clamp(-127, 127)  # e2m1 reaches 2**2
            scale = (exponent + 127).to(torch.uint8)
            unit = torch.ldexp(torch.ones_like(peak), exponent)
        codes = pack(encode_e2m1(y / unit).reshape(shape), 4)
        return codes, scale.squeeze(dim), None, whole

    def _dequantize(self, qt):
        y = split(decode_e2m1(unpack(qt.codes, 4)), self.group, self.group_dim)
        return y * self._unit(qt)

    def _bound(self, qt):
        """Half the gap around each code, and for the largest, 6, what the scale may cut off."""
        codes = unpack(qt.codes, 4).long() & 7
        unit = self._unit(qt)
        gap = split(torch.tensor(_GAP, device=codes.device)[codes], self.group, self.group_dim) * unit
        # mxfp4 cuts what is between 6 and 8. nvfp4's scale is rounded by half a _LEAST, or by 1 in 16.
        cut = 2 * unit if self.name == "mxfp4" else unit.clamp_min(3 * _LEAST * float(qt.tensor_scale))
        top = split(codes == 7, self.group, self.group_dim)
        return torch.where(top, cut, gap) * (1 + 1e-5)

    def _unit(self, qt):
        dim = within(self.group_dim)
        if self.name == "nvfp4":
            return (qt.scale.float() * qt.tensor_scale).unsqueeze(dim)
        exponent = qt.scale.to(torch.int32) - 127
        return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent).unsqueeze(dim)

    def _tensor_scale(self, peak):
        if self.fixed is not None:
            return torch.tensor(self.fixed, dtype=torch.float32, device=peak.device)
        most = peak.amax() if peak.numel() else peak.new_zeros(())
        # So that the largest block's scale is the largest e4m3 number.
        return torch.where(most > 0, most / (6 * 448), 1.0).clamp_min(torch.finfo(torch.float32).tiny)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest e2m1 number as a code 0 to 15 (8 is the sign); ties to the even code; beyond 6 is 6."""
    between = [(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])]
    edges = torch.tensor(between, dtype=torch.float32, device=x.device)
    # bucketize sends a tie down; where the code above is the even one, the edge moves just below the tie.
    up = torch.arange(len(between), device=x.device) % 2 == 1
    edges = torch.where(up, torch.nextafter(edges, torch.zeros_like(edges)), edges)
    code = torch.bucketize(x.abs().contiguous(), edges).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 to float32."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float32, device=codes.device)
    return table[codes.long()]
