"""Products with a weight matrix, and how they are asked for when there are few rows, on a CPU.

A decode step multiplies a row, or a few, with every matrix, so it should take as long as reading them. BLAS
libraries are made for many rows: from the second row on they pack the whole matrix before they use it, which
reads, writes and reads it again. Two things avoid that, on a machine with two cores that read 27 to 54 GB/s
(see the ledger of the benchmarks):

- sides: asked for y^T = W x^T, the library has a kernel for few columns that reads W once as it lies. Four
  rows then take hardly longer than one;
- pieces: a batch of two products or more, each with some of the outputs, goes another way than one product,
  on one thread too, and every thread gets its own.

`Tensors` are those of a checkpoint, asked for by name and with the shape that they must have.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.cpu.rows import linear, linear_wanted
from .int8 import Int8Matrix

FEW = 32  # rows; beyond, one product of the library is as fast
SIDES = 8  # rows up to which the sides are worth changing, for matrices with no fewer outputs than inputs


def matrix(parts: list[Tensor]) -> nn.Parameter:
    """Stack (out_i, in) matrices into one (out, in) weight of its own memory, a row per output."""
    return nn.Parameter(torch.cat(parts).detach().contiguous(), False)


def product(x: Tensor, weight: Tensor | Int8Matrix, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), x (..., in), weight (out, in); faster for few rows on a CPU.

    Which kernel computes it depends on the number of rows, so the last bits of a row's
    result do too.
    """
    if isinstance(weight, Int8Matrix):
        return weight(x, bias)
    out, width = weight.shape
    rows = x.numel() // width
    if not 0 < rows <= FEW or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return F.linear(x, weight, bias)
    if linear_wanted(x, weight):
        return linear(x, weight, bias)
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

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor, detached. Raises ValueError if it is missing or has another shape."""
        name = self.prefix + name
        if isinstance(self.source, Mapping):
            if name not in self.source:
                raise ValueError(f"{self.owner}: weights have no tensor {name!r}")
            x = self.source[name].detach()
        else:
            x = self.source(name)
        if tuple(x.shape) != shape:
            raise ValueError(f"{self.owner}: tensor {name!r} has shape {tuple(x.shape)}; need {shape}")
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
