"""Root-mean-square norms (Zhang and Sennrich 2019), and how families differ in the weight behind them.

The mean square is taken in float32 whatever the input: 24,926 squared is beyond float16.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .tensors import vector

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
