"""One layer of a decoder: attention and a feed-forward, each behind a norm, added to the residual stream.

Norms divide by the root of the mean square (Zhang and Sennrich 2019); families differ in the weight behind
it. The mean square is taken in float32 whatever the input: 24,926 squared is beyond float16. The feed-forward
is gated, position by position (Shazeer 2020, "GLU variants").
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .products import Tensors, matrix, product, vector


class Block(nn.Module):
    """One layer: two additions to the residual stream, attention's and the feed-forward's."""

    def __init__(self, attention_norm: nn.Module, attention: nn.Module, ffn_norm: nn.Module, ffn: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.ffn_norm, self.ffn = ffn_norm, ffn

    def forward(self, x, rope, cos, sin, cache=None, lengths=None):
        x = x + self.attention(self.attention_norm(x), rope, cos, sin, cache, lengths)
        return x + self.ffn(self.ffn_norm(x))


class SandwichBlock(Block):
    """The same, with a second norm on what each part adds (Gemma 2 and 3)."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        ffn_norm: nn.Module,
        ffn: nn.Module,
        attention_after: nn.Module,
        ffn_after: nn.Module,
    ):
        super().__init__(attention_norm, attention, ffn_norm, ffn)
        self.attention_after, self.ffn_after = attention_after, ffn_after

    def forward(self, x, rope, cos, sin, cache=None, lengths=None):
        added = self.attention(self.attention_norm(x), rope, cos, sin, cache, lengths)
        x = x + self.attention_after(added)
        return x + self.ffn_after(self.ffn(self.ffn_norm(x)))


_HALVES = (torch.float16, torch.bfloat16)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; 16-bit inputs are rounded before the weight (Llama)."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = vector([weight]), eps

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        if x.dtype in _HALVES:
            return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class WideRMSNorm(RMSNorm):
    """The same, with 16-bit inputs rounded behind the weight (gpt-oss)."""

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        if x.dtype in _HALVES:
            return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight): a stored weight of zero leaves the norm alone (Gemma)."""

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        if x.dtype in _HALVES:
            return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], 1.0 + self.weight, self.eps)


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
