"""Rounding up and down to a float type, so that a scale cuts nothing off; half a unit in the last place."""

import math

import torch
from torch import Tensor


def at_least(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of `dtype` that is not below x (float32); the largest finite one beyond that."""
    return -at_most(-x, dtype)


def at_most(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest number of `dtype` that is not above x (float32); the lowest finite one below that."""
    most = torch.finfo(dtype).max
    near = x.clamp(-most, most).to(dtype)
    # 5/8 of a gap below x, rounded again, is the neighbour below: never a tie, wherever x is in its gap.
    lower = (x - 1.25 * half_ulp(x, dtype)).clamp(-most, most).to(dtype)
    return torch.where(near.to(torch.float32) > x, lower, near)


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding to `dtype` may change: half the gap between its numbers around x, in float32."""
    info = torch.finfo(dtype)
    precision = round(math.log2(info.eps))  # -10 for float16
    finest = round(math.log2(info.smallest_normal)) + precision  # -24 for float16
    _, exponent = torch.frexp(x.to(torch.float32))  # x = m * 2**exponent, m from 0.5 to below 1
    exponent = torch.where(x == 0, finest, exponent - 1 + precision).clamp_min(finest)
    return torch.ldexp(torch.ones_like(x, dtype=torch.float32), exponent - 1)
