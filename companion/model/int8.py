"""A matrix in one byte per weight: int8 codes and a scale for each output channel.

A row of a product is (sum over j of codes[i, j] x[j]) scale[i]: the scale leaves the sum, so nothing but the
codes is read for every weight. What is fastest on a CPU differs by the dtype of x (see the ledger of the
benchmarks):

- tiles: as many rows of codes as fit the near caches are turned into floats there and multiplied, then the
  next. In float32 that takes as long as reading the floats would have, or a fifth longer;
- packed: torch's own kernel, which multiplies what it has just unpacked in registers. Fast in bfloat16 for
  few rows; in float32 and float16 several times slower than tiles, so not asked there;
- compiled: where `companion.kernels.use` allows, for up to 8 rows in float32. Codes become floats in
  registers, and int8 saves time as well.

Elsewhere a matrix is turned into floats as a whole for each product: bytes are saved, time is not.

A mixture of experts with such matrices computes each expert that has rows, one after another.
"""

import threading
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int8
from torch import Tensor, nn

from ..cost import ModelSpec
from ..kernels.cpu.rows import linear, linear_wanted
from ..moe import MoE, Routing, capacity_of, combine, dispatch, gated, gather
from ..quantize import codec

TILE = 2**21  # bytes of floats at once: what a core's near caches hold
PACKED_ROWS = 16  # rows up to which torch's kernel is the faster one
PACKED_WIDTH = 64  # divides the inputs for which it is safe: with 60 it reads past the end and may crash
VECTORS = ("AVX2", "AVX512")  # instruction sets for which that kernel is more than a plain loop


class Int8Matrix(nn.Module):
    """codes (..., out, in) int8 and scale (..., out), in place of a weight of that shape.

    The scale is float32, or bfloat16 where the weight was; the codes are chosen for the rounded scale. Every
    weight is off by half a scale at most, that is 1/254 of the largest in its row, and a little for rounding.
    """

    def __init__(self, weight: Float[Tensor, "*more out in"]):
        """Raises ValueError for a weight with NaN or infinity in it."""
        super().__init__()
        exact = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        rows = codec("int8", scale_dtype=exact)
        # A piece at a time: beside a bfloat16 table of 2 GB there would be one of 4 GB in float32.
        flat = weight.detach().reshape(-1, weight.shape[-1])
        parts = [rows.quantize(piece) for piece in flat.split(max(1, 2**24 // max(1, flat.shape[1])))]
        codes, scale = (torch.cat([getattr(p, name) for p in parts]) for name in ("codes", "scale"))
        self.codes = nn.Parameter(codes.view(weight.shape), requires_grad=False)
        self.scale = nn.Parameter(scale.view(weight.shape[:-1]), requires_grad=False)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def forward(
        self, x: Float[Tensor, "*rows in"], bias: Float[Tensor, " out"] | None = None
    ) -> Float[Tensor, "*rows out"]:
        """x W' + bias in x's dtype, summed in float32 at least."""
        return int8_product(x, self.codes, self.scale, bias)

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "*more out in"]:
        """The weights as numbers."""
        return _dense(self.codes, self.scale, dtype)

    def looked_up(self, ids: Int[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape in"]:
        """Rows by number, as of an embedding."""
        return _dense(F.embedding(ids, self.codes), F.embedding(ids, self.scale[:, None])[..., 0], dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}"


def int8_product(
    x: Float[Tensor, "*rows in"],
    codes: Int8[Tensor, "out in"],
    scale: Float[Tensor, " out"],
    bias: Float[Tensor, " out"] | None = None,
) -> Float[Tensor, "*rows out"]:
    """F.linear(x, codes * scale, bias) in x's dtype; a whole matrix of floats is in memory only off the CPU,
    and where x needs a gradient."""
    if linear_wanted(x, codes, scale):
        return linear(x, codes, bias, scale)
    out, width = codes.shape
    rows = x.numel() // width
    if not rows or x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, _dense(codes, scale, x.dtype), bias)
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


def _dense(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return (codes.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)


MATRICES = ("w1", "w2", "shared_w1", "shared_w2")


class Int8MoE(MoE):
    """`companion.moe.MoE` whose w1, w2, shared_w1 and shared_w2 are `Int8Matrix`; the router keeps its dtype,
    since a rounded score may choose another expert."""

    @classmethod
    def of(cls, moe: MoE, spec: ModelSpec) -> "Int8MoE":
        """The same mixture, sharing what stays as it is. Raises ValueError for weights that hold NaN."""
        layer = cls.from_spec(
            spec, capacity_factor=moe.capacity_factor, dtype=moe.w1.dtype, device="meta"
        )  # no memory of its own
        for name in ("router", "router_bias", "b1", "b2", "shared_gate", "correction_bias"):
            setattr(layer, name, getattr(moe, name))
        for name in MATRICES:
            weight = getattr(moe, name)
            if weight is not None:
                delattr(layer, name)  # torch refuses to put a module where a parameter was
                setattr(layer, name, Int8Matrix(weight))
        return layer.requires_grad_(False).train(moe.training)

    def routed(self, x: Float[Tensor, "T K"], routing: Routing) -> Float[Tensor, "T K"]:
        capacity = None
        if self.capacity_factor is not None:
            capacity = capacity_of(x.shape[0], self.experts, self.top_k, self.capacity_factor)
        plan = dispatch(routing.ids, self.experts, capacity=capacity)
        h = _each(gather(x, plan), self.w1, plan.sizes, self.b1)
        h = gated(h, limit=self.swiglu_limit, alpha=self.swiglu_alpha)
        return combine(_each(h, self.w2, plan.sizes, self.b2), routing.weights, plan)

    def shared(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T K"]:
        out = self.shared_w2(gated(self.shared_w1(x)))
        return out if self.shared_gate is None else out * torch.sigmoid(x @ self.shared_gate.t())


def _each(x: Tensor, weight: Int8Matrix, sizes: Sequence[int], bias: Tensor | None) -> Tensor:
    """Rows (S, out): the first sizes[0] rows of x through expert 0, the next through expert 1."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    begin = 0
    for e, rows in enumerate(sizes):
        if rows:
            own = None if bias is None else bias[e]
            end = begin + rows
            out[begin:end] = int8_product(x[begin:end], weight.codes[e], weight.scale[e], own)
            begin = end
    return out
