"""The gated feed-forward, position by position (Shazeer 2020, "GLU variants")."""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .products import matrix, product
from .tensors import Tensors, vector


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu_pytorch_tanh": gelu_tanh,
}


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one matrix, gate rows before up rows.

    d, width: of the residual stream and between the matrices. act: one of ACTIVATIONS.
    """

    def __init__(self, take: Tensors, d: int, width: int, act: str = "silu", bias: bool = False):
        super().__init__()
        names = ["gate_proj", "up_proj"]
        self.act = ACTIVATIONS[act]
        self.gate_up = matrix([take(f"{n}.weight", width, d) for n in names])
        self.gate_up_bias = vector([take(f"{n}.bias", width) for n in names]) if bias else None
        self.down = matrix([take("down_proj.weight", d, width)])
        self.down_bias = vector([take("down_proj.bias", d)]) if bias else None

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        gate, up = product(x, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return product(self.act(gate) * up, self.down, self.down_bias)
