"""Products with a weight matrix, and the order in which its numbers lie, for a few rows on a CPU.

A decode step multiplies one row with every matrix, so it should take as long as reading them. BLAS libraries
are made for many rows. Two things bring them near the memory's speed, on a machine with two cores that read
32 to 54 GB/s (see the ledger of the benchmarks):

- order: a row times a matrix that lies transposed streams at 25 GB/s where the usual order gives 11, if the
  matrix has more outputs than inputs;
- threads: the library's one-row product hardly gains from a second one. Cut into as many pieces as there are
  threads, and handed over as one batch, it does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 32  # rows; beyond, one product of the library is as fast


def matrix(parts: list[Tensor]) -> nn.Parameter:
    """Stack (out_i, in) matrices into one (out, in) weight, in the memory order that few rows like.

    float32 on a CPU with at least as many outputs as inputs: transposed. F.linear takes either order.
    """
    out, width = sum(p.shape[0] for p in parts), parts[0].shape[1]
    like = parts[0]
    if like.dtype == torch.float32 and like.device.type == "cpu" and out >= width:
        weight = torch.empty(width, out, dtype=like.dtype).t()
    else:
        weight = torch.empty(out, width, dtype=like.dtype, device=like.device)
    row = 0
    for part in parts:
        weight[row : row + part.shape[0]] = part
        row += part.shape[0]
    return nn.Parameter(weight, requires_grad=False)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias) for x (..., in) and weight (out, in); faster for few rows on a CPU.

    The pieces of a transposed weight are sums over parts of the inputs, so the last bits of a result depend
    on the number of threads.
    """
    out, width = weight.shape
    rows = x.numel() // width
    if rows > FEW or not rows or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return F.linear(x, weight, bias)
    by_outputs = weight.is_contiguous()
    n = pieces(out if by_outputs else width)
    if n == 1:
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, width)
    if by_outputs:  # each piece makes some of the outputs
        y = torch.bmm(flat.expand(n, rows, width), weight.view(n, out // n, width).transpose(1, 2))
        y = y.transpose(0, 1).reshape(*x.shape[:-1], out)
    else:  # each piece reads some of the inputs, and the results add up
        y = torch.bmm(flat.view(rows, n, -1).transpose(0, 1), weight.t().view(n, width // n, out))
        y = y.sum(dim=0).view(*x.shape[:-1], out)
    return y if bias is None else y + bias


def pieces(n: int) -> int:
    """The largest number of equal pieces of n, at most one per thread."""
    return next(p for p in range(torch.get_num_threads(), 0, -1) if n % p == 0)
