"""Products with a weight matrix, in floats or in int8, by the backend of the pass.

An int8 matrix takes one byte per weight: codes, and a scale for each output channel.

A row of a product is (sum over j of codes[i, j] x[j]) scale[i]: the scale leaves the sum, so nothing but the
codes is read for every weight. How it is multiplied is the backend's affair: by torch in tiles
(`companion.attend.products`), or, where `companion.kernels.use` allows, for up to 8 rows in float32, by
compiled loops in which codes become floats in registers, and int8 saves time as well.

`Tensors` are those of a checkpoint, asked for by name and with the shape that they must have.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..attend import backend
from ..attend.products import dense
from ..checks import shape
from ..cost import ModelSpec
from ..moe import MoE, Routing, capacity_of, combine, dispatch, gated, gather
from ..quantize import codec


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
        return backend(x).linear(x, self.codes, bias, self.scale)

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "*more out in"]:
        """The weights as numbers."""
        return dense(self.codes, self.scale, dtype)

    def looked_up(self, ids: Int[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape in"]:
        """Rows by number, as of an embedding."""
        return dense(F.embedding(ids, self.codes), F.embedding(ids, self.scale[:, None])[..., 0], dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}"


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
    begin, linear = 0, backend(x).linear
    for e, rows in enumerate(sizes):
        if rows:
            own = None if bias is None else bias[e]
            end = begin + rows
            out[begin:end] = linear(x[begin:end], weight.codes[e], own, weight.scale[e])
            begin = end
    return out


def matrix(parts: list[Tensor]) -> nn.Parameter:
    """Stack (out_i, in) matrices into one (out, in) weight of its own memory, a row per output."""
    return nn.Parameter(torch.cat(parts).detach().contiguous(), False)


def product(x: Tensor, weight: Tensor | Int8Matrix, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), x (..., in), weight (out, in); faster for few rows on a CPU.

    How, `companion.attend` says: by torch (`companion.attend.products`), or by compiled loops.
    """
    if isinstance(weight, Int8Matrix):
        return weight(x, bias)
    return backend(x).linear(x, weight, bias)


Source = Mapping[str, Tensor] | Callable[[str], Tensor]


class Tensors:
    """Tensors by name, below a prefix: `take("weight", 8, 16)` is a tensor of shape (8, 16).

    source: a mapping from names to tensors, or a function of a name that raises ValueError if there is none.
    owner: what to call the model in an error.
    """

    def __init__(self, source: Source, owner: str, prefix: str = ""):
        self.source, self.owner, self.prefix = source, owner, prefix

    def under(self, prefix: str) -> "Tensors":
        """The tensors whose names go on with `prefix`."""
        return Tensors(self.source, self.owner, self.prefix + prefix)

    def __call__(self, name: str, *expected: int) -> Tensor:
        """The tensor, detached. Raises ValueError if it is missing or has another shape."""
        name = self.prefix + name
        if isinstance(self.source, Mapping):
            if name not in self.source:
                raise ValueError(f"{self.owner}: weights have no tensor {name!r}")
            x = self.source[name].detach()
        else:
            x = self.source(name)
        shape(f"{self.owner}: tensor {name!r}", x, *expected)
        return x

    def __contains__(self, name: str) -> bool:
        if isinstance(self.source, Mapping):
            return self.prefix + name in self.source
        try:
            self.source(self.prefix + name)
        except ValueError:
            return False
        return True


def vector(parts: list[Tensor]) -> nn.Parameter:
    """Concatenate vectors (norm weights, biases) into one parameter of its own memory."""
    return nn.Parameter(torch.cat(parts).detach().clone(), requires_grad=False)
