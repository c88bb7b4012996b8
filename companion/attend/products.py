"""Products with a weight matrix by torch, for the few rows of a decode step, on a CPU.

A decode step multiplies a row, or a few, with every matrix, so it should take as long as reading them. BLAS
libraries are made for many rows: from the second row on they pack the whole matrix before they use it, which
reads, writes and reads it again. Two things avoid that, on a machine with two cores that read 27 to 54 GB/s
(see the ledger of the benchmarks):

- sides: asked for y^T = W x^T, the library has a kernel for few columns that reads W once as it lies. Four
  rows then take hardly longer than one;
- pieces: a batch of two products or more, each with some of the outputs, goes another way than one product,
  on one thread too, and every thread gets its own.

With a matrix in int8 what is fastest differs by the dtype of x:

- tiles: as many rows of codes as fit the near caches are turned into floats there and multiplied, then the
  next. In float32 that takes as long as reading the floats would have, or a fifth longer;
- packed: torch's own kernel, which multiplies what it has just unpacked in registers. Fast in bfloat16 for
  few rows; in float32 and float16 several times slower than tiles, so not asked there.

Elsewhere a matrix is turned into floats as a whole for each product: bytes are saved, time is not.
"""

import threading
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor

FEW = 32  # rows; beyond, one product of the library is as fast
SIDES = 8  # rows up to which the sides are worth changing, for matrices with no fewer outputs than inputs
TILE = 2**21  # bytes of floats at once: what a core's near caches hold
PACKED_ROWS = 16  # rows up to which torch's kernel is the faster one
PACKED_WIDTH = 64  # divides the inputs for which it is safe: with 60 it reads past the end and may crash
VECTORS = ("AVX2", "AVX512")  # instruction sets for which that kernel is more than a plain loop


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), x (..., in), weight (out, in); faster for few rows on a CPU.

    Which kernel computes it depends on the number of rows, so the last bits of a row's result do too.
    """
    out, width = weight.shape
    rows = x.numel() // width
    if not 0 < rows <= FEW or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return F.linear(x, weight, bias)
    n = pieces(out)
    if n == 1 or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    flat, parts = x.reshape(rows, width).contiguous(), weight.view(n, out // n, width)
    if rows == 1 or (rows <= SIDES and out >= width):
        y = torch.bmm(parts, flat.t().expand(n, width, rows)).view(out, rows).t()
    else:
        y = torch.bmm(flat.expand(n, rows, width), parts.transpose(1, 2)).transpose(0, 1)
    y = y.reshape(*x.shape[:-1], out).contiguous()  # the next product wants one piece
    return y if bias is None else y + bias


def pieces(n: int) -> int:
    """The largest number of equal pieces of n, at most one per thread, or two on one thread."""
    return next(p for p in range(max(2, torch.get_num_threads()), 0, -1) if n % p == 0)


def int8_product(
    x: Float[Tensor, "*rows in"],
    codes: Int8[Tensor, "out in"],
    scale: Float[Tensor, " out"],
    bias: Float[Tensor, " out"] | None = None,
) -> Float[Tensor, "*rows out"]:
    """F.linear(x, codes * scale, bias) in x's dtype; a whole matrix of floats is in memory only off the CPU,
    and where x needs a gradient."""
    out, width = codes.shape
    rows = x.numel() // width
    if not rows or x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, dense(codes, scale, x.dtype), bias)
    flat = x.reshape(rows, width)
    if rows <= PACKED_ROWS and width % PACKED_WIDTH == 0 and packed(x.dtype):
        y = torch._weight_int8pack_mm(flat.contiguous(), codes, scale.to(x.dtype))
        y = y if bias is None else y + bias
    else:
        y = _by_tiles(flat, codes, scale)
        y = (y if bias is None else y.add_(bias)).to(x.dtype)
    return y.view(*x.shape[:-1], out)


@cache
def packed(dtype: torch.dtype) -> bool:
    """Whether torch's own kernel is there for x of this dtype, fast, and right on a matrix made up for it.

    It has no public name, so it may be gone or changed in any release: then tiles do its work.
    """
    if dtype != torch.bfloat16 or torch.backends.cpu.get_cpu_capability() not in VECTORS:
        return False
    numbers = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (48, 128), generator=numbers, dtype=torch.int8)
    x, scale = (torch.rand(*shape, generator=numbers).to(dtype) for shape in ((3, 128), (48,)))
    try:
        y = torch._weight_int8pack_mm(x, codes, scale)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    right = F.linear(x.double(), codes.double() * scale.double()[:, None])
    return y.shape == right.shape and bool((y - right).norm() <= 0.01 * right.norm())


def _by_tiles(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """(rows, out) in float32, or in float64 for such x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    (out, width), x = codes.shape, x.to(wide)
    y = x.new_empty(x.shape[0], out)
    step = max(1, TILE // (width * wide.itemsize))
    for start in range(0, out, step):
        part = codes[start : start + step]
        tile = _workspace(part.numel(), wide).view(part.shape).copy_(part)
        torch.mm(x, tile.t(), out=y[:, start : start + step])
    return y.mul_(scale)


_kept = threading.local()


def _workspace(n: int, dtype: torch.dtype) -> Tensor:
    """n numbers of memory, each thread's own, kept from call to call: fresh pages cost more than the copy."""
    flat = getattr(_kept, str(dtype), None)
    if flat is None or len(flat) < n:
        with torch.inference_mode(False):  # or it could not be written outside that mode
            flat = torch.empty(n, dtype=dtype)
        setattr(_kept, str(dtype), flat)
    return flat[:n]


def dense(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return (codes.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)
