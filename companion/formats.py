"""Number formats, every one once: what a stored value takes, and what others call it. Standard library only.

>>> get("int4-g128").bits_per_value                # 4 + (16 + 4) / 128
Fraction(133, 32)
>>> get("torch.bfloat16").name, get("kivi4").scales, get("fp8").vllm
('bf16', 'group', 'fp8')

Anything else can be given as a number of bits per value, e.g. 6 for DeepSeek-V2's six-bit cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Format:
    """One format of stored numbers.

    name     the name that everything here takes; `aliases`: torch's and safetensors' spellings of it
    bits     of one value, without scales
    numbers  "float", or "integer": codes that a scale, and perhaps a zero point, turn into numbers
    layout   exponent and mantissa bits of a float, "E4M3"; "" for integers
    scales   what shares a scale: "none", "tensor", "token" (one per token and head), "group" or "block" (of
             `group` values). Scales of tensors and tokens are too few to count
    group    values that share one, where that is fixed; scale_bits, zero_bits: of a group's scale and zero
    vllm     the flag value of `--kv-cache-dtype`, or None: no flag does it
    kernel   the `kv_format` of `companion.kernels.decode_attention`, or None: no kernel reads it
    codec    True where `companion.quantize.codec` makes it by this name
    why      where the scales come from
    """

    name: str
    bits: int
    numbers: str = "integer"
    layout: str = ""
    scales: str = "none"
    group: int | None = None
    scale_bits: int = 0
    zero_bits: int = 0
    aliases: tuple[str, ...] = ()
    vllm: str | None = None
    kernel: str | None = None
    codec: bool = False
    why: str = ""

    @property
    def bits_per_value(self) -> Fraction:
        """Bits of one value with its share of its group's scale and zero point, exactly."""
        more = Fraction(self.scale_bits + self.zero_bits, self.group) if self.group else 0
        return Fraction(self.bits) + more

    @property
    def per_byte(self) -> int:
        """Codes that share a byte: 2 for four bits; 1 from eight bits on."""
        return max(1, 8 // self.bits)

    @property
    def is_integer(self) -> bool:
        return self.numbers == "integer"

    @property
    def is_plain(self) -> bool:
        """True for numbers of 16 bits and more, which are stored as they are."""
        return self.bits >= 16


FP32 = Format("fp32", 32, "float", "E8M23", aliases=("float32", "float", "f32"), codec=True)
FP16 = Format("fp16", 16, "float", "E5M10", aliases=("float16", "half", "f16"), codec=True)
BF16 = Format("bf16", 16, "float", "E8M7", aliases=("bfloat16",), codec=True)
FP8 = Format("fp8", 8, "float", "E4M3", "tensor", vllm="fp8")
FP8_E4M3 = Format(
    "fp8_e4m3", 8, "float", "E4M3", "token", aliases=("float8_e4m3fn",), vllm="fp8_e4m3", kernel="fp8_e4m3",
    codec=True,
)  # fmt: skip
FP8_E5M2 = Format(
    "fp8_e5m2", 8, "float", "E5M2", "token", aliases=("float8_e5m2",), vllm="fp8_e5m2", kernel="fp8_e5m2",
    codec=True,
)  # fmt: skip
INT8 = Format("int8", 8, scales="token", kernel="int8", codec=True)
INT4 = Format("int4", 4, scales="token", kernel="int4", codec=True, why="bare codes, ideal")
INT2 = Format("int2", 2, scales="token", codec=True, why="bare codes, ideal")
NVFP4 = Format(
    "nvfp4", 4, "float", "E2M1", "block", 16, 8, vllm="nvfp4", codec=True,
    why="an E4M3 scale per 16 values, and one FP32 per tensor",
)  # fmt: skip
MXFP4 = Format("mxfp4", 4, "float", "E2M1", "block", 32, 8, codec=True, why="an E8M0 scale per 32 values")
MXFP8 = Format("mxfp8", 8, "float", "E4M3", "block", 32, 8, why="an E8M0 scale per 32 values")
INT8_G32 = Format("int8-g32", 8, scales="group", group=32, scale_bits=16, why="GGUF's Q8_0")
INT4_G32 = Format("int4-g32", 4, scales="group", group=32, scale_bits=16, why="GGUF's Q4_0")
INT4_G128 = Format("int4-g128", 4, "integer", "", "group", 128, 16, 4, why="AWQ, GPTQ")
KIVI4 = Format("kivi4", 4, "integer", "", "group", 32, 16, 16, kernel="kivi4", why="arXiv 2402.02750")
KIVI2 = Format("kivi2", 2, "integer", "", "group", 32, 16, 16, kernel="kivi2", why="arXiv 2402.02750")

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        FP32, BF16, FP16, FP8, FP8_E4M3, FP8_E5M2, INT8, INT4, INT2, NVFP4, MXFP4, MXFP8, INT8_G32, INT4_G32,
        INT4_G128, KIVI4, KIVI2,
    )
}  # fmt: skip
_SPELLINGS = {alias: f.name for f in FORMATS.values() for alias in f.aliases}

# What kernels read, by their own names, and what `companion.quantize.codec` makes.
KERNELS: dict[str, Format] = {f.kernel: f for f in (INT8, INT4, FP8_E4M3, FP8_E5M2, KIVI4, KIVI2) if f.kernel}
CODECS: tuple[str, ...] = tuple(
    f.name for f in (INT8, INT4, INT2, FP8_E4M3, FP8_E5M2, NVFP4, MXFP4) if f.codec
)


def dtype_name(dtype: Any) -> str:
    """The name used here for `dtype`: "bfloat16" and `torch.bfloat16` are "bf16"; what is unknown stays."""
    name = str(dtype).removeprefix("torch.").lower()
    return _SPELLINGS.get(name, name)


def get(dtype: Any, *, argument: str = "dtype") -> Format:
    """The format of a name, of an alias, or of torch's dtype object. ValueError for what is none."""
    found = FORMATS.get(dtype_name(dtype))
    if found is None:
        known = ", ".join(FORMATS)
        raise ValueError(f"{argument} must be one of {known}, or a number of bits, got {dtype!r}")
    return found


def bits_per_value(dtype: Any, *, argument: str = "dtype") -> Fraction:
    """Bits that one value takes, its share of scales included.

    dtype     a name of `FORMATS`, torch's own name or dtype object, or a number of bits
    argument  what to call it in an error

    Raises ValueError for an unknown name or a number that isn't above 0 and at most 64.
    """
    if isinstance(dtype, Real) and not isinstance(dtype, bool):
        if not 0 < dtype <= 64:
            raise ValueError(f"{argument}: bits per value must be above 0 and at most 64, got {dtype!r}")
        return Fraction(dtype)
    return get(dtype, argument=argument).bits_per_value


def bytes_for(values: Any, dtype: Any, *, argument: str = "dtype") -> int:
    """Whole bytes that `values` numbers take in `dtype`, rounded up."""
    return -int(-Fraction(values) * bits_per_value(dtype, argument=argument) // 8)


def label(dtype: Any) -> str:
    """A format's name, or its bits per value in short."""
    return f"{float(dtype):.4g}" if isinstance(dtype, int | float | Fraction) else dtype_name(dtype)
