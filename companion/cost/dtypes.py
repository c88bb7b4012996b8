"""Bits per stored value, scales included: what a number format really costs.

| name | bits | why |
|---|---|---|
| fp32, fp16, bf16 | 32, 16, 16 | |
| fp8 (e4m3, e5m2), int8 | 8 | one scale per tensor or head: too few to count |
| int4, int2 | 4, 2 | bare codes; ideal, no format stores only these |
| nvfp4 | 4.5 | 4-bit E2M1 and one 8-bit E4M3 scale per 16 values (and one FP32 per tensor) |
| mxfp4 | 4.25 | 4-bit E2M1 and one 8-bit E8M0 scale per 32 values |
| mxfp8 | 8.25 | 8-bit value and one 8-bit E8M0 scale per 32 values |
| int8-g32, int4-g32 | 8.5, 4.5 | one 16-bit scale per 32 values (the blocks of GGUF's Q8_0 and Q4_0) |
| int4-g128 | 4.15625 | 16-bit scale and 4-bit zero point per 128 values (AWQ, GPTQ) |
| kivi4, kivi2 | 5, 3 | 16-bit scale and 16-bit zero point per group of 32 (arXiv 2402.02750) |

Anything else can be given as a number of bits per value, e.g. 6 for DeepSeek-V2's six-bit cache.
"""

from __future__ import annotations

from fractions import Fraction
from numbers import Real

BITS: dict[str, Fraction] = {
    "fp32": Fraction(32),
    "bf16": Fraction(16),
    "fp16": Fraction(16),
    "fp8": Fraction(8),
    "fp8_e4m3": Fraction(8),
    "fp8_e5m2": Fraction(8),
    "int8": Fraction(8),
    "int4": Fraction(4),
    "int2": Fraction(2),
    "nvfp4": 4 + Fraction(8, 16),
    "mxfp4": 4 + Fraction(8, 32),
    "mxfp8": 8 + Fraction(8, 32),
    "int8-g32": 8 + Fraction(16, 32),
    "int4-g32": 4 + Fraction(16, 32),
    "int4-g128": 4 + Fraction(20, 128),
    "kivi4": 4 + Fraction(32, 32),
    "kivi2": 2 + Fraction(32, 32),
}
# torch's and safetensors' spellings, so that a dtype object or a checkpoint's header can be passed as it is.
_SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


def dtype_name(dtype) -> str:
    """The name used here for `dtype`: "bfloat16" and `torch.bfloat16` are "bf16"; a number stays one."""
    name = str(dtype).removeprefix("torch.").lower()
    return _SPELLINGS.get(name, name)


def bits_per_value(dtype, *, argument: str = "dtype") -> Fraction:
    """Bits that one value takes, its share of scales included.

    dtype     a name of `companion.cost.dtypes.BITS`: "fp32", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2",
              "int8", "int4", "int2", "nvfp4", "mxfp4", "mxfp8", "int8-g32", "int4-g32", "int4-g128",
              "kivi4", "kivi2"; torch's own name or dtype object; or a number of bits
    argument  what to call it in an error

    Raises ValueError for an unknown name or a number that isn't above 0 and at most 64.
    """
    if isinstance(dtype, Real) and not isinstance(dtype, bool):
        if not 0 < dtype <= 64:
            raise ValueError(f"{argument}: bits per value must be above 0 and at most 64, got {dtype!r}")
        return Fraction(dtype)
    bits = BITS.get(dtype_name(dtype))
    if bits is None:
        raise ValueError(f"{argument} must be one of {', '.join(BITS)}, or a number of bits; got {dtype!r}")
    return bits


def bytes_for(values, dtype, *, argument: str = "dtype") -> int:
    """Whole bytes that `values` numbers take in `dtype`, rounded up."""
    return -int(-Fraction(values) * bits_per_value(dtype, argument=argument) // 8)
