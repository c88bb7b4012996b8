"""Products with a weight matrix, in floats or in int8, by the backend of the pass.

`Tensors` are those of a checkpoint, asked for by name and with the shape that they must have.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..attend import backend
from .int8 import Int8Matrix


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
